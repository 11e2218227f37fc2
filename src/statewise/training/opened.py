"""Other models beside the policy: teachers, the policy at step 0, its moving average; each opened once."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from statewise.errors import RecipeError
from statewise.models.generate import InProcessSampler
from statewise.models.load import LoadedPolicy, load_policy, resolve
from statewise.models.score import InProcessScorer
from statewise.recipe import Recipe
from statewise.run import RunDir
from statewise.signals.store import SignalStore, weights_hash
from statewise.teachers import TeacherModel
from statewise.training.distributed import is_sharded
from statewise.training.hooks import Hook
from statewise.training.learner import Dense, Learner
from statewise.training.remote import Opened, OpenedEndpoint, open_endpoint, print_error, top_k
from statewise.training.usage import CountedEngine, Usage, forward_flops, num_tokens
from statewise.types import Batch


@dataclass(frozen=True)
class OpenedModel(Opened):
    """A frozen model in this process, which gives whole next-token distributions too."""

    name: str
    policy: LoadedPolicy
    learner: Learner
    sampler: CountedEngine
    scorer: CountedEngine
    usage: Usage
    top_k: int = 0
    stores: dict[Path, SignalStore] = field(default_factory=dict, compare=False)

    @property
    def tokenizer(self) -> Any:
        return self.policy.tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.policy.stop_ids

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return int(self.policy.model.get_input_embeddings().num_embeddings)

    def open_store(self, folder: Path) -> SignalStore:
        return SignalStore(folder, {"weights": weights_hash(self.policy.model), "head_dtype": str(self.scorer.dtype)})

    def dense(self, batch: Batch) -> Dense:
        """Its projection at every place of the batch."""
        tokens = num_tokens(batch)
        self.usage.teacher_tokens += tokens
        self.usage.flops += tokens * forward_flops(self.policy.model)
        with torch.no_grad():
            return self.learner(batch, mode="dense")

    def attach(self, batch: Batch, name: str) -> Batch:
        """The batch with `<name>_logits` (dense) and the column `<name>_logprobs`."""
        dense = self.dense(batch)
        return batch.with_dense(**{f"{name}_logits": dense}).with_columns(**{f"{name}_logprobs": dense.logprobs(batch)})


class Models:
    """Opens models by their settings. Averages of the policy live in `state`, so that a checkpoint holds them.

    learner: the wrapped policy; hooks: called after each update, which moves an average; usage: counts their tokens.
    say(text): told of endpoints in trouble.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: LoadedPolicy,
        learner: Any,
        hooks: list[Hook],
        device: Any,
        state: dict[str, Any],
        usage: Usage | None = None,
        say: Callable[[str], None] = print_error,
    ):
        self.recipe, self.policy, self.learner, self.hooks = recipe, policy, learner, hooks
        self.device, self.state, self.usage, self.say = device, state, usage or Usage(), say
        self._opened: dict[TeacherModel, OpenedModel | OpenedEndpoint] = {}

    def __call__(self, settings: TeacherModel | str) -> OpenedModel | OpenedEndpoint:
        """The model, frozen and on the policy's device, or behind its endpoint.

        Raises RecipeError where its vocabulary is another one, EndpointError where its server can't do what is needed.
        """
        wanted = TeacherModel.model_validate(settings)
        if wanted not in self._opened:
            remote = wanted.endpoint is not None
            self._opened[wanted] = (
                open_endpoint(self.recipe, wanted, self.policy, self.usage, self.say) if remote else self._open(wanted)
            )
        return self._opened[wanted]

    def _open(self, wanted: TeacherModel) -> OpenedModel:
        policy = self._load(wanted)
        model = policy.model.to(self.device).eval()
        if not wanted.is_past_policy:
            check_vocabulary(self.policy, policy)
            check_ends(self.policy, policy)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
        dtype = torch.float32 if self.recipe.model.head_dtype == "float32" else None
        return OpenedModel(
            wanted.path,
            policy,
            Learner(model, [], head_dtype=dtype).eval(),
            CountedEngine(InProcessSampler(model, pad_id=policy.pad_id), self.usage, model, "teacher_tokens"),
            CountedEngine(
                InProcessScorer(model, pad_id=policy.pad_id, dtype=dtype), self.usage, model, "teacher_tokens"
            ),
            self.usage,
            top_k(self.recipe),
        )

    def _load(self, wanted: TeacherModel) -> LoadedPolicy:
        if wanted.path == "ema":
            return self._average(wanted)
        if wanted.path == "step0":
            return self._step0()
        path = directory_of(wanted.path)
        adapter = Path(path) / "adapter_config.json"
        if adapter.is_file() and self._shares_base(adapter):
            from peft import PeftModel

            base = shared_base(self.policy.model)
            return LoadedPolicy(PeftModel.from_pretrained(base, path), self.policy.tokenizer, wanted.path)
        return load_policy(wanted.model_settings().model_copy(update={"path": path}))

    def _shares_base(self, adapter: Path) -> bool:
        """Whether the adapter's base is the policy's, which LoRA leaves as it is."""
        name = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        own = self.recipe.model
        same = own.adapter is not None and resolve(str(name)) == resolve(own.path) and own.revision is None
        return same and not is_sharded(self.learner)

    def _step0(self) -> LoadedPolicy:
        own = self.recipe.model
        if own.adapter is not None and own.adapter.path is None and not is_sharded(self.learner):
            return replace(self.policy, model=shared_base(self.policy.model))
        return load_policy(own)

    def _average(self, wanted: TeacherModel) -> LoadedPolicy:
        """A copy of what is trained on the policy's frozen weights; moved by a hook."""
        if is_sharded(self.learner):
            raise RecipeError("teacher = 'ema': is not possible while parameters are sharded (FSDP); use DDP.")
        source = {n: p for n, p in self.policy.model.named_parameters() if p.requires_grad}
        model = _twin(self.policy.model)
        copies = {n: p for n, p in model.named_parameters() if n in source}
        key = f"ema/{wanted.decay}"
        if key not in self.state:
            self.state[key] = {n: _wide(p.detach().clone()) for n, p in source.items()}
        average = self.state[key] = {n: v.to(source[n].device) for n, v in self.state[key].items()}

        with torch.no_grad():
            for name, value in average.items():
                copies[name].copy_(value)
        self.hooks.append(_Moving(1 - float(wanted.decay or 0.0), source, average, copies))
        return replace(self.policy, model=model)


