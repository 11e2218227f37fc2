"""vLLM as the policy's sampler: our own part, on an engine that stands in for vLLM. `tests/vllm` has the real one."""

import gc
import json
import sys
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.server import Server, serving
from tests.training.conftest import model_dir  # noqa: F401 - a fixture

from statewise.errors import EndpointError, MissingExtra, RecipeError
from statewise.models.engines import Folders, LocalEngine, ServerEngine, start_engine
from statewise.models.generate import InProcessSampler
from statewise.models.http import Client
from statewise.models.load import LoadedPolicy, load_policy
from statewise.models.probe import Wanted, probe
from statewise.models.vllm import HandOver, VllmSampler, all_tensors, check_adapter, default_gap
from statewise.settings import Adapter, ModelSettings, SamplerSettings
from statewise.types import Completion, Sampling

PROMPTS = [[5, 6, 7], [8, 9], [10] * 5]
SAMPLING = Sampling(5, temperature=0.8, seed=1)
GAP = default_gap(torch.float32)


class StandIn:
    """An engine with weights of its own."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self.model = deepcopy(policy.model)
        self.versions: list[int] = []
        self.deaf = False

    def hand_over(self, weights: HandOver) -> None:
        self.versions.append(weights.version)
        if not self.deaf:
            with torch.no_grad():
                for name, value in self.model.state_dict(keep_vars=True).items():
                    value.data.copy_(weights.tensors()[name])

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, rows: Sequence[int]) -> list[Completion]:
        return InProcessSampler(self.model, pad_id=0).generate(prompts, sampling, rows=rows)


@pytest.fixture
def policy(model_dir: Path) -> LoadedPolicy:  # noqa: F811
    return load_policy(str(model_dir))


@pytest.fixture
def stand_in(policy: LoadedPolicy) -> StandIn:
    return StandIn(policy)


def move(policy: LoadedPolicy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def test_every_hand_over_has_a_version_and_is_checked_once(policy: LoadedPolicy, stand_in: StandIn):
    sampler = VllmSampler(stand_in, GAP)
    with pytest.raises(EndpointError, match="before it was handed any weights"):
        sampler.generate(PROMPTS, SAMPLING)
    for version in (0, 1):
        sampler.load(policy, version)
        found = sampler.generate(PROMPTS, SAMPLING, rows=[3, 4, 5])
        assert found == InProcessSampler(policy.model, pad_id=0).generate(PROMPTS, SAMPLING, rows=[3, 4, 5])
        assert sampler.version == version and sampler.last_gap is not None and sampler.last_gap < 1e-5
        move(policy)
    sampler.generate(PROMPTS, SAMPLING)  # within the step: its weights are not those of the optimizer any more
    assert stand_in.versions == [0, 1]


def test_an_engine_with_old_weights_is_noticed(policy: LoadedPolicy, stand_in: StandIn):
    sampler = VllmSampler(stand_in, GAP)
    sampler.load(policy, 0)
    sampler.generate(PROMPTS, SAMPLING)
    stand_in.deaf = True
    move(policy)
    sampler.load(policy, 1)
    with pytest.raises(EndpointError, match=r"hand-over of step 1 its log-probabilities differ.*by 0\.\d+ nats"):
        sampler.generate(PROMPTS, SAMPLING)
    with pytest.raises(EndpointError, match="log-probabilities differ"):
        VllmSampler(stand_in, GAP, version=1, _policy=policy.model, _unchecked=True).generate(PROMPTS, SAMPLING)


def test_a_cut_law_is_not_compared_but_the_next_is(policy: LoadedPolicy, stand_in: StandIn):
    stand_in.deaf = True
    sampler = VllmSampler(stand_in, GAP)
    move(policy)
    sampler.load(policy, 0)
    sampler.generate(PROMPTS, Sampling(5, top_k=3))
    with pytest.raises(EndpointError, match="log-probabilities differ"):
        sampler.generate(PROMPTS, SAMPLING)


def test_log_probabilities_that_are_no_numbers_are_noticed(policy: LoadedPolicy, stand_in: StandIn):
    nan = float("nan")
    stand_in.generate = lambda prompts, sampling, rows: [Completion((1,), (nan,), "length")] * len(prompts)  # type: ignore[method-assign]
    sampler = VllmSampler(stand_in, GAP)
    sampler.load(policy, 0)
    with pytest.raises(EndpointError, match="differ from the trainer's by nan"):
        sampler.generate(PROMPTS, SAMPLING)


def test_one_rank_hands_over_and_all_learn_of_its_failure(policy: LoadedPolicy, stand_in: StandIn):
    other = EndpointError("rank 0 could not")
    follower = VllmSampler(stand_in, GAP, hands=False, agree=lambda problem: problem or other)
    with pytest.raises(EndpointError, match="rank 0 could not"):
        follower.load(policy, 3)
    assert stand_in.versions == [] and follower.version is None
    told: list[Any] = []
    VllmSampler(stand_in, GAP, agree=lambda problem: told.append(problem)).load(policy, 0)
    assert told == [None] and stand_in.versions == [0]


def test_limits_follow_the_dtype():
    assert [default_gap(d) for d in (torch.float32, torch.float16, torch.bfloat16)] == [0.002, 0.02, 0.1]


def test_a_tied_head_goes_under_both_names(policy: LoadedPolicy):
    assert policy.model.config.tie_word_embeddings
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= set(all_tensors(policy.model))


# Folders of weights


def test_folders_are_whole_few_and_gone_in_the_end(tmp_path: Path):
    seen: list[list[str]] = []

    def write(folder: Path) -> None:
        seen.append([p.name for p in tmp_path.iterdir() if not p.name.startswith(".tmp_")])
        (folder / "weights").write_text("x")

    folders = Folders(tmp_path)
    made = [folders.write(HandOver(v, dict, write, True)) for v in range(4)]
    assert [p.exists() for p in made] == [False, False, True, True] and made[3].name.endswith("_000003")
    assert [len(names) for names in seen] == [0, 1, 2, 2], "a folder has its name when it is whole"
    own = Folders()
    kept = own.write(HandOver(0, dict, write, True))
    assert kept.exists()
    del folders, own
    gc.collect()
    assert not kept.exists() and not any(p.exists() for p in made)


# vLLM in this process


class FakeLlm:
    """Records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.resets = 0
        self.loaded: dict[str, Any] = {}

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights" and self.resets == len(self.loaded and [1])
        self.loaded = dict(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    def generate(self, prompts: Any, params: Any, use_tqdm: bool, lora_request: Any) -> list[Any]:
        self.asked.append((prompts, params, lora_request))
        one = SimpleNamespace(
            token_ids=[4, 2],
            finish_reason="stop",
            logprobs=[{4: SimpleNamespace(logprob=-1.0)}, {2: SimpleNamespace(logprob=-0.5)}],
        )
        return [SimpleNamespace(outputs=[one]) for _ in prompts]


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm, lora, request = ModuleType("vllm"), ModuleType("vllm.lora"), ModuleType("vllm.lora.request")
    vllm.SamplingParams = SimpleNamespace  # type: ignore[attr-defined]
    request.LoRARequest = lambda name, number, path, load_inplace: SimpleNamespace(name=name, number=number, path=path)  # type: ignore[attr-defined]
    for module in (vllm, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("fake_vllm")
def test_what_vllm_is_asked(policy: LoadedPolicy):
    llm = FakeLlm()
    engine = LocalEngine(llm, max_length=20)
    sampler = VllmSampler(engine, GAP)
    sampler.load(policy, 0)
    assert set(llm.loaded) == set(all_tensors(policy.model)) and llm.resets == 1
    done = engine.generate([[7] * 20, [7] * 18, [7]], Sampling(8, temperature=0.7, stop_ids=(2, 3), seed=9), [5, 6, 7])
    assert done[0] == Completion((), (), "length") and done[1] == Completion((4, 2), (-1.0, -0.5), "stop")
    prompts, params, adapter = llm.asked[0]
    assert [p["prompt_token_ids"] for p in prompts] == [[7] * 18, [7]] and adapter is None
    first, second = (vars(p) for p in params)
    assert first["max_tokens"] == 2 and second["max_tokens"] == 8 and first["seed"] != second["seed"]
    expected = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "stop_token_ids": [2, 3], "ignore_eos": True}
    assert expected.items() <= first.items()
    with pytest.raises(RecipeError, match="takes 2 at most"):
        engine.generate(PROMPTS, Sampling(8, temperature=2.5), [0, 1, 2])


@pytest.mark.usefixtures("fake_vllm")
def test_adapters_have_a_folder_a_version(model_dir: Path):  # noqa: F811
    policy = load_policy(ModelSettings(path=str(model_dir), adapter=Adapter(rank=4, alpha=8)), trainable=True)
    llm = FakeLlm()
    engine = LocalEngine(llm, max_length=20)
    for version in (0, 1):
        VllmSampler(engine, GAP).load(policy, version)
        folder = Path(engine.adapter.path)
        assert engine.adapter.number == version + 1 and engine.adapter.name == f"policy-{folder.name}"
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
        assert all("lora_" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert llm.resets == 2 and llm.loaded == {}


def test_without_vllm_the_install_line_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"pip install 'statewise\[vllm\]'"):
        start_engine("tiny", dtype="float32", memory=0.3, max_length=64, max_rows=4)


# A server


def served(server: Server, folder: Path) -> ServerEngine:
    client = Client(server.url, retries=0, say=lambda text: None)
    return ServerEngine(probe(client, None, server.policy.tokenizer, 320, Wanted(False, None, True)), folder)


def test_a_server_is_told_of_folders(policy: LoadedPolicy, model_dir: Path, tmp_path: Path):  # noqa: F811
    with serving(Server(model_dir, processed=True)) as server:
        sampler = VllmSampler(served(server, tmp_path), GAP)
        for version in (0, 1):
            move(policy)
            sampler.load(policy, version)
            assert sampler.generate(PROMPTS, SAMPLING) and sampler.last_gap is not None and sampler.last_gap < 1e-4
        assert [path for path, _ in server.told] == ["/collective_rpc", "/reset_prefix_cache"] * 2


def test_a_server_takes_adapters(model_dir: Path, tmp_path: Path):  # noqa: F811
    policy = load_policy(ModelSettings(path=str(model_dir), adapter=Adapter(rank=4, alpha=8)), trainable=True)
    with serving(Server(model_dir, processed=True)) as server:
        engine = served(server, tmp_path)
        sampler = VllmSampler(engine, GAP)
        names = []
        for version in (0, 1):
            sampler.load(policy, version)
            sampler.generate(PROMPTS, SAMPLING)  # a fresh adapter changes nothing
            names.append(server.asked[-1]["model"])
        assert len(set(names)) == 2 and names[1] == engine.adapter
        assert [path for path, _ in server.told] == ["/v1/load_lora_adapter"] * 2 + ["/v1/unload_lora_adapter"]
        assert server.told[-1][1] == {"lora_name": names[0]}


def test_a_server_that_was_started_otherwise_is_told_how(policy: LoadedPolicy, model_dir: Path, tmp_path: Path):  # noqa: F811
    with serving(Server(model_dir, processed=True, takes_weights=False)) as server:
        sampler = VllmSampler(served(server, tmp_path), GAP)
        with pytest.raises(EndpointError, match=r"did not take the weights of step 0(.|\n)*VLLM_SERVER_DEV_MODE=1"):
            sampler.load(policy, 0)
    with serving(Server(model_dir)) as server:
        sampler = VllmSampler(served(server, tmp_path), GAP)
        sampler.load(policy, 0)
        with pytest.raises(EndpointError, match="--logprobs-mode processed_logprobs"):
            sampler.generate(PROMPTS, SAMPLING)


# Settings


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"engine": "built-in", "memory": 0.5}, "memory: belongs to engine = 'vllm'"),
        ({"engine": "vllm", "folder": "x"}, "belongs to a server"),
        ({"engine": "vllm", "url": "http://h/v1", "max_length": 9}, "give it to `vllm serve`"),
    ],
)
def test_settings_that_have_no_meaning(settings: dict[str, Any], reason: str):
    with pytest.raises(RecipeError, match=reason):
        SamplerSettings(**settings)


def test_a_text_is_the_engine():
    assert ModelSettings(sampler="vllm").sampler == SamplerSettings(engine="vllm")  # type: ignore[arg-type]


def test_adapters_that_vllm_cannot_serve():
    check_adapter(Adapter())
    for adapter in (Adapter(dora=True), Adapter(modules_to_save=["lm_head"])):
        with pytest.raises(RecipeError, match="vLLM can't serve it"):
            check_adapter(adapter)
