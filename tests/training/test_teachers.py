"""Teachers in runs: the shipped recipes, equivalences, what the student learns, averages and shared weights."""

import json
import signal as signals
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.training.conftest import losses_of, weights_of
from tests.training.test_distributed import _shard_on_cpu, run_on, same
from tests.training.test_loop import _killed, run_in_child

from statewise import train
from statewise.errors import DataError, RecipeError
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.training.checkpoint import load_tensors

SMALL = ["batch.rollouts=8", "batch.micro_rows=4", "budget.max_steps=6", "eval.tasks=[]", "optim.lr=1e-2"]
WHERE = {
    "opd_full": ["signal.0.teacher"],
    "opd_sampled": ["signal.0.teacher"],
    "opd_topk": ["signal.0.teacher"],
    "opd_jsd": ["signal.0.teacher"],
    "opd_sparse": ["signal.0.teacher"],
    "opd_reward_mix": ["signal.1.teacher"],
    "opd_off_policy": ["source.teacher", "signal.0.teacher"],
    "opd_continuation": ["source.teacher"],
    "offline_kd": ["signal.0.teacher"],
    "replay_mix": ["signal.0.teacher"],
    "self_teacher": [],
}
OF_EACH_KIND = ["opd_full", "opd_sparse", "opd_continuation", "replay_mix", "self_teacher"]


@pytest.fixture(scope="session")
def teacher_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model after 30 steps of SFT, as a run directory."""
    plain = {
        "model": {"path": str(model_dir)},
        "source": {"kind": "dataset", "data": "tiny:math", "count": 64},
        "signal": ["gold"],
        "objective": ["nll"],
        "batch": {"rollouts": 16},
        "optim": {"lr": 1e-2},
        "budget": {"max_steps": 30},
    }
    return train(Recipe.from_plain(plain), tmp_path_factory.mktemp("teacher") / "run", quiet=True).path


def small(name: str, model_dir: Path, teacher: Path, *changes: str) -> Recipe:
    """A shipped recipe on the small model: six steps of eight rollouts of 16 tokens."""
    own = [f"model.path={model_dir}", *(f"{where}={teacher}" for where in WHERE[name]), *SMALL]
    if name == "replay_mix":
        own += ["source.parts.0.source.source.max_tokens=16"]
    elif name not in ("offline_kd", "self_teacher"):
        own += ["source.max_tokens=16", "source.count=24"]
    if name == "opd_reward_mix":
        own += ["source.group_size=4"]
    return Recipe.load(name, [*own, *changes])


@pytest.mark.parametrize("name", WHERE)
def test_shipped_recipes_run(name: str, model_dir: Path, teacher_dir: Path, tmp_path: Path):
    run = train(small(name, model_dir, teacher_dir, "budget.max_steps=3"), tmp_path / "run", quiet=True)
    rows = [row for row in run.metrics() if "loss" in row]
    assert len(rows) == 3 and all(row["grad_norm"] > 0 for row in rows[1:])
    again = Recipe.from_plain(run.recipe().to_plain())
    assert again.hash == run.recipe_hash


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_any_split_of_a_batch_gives_the_same_losses(name: str, model_dir: Path, teacher_dir: Path, tmp_path: Path):
    found = []
    for index, split in enumerate([[], ["batch.micro_rows=1"], ["batch.micro_rows=none", "batch.pack=256"]]):
        recipe = small(name, model_dir, teacher_dir, "budget.max_steps=2", *split)
        found.append(losses_of(train(recipe, tmp_path / str(index), quiet=True)))
    assert found[1] == pytest.approx(found[0], abs=2e-5)
    assert found[2] == pytest.approx(found[0], abs=2e-5)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_killed_and_resumed_ends_with_the_same_bytes(name: str, model_dir: Path, teacher_dir: Path, tmp_path: Path):
    recipe = small(name, model_dir, teacher_dir, "checkpoint.every=2")
    whole, cut = train(recipe, tmp_path / "whole", quiet=True).path, tmp_path / "cut"
    assert run_in_child(_killed(recipe, cut, "statewise.training.loop.take_step", 4)) == -signals.SIGKILL
    train(recipe, cut, resume=True, quiet=True)
    files = ["model.safetensors", "optimizer.safetensors"]
    if name in ("replay_mix", "self_teacher"):
        files.append("components.safetensors")
    for file in files:
        assert weights_of(cut, 6, file) == weights_of(whole, 6, file), file
    assert losses_of(RunDir.open(cut)) == losses_of(RunDir.open(whole))


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_two_processes_equal_one(name: str, model_dir: Path, teacher_dir: Path, tmp_path: Path):
    plain = small(name, model_dir, teacher_dir).to_plain()
    plain["optim"] = {"optimizer": "sgd", "lr": 0.1}  # Adam turns gradients that cancel into rounding noise
    same(run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two"))


def test_the_student_moves_to_its_teacher(model_dir: Path, teacher_dir: Path, tmp_path: Path):
    """Full reverse KL at the student's own states falls to a small share in 20 steps."""
    recipe = small("opd_full", model_dir, teacher_dir, "budget.max_steps=20", "batch.rollouts=16")
    losses = losses_of(train(recipe, tmp_path / "run", quiet=True))
    assert losses[0] > 0.5 and max(losses[-3:]) < 0.3 * losses[0], losses


