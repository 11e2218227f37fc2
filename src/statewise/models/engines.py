"""vLLM in this process, and vLLM behind `vllm serve`: the two engines of `VllmSampler`."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from statewise.errors import EndpointError, MissingExtra, RecipeError
from statewise.files import open_to_others
from statewise.models.endpoint import EndpointSampler
from statewise.models.http import Refused
from statewise.models.probe import Probed
from statewise.models.vllm import HandOver
from statewise.types import Completion, Sampling, derive_seed

HOTTEST = 2.0
KEPT = 2  # folders of weights: a server may still read the one before
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as a bound
SERVE = "VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL"


class Folders:
    """Folders of weights under `root` (None: a temporary one), each whole when it has its name; the last two are kept, and
    none when this object is gone."""

    def __init__(self, root: Path | None = None):
        self.root = Path(tempfile.mkdtemp(prefix="statewise-vllm-")) if root is None else root
        self._made: list[Path] = []
        weakref.finalize(self, _remove, self._made if root is not None else [self.root])

    def write(self, weights: HandOver) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        target = self.root / f"{uuid4().hex[:8]}_{weights.version:06d}"
        temporary = target.with_name(f".tmp_{target.name}")
        temporary.mkdir()
        weights.write(temporary)
        open_to_others(temporary)
        os.replace(temporary, target)
        self._made.append(target)
        _remove(self._made[:-KEPT])
        del self._made[:-KEPT]
        return target


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


class LocalEngine:
    """vLLM in this process. llm: a `vllm.LLM` whose core runs in this process and whose log-probabilities are processed."""

    def __init__(self, llm: Any, max_length: int):
        self.llm, self.max_length = llm, max_length
        self.folders = Folders()
        self.adapter: Any = None

    def hand_over(self, weights: HandOver) -> None:
        if weights.is_adapter:
            from vllm.lora.request import LoRARequest

            path = self.folders.write(weights)
            self.adapter = LoRARequest(f"policy-{path.name}", weights.version + 1, str(path), load_inplace=True)
        else:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.tensors().items()})
        if not self.llm.reset_prefix_cache():
            raise EndpointError("vLLM: could not drop its prefix cache, which holds keys and values of older weights.")

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, rows: Sequence[int]) -> list[Completion]:
        limits = [min(sampling.max_tokens, self.max_length - len(p)) for p in prompts]
        asked = [i for i, limit in enumerate(limits) if limit > 0]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(prompts[i])} for i in asked],
            [_params(sampling, limits[i], derive_seed(sampling.seed, "row", int(rows[i]))) for i in asked],
            use_tqdm=False,
            lora_request=self.adapter,
        )
        done = dict(zip(asked, map(_completion, outputs), strict=True))
        return [done.get(i, Completion((), (), "length")) for i in range(len(prompts))]


def _params(sampling: Sampling, limit: int, seed: int) -> Any:
    from vllm import SamplingParams

    if sampling.temperature > HOTTEST:
        raise RecipeError(f"temperature = {sampling.temperature:g}: vLLM takes {HOTTEST:g} at most.")
    return SamplingParams(
        max_tokens=limit,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # it is among the stop ids, or not meant to end anything
        logprobs=0,
        detokenize=False,
    )


def _completion(output: Any) -> Completion:
    own = output.outputs[0]
    if own.finish_reason not in ("stop", "length"):
        raise EndpointError(f"vLLM: a completion ended with {own.finish_reason!r}; expected 'stop' or 'length'.")
    tokens = tuple(int(t) for t in own.token_ids)
    return Completion(tokens, tuple(p[t].logprob for p, t in zip(own.logprobs, tokens, strict=True)), own.finish_reason)


class ServerEngine:
    """`vllm serve`, which is told of weights by their folder."""

    def __init__(self, probed: Probed, folder: Path | None):
        self.endpoint, self.folders = probed.endpoint, Folders(folder)
        self.sampler = EndpointSampler(probed.endpoint, processed=probed.processed, needs_law=True)
        self.adapter: str | None = None

    def hand_over(self, weights: HandOver) -> None:
        path = self.folders.write(weights)
        try:
            if weights.is_adapter:
                self._adapter(f"policy-{path.name}", path)
            else:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(path.resolve())}}
                self.endpoint.client.post("//collective_rpc", body)
                self.endpoint.client.post("//reset_prefix_cache", {}, plain=True)
        except Refused as refused:
            raise EndpointError(
                f"{refused} vLLM did not take the weights of step {weights.version} from {path}; it must see this folder, "
                f"and be started with {SERVE}"
                + (" --enable-lora --max-lora-rank RANK" if weights.is_adapter else "")
                + "."
            ) from None

    def _adapter(self, name: str, path: Path) -> None:
        client, before = self.endpoint.client, self.adapter
        client.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path.resolve())}, plain=True)
        self.adapter = self.endpoint.model = name
        if before is not None:
            client.post("/unload_lora_adapter", {"lora_name": before}, plain=True)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, rows: Sequence[int]) -> list[Completion]:
        return self.sampler.generate(prompts, sampling, rows=rows)


def start_engine(
    path: str,
    *,
    dtype: str,
    memory: float,
    max_length: int,
    max_rows: int,
    lora_rank: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> LocalEngine:
    """vLLM in this process on the model at `path`. Raises MissingExtra without the package."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that tensors are handed over as they are
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import LLM
    except ImportError:
        raise MissingExtra("vllm", "vllm", "model.sampler = 'vllm'") from None
    lora: dict[str, Any] = {}
    if lora_rank is not None:
        bound = next((r for r in LORA_RANKS if r >= lora_rank), None)
        if bound is None:
            raise RecipeError(f"model.adapter.rank = {lora_rank}: vLLM takes LoRA of rank {LORA_RANKS[-1]} at most.")
        lora = {"enable_lora": True, "max_lora_rank": bound, "max_loras": 1}
    settings: dict[str, Any] = {
        "dtype": dtype,
        "gpu_memory_utilization": memory,
        "max_model_len": max_length,
        "max_num_seqs": max_rows,
        "logprobs_mode": "processed_logprobs",  # of the law that is sampled from, temperature included
        "generation_config": "vllm",  # not the model's: its top_k and top_p would cut the law
        **lora,
        **(options or {}),
    }
    return LocalEngine(LLM(model=path, **settings), max_length)
