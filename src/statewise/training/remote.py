"""Teachers behind an endpoint, and what every opened teacher can do: give its most probable tokens, from a store or afresh."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from statewise.errors import RecipeError
from statewise.models.endpoint import EndpointSampler, EndpointScorer
from statewise.models.http import Client
from statewise.models.load import LoadedPolicy
from statewise.models.probe import Probed, Wanted, probe
from statewise.models.topk import TopK, TopKGrid, grid_of, sequences_of
from statewise.recipe import Recipe
from statewise.signals.store import SignalStore
from statewise.teachers import TeacherModel
from statewise.training.kept import kept
from statewise.training.usage import CountedEngine, Usage
from statewise.types import Batch, Completion, Sampling

PROFILED = 20  # tokens a place where nothing in the recipe says how many: what vLLM gives by default


class Opened(ABC):
    """A frozen model that samples and scores. `top_k`: tokens a place that the recipe's losses read, 0 for none."""

    name: str
    tokenizer: Any
    stop_ids: tuple[int, ...]
    num_tokens: int
    top_k: int
    sampler: Any
    scorer: Any
    stores: dict[Path, SignalStore]

    @property
    def profiles(self) -> bool:
        """Whether it gives distributions."""
        return True

    @abstractmethod
    def open_store(self, folder: Path) -> SignalStore:
        """The part of the folder that belongs to this model with these weights."""

    def topk(
        self, sequences: Sequence[Sequence[int]], k: int, folder: Path | None = None
    ) -> tuple[list[TopK], list[bool]]:
        """The k most probable tokens everywhere, and which sequences were found in the store at `folder`."""
        if folder is None:
            return self.scorer.topk(sequences, k), [False] * len(sequences)
        return self._store(folder).topk(sequences, f"top {k}", lambda missing: self.scorer.topk(missing, k))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        rows: Sequence[int] | None = None,
        folder: Path | None = None,
    ) -> list[Completion]:
        """Completions, from the store at `folder` where they are; what is found there counts as if it were sampled."""

        def ask() -> list[Completion]:
            return list(self.sampler.generate(prompts, sampling, rows=rows))

        if folder is None:
            return ask()
        found, known = kept(self._store(folder).path, prompts, sampling, rows, ask)
        if known:
            self.sampler.count(prompts, found)
        return found

    def _store(self, folder: Path) -> SignalStore:
        if folder not in self.stores:
            self.stores[folder] = self.open_store(folder)
        return self.stores[folder]


@dataclass(frozen=True)
class OpenedEndpoint(Opened):
    """A model behind an endpoint; it has the policy's tokenizer and ends. `facts`: of the probe."""

    name: str
    tokenizer: Any
    stop_ids: tuple[int, ...]
    top_k: int
    probed: Probed
    sampler: CountedEngine
    scorer: CountedEngine
    stores: dict[Path, SignalStore] = field(default_factory=dict, compare=False)

    @property
    def num_tokens(self) -> int:  # type: ignore[override]
        return self.probed.endpoint.num_tokens

    @property
    def profiles(self) -> bool:
        asking = self.probed.endpoint.asking
        return asking is not None and asking.named

    @property
    def facts(self) -> dict[str, Any]:
        return self.probed.facts

    def open_store(self, folder: Path) -> SignalStore:
        return SignalStore(folder, {"endpoint_model": self.probed.endpoint.model}, self.probed.marks)

    def dense(self, batch: Batch) -> TopKGrid:
        """Its most probable tokens at every place of the batch."""
        return grid_of(batch, self.scorer.topk(sequences_of(batch), self.top_k or PROFILED), self.num_tokens)


def open_endpoint(
    recipe: Recipe, settings: TeacherModel, policy: LoadedPolicy, usage: Usage, say: Callable[[str], None]
) -> OpenedEndpoint:
    """Probe the endpoint and open it. Raises EndpointError, or RecipeError where a named variable is not set."""
    client = Client(
        _address(settings),
        key=variable(settings.api_key_env, "teacher.api_key_env"),
        concurrency=settings.concurrency,
        connect_seconds=settings.connect_seconds,
        timeout_seconds=settings.timeout_seconds,
        retries=settings.retries,
        say=say,
    )
    wanted = _wanted(recipe, settings)
    rows = int(policy.model.get_input_embeddings().num_embeddings)
    probed = probe(client, settings.model, policy.tokenizer, rows, wanted)
    law = "behavior_logprobs" in recipe.reads()
    sampler = EndpointSampler(probed.endpoint, processed=probed.processed, needs_law=law)
    return OpenedEndpoint(
        settings.name,
        policy.tokenizer,
        policy.stop_ids,
        wanted.top_k or 0,
        probed,
        CountedEngine(sampler, usage, None, "teacher_tokens"),
        CountedEngine(EndpointScorer(probed.endpoint), usage, None, "teacher_tokens"),
    )


def print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def top_k(recipe: Recipe) -> int:
    """The most tokens a place that a loss reads of a teacher that can't give its whole distribution."""
    losses = [t.loss for t in recipe.objective if "teacher_logits" in t.loss.columns_read()]
    return max((getattr(loss, "top_k", None) or 0 for loss in losses), default=0)


def _wanted(recipe: Recipe, settings: TeacherModel) -> Wanted:
    scores = any(settings in part.models() for part in recipe.signal)
    return Wanted(scores, top_k(recipe) if scores else None, settings in recipe.source.models())


def _address(settings: TeacherModel) -> str:
    address = settings.endpoint or ""
    return variable(address[1:], "teacher.endpoint") or "" if address.startswith("$") else address


def variable(name: str | None, where: str) -> str | None:
    """The value of an environment variable. Raises RecipeError where the one that `where` names is not set."""
    if name is None:
        return None
    value = os.environ.get(name)
    if not value:
        raise RecipeError(f"{where}: the environment has no variable '{name}', or an empty one; export it first.")
    return value