class _Moving(Hook):
    """average <- average + rate (source - average), and a copy of it in the averaged model."""

    def __init__(self, rate: float, source: dict[str, Any], average: dict[str, Any], copies: dict[str, Any]):
        self.rate, self.source, self.average, self.copies = rate, source, average, copies

    @torch.no_grad()
    def after_update(self) -> None:
        for name, value in self.average.items():
            value.lerp_(self.source[name].to(value.dtype), self.rate)
            self.copies[name].copy_(value)


def directory_of(path: str) -> str:
    """What to load: the last checkpoint of a run directory, else the path. Raises RecipeError where a run has none."""
    if not (Path(path) / "run.json").is_file():
        return resolve(path)
    checkpoints = RunDir.open(path).checkpoints()
    if not checkpoints:
        raise RecipeError(f"teacher '{path}': is a run without a checkpoint (status {RunDir.open(path).status}).")
    return str(checkpoints[max(checkpoints)])


def _wide(value: torch.Tensor) -> torch.Tensor:
    """In 16 bits an average with a decay near 1 would not move."""
    return value if value.dtype == torch.float64 else value.float()


def _twin(model: nn.Module) -> Any:
    """A copy that shares the frozen parameters."""
    return deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


def shared_base(model: Any) -> Any:
    """The model without its adapter, as a module of its own on the same weights."""
    return _twin(model).unload()


def check_vocabulary(policy: LoadedPolicy, teacher: LoadedPolicy) -> None:
    """Raises RecipeError where the same ids don't mean the same tokens; padded ids behind the tokens don't matter."""
    own, other = ({i: t for t, i in p.tokenizer.get_vocab().items()} for p in (policy, teacher))
    clashes = [i for i in sorted(own.keys() & other.keys()) if own[i] != other[i]]
    if not clashes and (own.keys() <= other.keys() or other.keys() <= own.keys()):
        return
    where = f"id {clashes[0]} is {own[clashes[0]]!r} here and {other[clashes[0]]!r} there" if clashes else "ids differ"
    raise RecipeError(
        f"teacher '{teacher.path}': has another vocabulary ({len(other)} tokens) than the policy '{policy.path}' "
        f"({len(own)} tokens): {where}, so its probabilities speak of other tokens. Expected the policy's tokenizer, up to "
        "padding; distil from such a teacher through text: source = 'dataset' with its answers."
    )


def check_ends(policy: LoadedPolicy, teacher: LoadedPolicy) -> None:
    """Warns where no token ends the text of both."""
    if not set(policy.stop_ids) & set(teacher.stop_ids):
        warnings.warn(
            f"teacher '{teacher.path}' ends its text with ids {teacher.stop_ids} and the policy stops at {policy.stop_ids}: "
            "what it teaches about the end, the policy will not stop at.",
            stacklevel=2,
        )