def test_sampled_opd_lowers_the_reverse_kl(model_dir: Path, teacher_dir: Path, tmp_path: Path):
    constant = ["optim.schedule=constant", "optim.warmup=0"]  # the shipped one moves half as far in 20 steps
    changes = ["budget.max_steps=20", "batch.rollouts=64", "batch.micro_rows=64", *constant]
    rows = train(small("opd_sampled", model_dir, teacher_dir, *changes), tmp_path / "run", quiet=True).metrics()
    gaps = [row["sampled_reverse_kl"] for row in rows if "sampled_reverse_kl" in row]
    assert max(gaps[-3:]) < 0.5 * gaps[0], gaps


def test_another_teacher_gives_other_weights(model_dir: Path, teacher_dir: Path, tmp_path: Path):
    """A signal that is asked for and dropped would leave the weights alike."""
    for name in ("opd_full", "opd_sampled", "opd_continuation"):
        teachers = (teacher_dir, small_teacher(model_dir, tmp_path / "other"))
        runs = [
            train(small(name, model_dir, teacher, "budget.max_steps=2"), tmp_path / f"{name}{index}", quiet=True)
            for index, teacher in enumerate(teachers)
        ]
        assert weights_of(runs[0].path, 2) != weights_of(runs[1].path, 2)


def small_teacher(model_dir: Path, path: Path, *, vocab: int = 320, tokenizer: Any = None) -> Path:
    """Another random model of the same family."""
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

    if not path.exists():
        config = AutoConfig.from_pretrained(model_dir)
        config.vocab_size, config.hidden_size = vocab, 48
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(path)
        (tokenizer or AutoTokenizer.from_pretrained(model_dir)).save_pretrained(path)
    return path


