"""Opening vLLM as the policy's sampler, as the recipe says: in this process, or the server that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from statewise.errors import RecipeError, StatewiseError
from statewise.models.engines import LocalEngine, ServerEngine, start_engine
from statewise.models.generate import num_positions
from statewise.models.http import Client
from statewise.models.load import LoadedPolicy, resolve
from statewise.models.probe import Probed, Wanted, probe
from statewise.models.vllm import VllmSampler, check_adapter, default_gap
from statewise.recipe import Recipe
from statewise.training.distributed import joined
from statewise.training.remote import variable


def open_vllm(recipe: Recipe, policy: LoadedPolicy, accelerator: Any, say: Callable[[str], None]) -> VllmSampler:
    """The engine, with the weights that are on the disk; it is handed the policy's before each step."""
    settings = recipe.model.sampler
    if recipe.model.adapter is not None:
        check_adapter(recipe.model.adapter)
    say(f"opening vLLM {'in this process' if settings.url is None else f'at {settings.url}'}")
    gap = settings.gap or default_gap(next(policy.model.parameters()).dtype)
    if settings.url is None:
        return VllmSampler(_local(recipe, policy, accelerator), gap)

    def agree(problem: StatewiseError | None) -> StatewiseError | None:
        return next((found for found in joined([problem], accelerator) if found is not None), None)

    return VllmSampler(_server(recipe, policy, say), gap, bool(accelerator.is_main_process), agree)


def _local(recipe: Recipe, policy: LoadedPolicy, accelerator: Any) -> LocalEngine:
    settings, model = recipe.model.sampler, recipe.model
    if accelerator.num_processes > 1:
        raise RecipeError(
            f"model.sampler = 'vllm': this run has {accelerator.num_processes} processes, and vLLM inside a process serves one. "
            "Start `vllm serve` and name it: model.sampler = { engine = 'vllm', url = 'http://host:8000/v1' }."
        )
    if model.gguf_file is not None:
        raise RecipeError(
            "model.sampler = 'vllm': does not read model.gguf_file; convert the model to a directory first."
        )
    return start_engine(
        _base(model.path),
        dtype=str(next(policy.model.parameters()).dtype).removeprefix("torch."),
        memory=settings.memory,
        max_length=settings.max_length or num_positions(policy.model),
        max_rows=settings.max_rows,
        lora_rank=_rank(policy.model) if hasattr(policy.model, "peft_config") else None,
        options=settings.options,
    )


def _base(path: str) -> str:
    """What vLLM loads: the model's directory or hub id; of a directory with an adapter, its base."""
    config = Path(resolve(path)) / "adapter_config.json"
    if not config.is_file():
        return resolve(path)
    return resolve(str(json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]))


def _rank(model: Any) -> int:
    return max(int(config.r) for config in model.peft_config.values())


def _server(recipe: Recipe, policy: LoadedPolicy, say: Callable[[str], None]) -> ServerEngine:
    folder = recipe.model.sampler.folder
    return ServerEngine(probe_server(recipe, policy, say), None if folder is None else Path(folder))


def probe_server(recipe: Recipe, policy: LoadedPolicy, say: Callable[[str], None]) -> Probed:
    """What the server at model.sampler.url can do. Raises EndpointError where it lacks something."""
    settings = recipe.model.sampler
    key = variable(settings.api_key_env, "model.sampler.api_key_env")
    client = Client(settings.url or "", key=key, concurrency=settings.max_rows, say=say)
    rows = int(policy.model.get_input_embeddings().num_embeddings)
    return probe(client, None, policy.tokenizer, rows, Wanted(scores=False, generates=True))