def test_a_padded_vocabulary_of_another_size_is_the_same_teacher(model_dir: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    plain, padded = small_teacher(model_dir, tmp_path / "plain"), tmp_path / "padded"
    small_teacher(model_dir, padded, vocab=352)
    model, wide = AutoModelForCausalLM.from_pretrained(plain), AutoModelForCausalLM.from_pretrained(padded)
    state = model.state_dict()
    with torch.no_grad():
        for name, value in wide.state_dict().items():
            value[: state[name].shape[0]].copy_(state[name])
        wide.get_input_embeddings().weight[320:] = 100.0
    wide.save_pretrained(padded)
    losses = [
        losses_of(train(small("offline_kd", model_dir, t, "budget.max_steps=3"), tmp_path / f"run{i}", quiet=True))
        for i, t in enumerate([plain, padded])
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_another_tokenizer_is_refused_with_the_reason(model_dir: Path, tmp_path: Path):
    from random import Random

    from statewise.tiny import mixture
    from statewise.tiny.tokenizer import train_tokenizer

    random = Random(7)
    other = train_tokenizer((mixture.draw_document(random, mixture.MIXTURE) for _ in range(300)), 300, 256)
    teacher = small_teacher(model_dir, tmp_path / "teacher", tokenizer=other)
    for name in ("offline_kd", "opd_continuation"):
        with pytest.raises(RecipeError, match=r"another vocabulary.*id \d+ is '.+' here and '.+' there"):
            train(small(name, model_dir, teacher), tmp_path / name, quiet=True)


def test_the_average_is_the_recursion_over_the_updates(model_dir: Path, tmp_path: Path):
    recipe = small(
        "self_teacher", model_dir, tmp_path, "checkpoint.every=1", "checkpoint.keep_last=9", "budget.max_steps=3"
    )
    run = train(recipe, tmp_path / "run", quiet=True)
    expected = load_file(model_dir / "model.safetensors")
    for path in run.checkpoints().values():
        weights = load_file(path / "model.safetensors")
        (average,) = load_tensors(path / "components.safetensors").values()
        expected = {name: 0.95 * value + 0.05 * weights[name] for name, value in expected.items()}
        for name, value in average.items():
            assert torch.allclose(value, expected[name], atol=1e-6), name


LORA = ["model.adapter.rank=4", "model.adapter.alpha=64"]


def test_step0_of_a_lora_is_its_base_and_costs_no_weights(model_dir: Path, tmp_path: Path):
    """KL to "step0" equals KL to the base as a model of its own; so does a LoRA teacher on the policy's base."""
    from statewise.models.load import load_policy
    from statewise.training.opened import Models, shared_base

    top = {"signal": ["gold", {"kind": "teacher", "teacher": "step0"}]}
    base = small("self_teacher", model_dir, tmp_path, *LORA).to_plain() | top
    copy = tmp_path / "copy"
    small_copy(model_dir, copy)
    other = {**base, "signal": ["gold", {"kind": "teacher", "teacher": str(copy)}]}
    first, second = (
        train(Recipe.from_plain(plain), tmp_path / f"run{i}", quiet=True) for i, plain in enumerate((base, other))
    )
    assert losses_of(first) == pytest.approx(losses_of(second), abs=1e-6)
    policy = load_policy(Recipe.from_plain(base).model, trainable=True)
    own = {p.data_ptr() for p in policy.model.parameters()}
    assert {p.data_ptr() for p in shared_base(policy.model).parameters()} <= own
    adapter = first.checkpoints()[6]
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(model_dir)
    optimizer = torch.optim.SGD([p for p in policy.model.parameters() if p.requires_grad])
    models = Models(Recipe.from_plain(base), policy, policy.model, optimizer, "cpu", {})
    opened = models(str(first.path))
    extra = [n for n, p in opened.policy.model.named_parameters() if p.data_ptr() not in own]
    assert extra and all("lora_" in name for name in extra)
    alone = load_policy(str(adapter))
    tokens = [[5, 6, 7, 8, 9, 10]]
    from statewise.models.score import InProcessScorer

    expected = InProcessScorer(alone.model, pad_id=0).score(tokens)[0]["logprobs"]
    assert opened.scorer.score(tokens)[0]["logprobs"] == pytest.approx(expected, abs=1e-6)
    assert all(p.requires_grad for n, p in policy.model.named_parameters() if "lora_" in n)


def small_copy(source: Path, target: Path) -> None:
    import shutil

    shutil.copytree(source, target)


def test_teachers_are_routed_by_a_field(model_dir: Path, teacher_dir: Path, tmp_path: Path):
    """Each sample gets the loss that it has with its own teacher alone."""
    data = tmp_path / "data.jsonl"
    rows = [
        {"id": str(i), "prompt": f"{i} + {i}", "completion": f" = {2 * i}", "domain": "ab"[i % 2]} for i in range(8)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = small_teacher(model_dir, tmp_path / "other")

    def first_loss(name: str, domain: str, **signal: Any) -> float:
        used = tmp_path / f"{domain}.jsonl"
        used.write_text("".join(json.dumps(row) + "\n" for row in rows if row["domain"] in domain))
        plain = {
            "model": {"path": str(model_dir)},
            "source": {"kind": "dataset", "data": str(used)},
            "signal": [{"kind": "teacher", **signal}],
            "objective": [{"loss": "kl_teacher_student", "reduce": "sequence_mean"}],
            "batch": {"rollouts": 4 * len(domain), "micro_rows": 3},
            "budget": {"max_steps": 1},
        }
        return losses_of(train(Recipe.from_plain(plain), tmp_path / name, quiet=True))[0]

    routes = {"a": str(teacher_dir), "b": str(other)}
    both = first_loss("both", "ab", by="domain", routes=routes)
    rest = first_loss("rest", "ab", by="domain", routes={"a": str(teacher_dir)}, teacher=str(other))
    a = first_loss("a", "a", teacher=str(teacher_dir))
    b = first_loss("b", "b", teacher=str(other))
    assert both == pytest.approx((a + b) / 2, abs=1e-6) and rest == both
    assert a != pytest.approx(b, abs=1e-3)
    with pytest.raises(DataError, match=r"field 'domain' is 'b'.*names no teacher"):
        first_loss("none", "ab", by="domain", routes={"a": str(teacher_dir)})


def test_a_teacher_beside_a_sharded_policy(
    model_dir: Path, teacher_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    _shard_on_cpu(monkeypatch)
    plain = small("offline_kd", model_dir, teacher_dir).to_plain()
    plain["optim"] = {"optimizer": "sgd", "lr": 0.1}
    same(run_on(1, plain, tmp_path / "one"), run_on(2, plain, tmp_path / "two"))
    average = small("self_teacher", model_dir, teacher_dir).to_plain()
    with pytest.raises(RuntimeError, match=r"'ema': is not possible while parameters are sharded"):
        run_on(2, average, tmp_path / "average")
