"""The nouns of statewise.

Rule, used everywhere: index t is token y_t and its state is s_t = tokens[:t]; column t of every [B, T] tensor speaks of
y_t given s_t; column 0 of a sequence is never an action. Log-probabilities, entropies and losses are in nats.
Axis suffixes: B row, T position, V vocabulary, K top-k, S sequence (a row holds several when packed), N token list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Author = Literal["prompt", "environment", "dataset", "policy", "teacher"]
AUTHORS: tuple[Author, ...] = ("prompt", "environment", "dataset", "policy", "teacher")
AUTHOR_CODE: dict[Author, int] = {name: code for code, name in enumerate(AUTHORS)}
PADDING = -1  # in author_BT and sequence_BT


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens by one author. `train`: these tokens are actions (may be trained)."""

    tokens: tuple[int, ...]
    author: Author
    train: bool = False
    logprobs: tuple[float, ...] | None = None
    policy_version: int | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """What a rollout answers: a stable id, messages or text, the reference answer, and anything else the row held."""

    id: str
    messages: tuple[Mapping[str, str], ...] = ()
    text: str | None = None
    answer: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        """The row's value of a column. Raises KeyError with the columns that there are."""
        if column not in self.metadata:
            raise KeyError(f"no column '{column}' in this row, which has: {', '.join(map(str, self.metadata))}")
        return self.metadata[column]

    def get(self, column: str, default: Any = None) -> Any:
        """As a dict's: the row's value of a column, or `default`."""
        return self.metadata.get(column, default)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory with the author of every token.

    columns: {name: a number, or a row of K numbers, for each token of the whole rollout}.
    """

    segments: tuple[Segment, ...]
    example: Example
    group: int = 0
    reward: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    stop_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.segments)

    @property
    def num_action_tokens(self) -> int:
        """Tokens that may be trained; a sequence's first token has no state and never counts."""
        count = sum(len(s.tokens) for s in self.segments if s.train)
        first = next((s for s in self.segments if s.tokens), None)
        return count - 1 if first is not None and first.train else count

    def tokens(self) -> list[int]:
        return [t for s in self.segments for t in s.tokens]

    def with_columns(self, **columns: Any) -> Rollout:
        for name, values in columns.items():
            if len(values) != self.num_tokens:
                raise ValueError(f"column '{name}' has {len(values)} values for {self.num_tokens} tokens")
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Batch:
    """Rollouts as tensors.

    tokens_BT         int64 token ids; padding holds any valid id
    action_mask_BT    bool, may be trained
    author_BT         int8 author codes (AUTHORS), PADDING where there is no token
    position_BT       int64 position inside the sequence (restarts where the next packed sequence begins), 0 on padding
    sequence_BT       int64 index into the batch's sequences, PADDING where there is no token
    group_S           int64 group of each sequence
    columns           {name: float32 [B, T], or [B, T, K] until a signal has attached what it means}
    dense             {name: DenseLogits} of other models, aligned with tokens_BT
    example_ids       ids of the sequences, for messages
    temperature       of the states: the policy's logits were divided by it, as when the states were sampled
    """

    tokens_BT: torch.Tensor
    action_mask_BT: torch.Tensor
    author_BT: torch.Tensor
    position_BT: torch.Tensor
    sequence_BT: torch.Tensor
    group_S: torch.Tensor
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dense: Mapping[str, Any] = field(default_factory=dict)
    example_ids: tuple[str, ...] = ()
    packed: bool = False
    progress: float = 0.0
    temperature: float = 1.0

    @property
    def num_sequences(self) -> int:
        return self.group_S.shape[0]

    def column(self, name: str) -> torch.Tensor:
        """Column `name` as [B, T]; missing is an error that says who could write it."""
        if name in self.columns:
            return self.columns[name]
        raise KeyError(f"the batch has no column '{name}' (it has: {', '.join(sorted(self.columns)) or 'none'})")

    def with_columns(self, **columns: torch.Tensor) -> Batch:
        return replace(self, columns={**self.columns, **columns})

    def with_dense(self, **dense: Any) -> Batch:
        return replace(self, dense={**self.dense, **dense})

    def map_tensors(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with `fn` applied to each [B, T] tensor and column (not to group_S, not to dense)."""
        return replace(
            self,
            tokens_BT=fn(self.tokens_BT),
            action_mask_BT=fn(self.action_mask_BT),
            author_BT=fn(self.author_BT),
            position_BT=fn(self.position_BT),
            sequence_BT=fn(self.sequence_BT),
            columns={name: fn(value) for name, value in self.columns.items()},
        )

    def to(self, device: Any) -> Batch:
        moved = self.map_tensors(lambda x: x.to(device, non_blocking=True))
        return replace(moved, group_S=self.group_S.to(device))


@dataclass(frozen=True)
class TokenStats:
    """What the policy says of y_t at s_t, float32 (float64 in oracles); only what the recipe's losses declare.

    logprobs_BT   log pi(y_t | s_t)
    entropy_BT    H[pi(. | s_t)] over the full vocabulary
    logits_BTV    the logits after scale, soft-cap and temperature, as the loss sees them
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @property
    def phi(self) -> torch.Tensor:
        """Centred log-likelihood phi = log p + H (nats)."""
        if self.entropy is None:
            raise ValueError("phi needs the entropy: declare needs = ('logprobs', 'entropy')")
        return self.logprobs + self.entropy

    def detach(self) -> TokenStats:
        return TokenStats(
            self.logprobs.detach(),
            None if self.entropy is None else self.entropy.detach(),
            None if self.logits is None else self.logits.detach(),
        )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Defaults are the unbiased policy: temperature 1, full support. temperature 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """Sampled ids (the stop token included), their log-probabilities under the sampling law, and why it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: Literal["stop", "length"]


class Sampler(Protocol):
    """An engine that generates. `load` makes it use the given policy's current weights, those of step `version`."""

    def load(self, policy: Any, version: int = 0) -> None: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, rows: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion a prompt. rows: what names each prompt's random stream (default 0, 1, ...)."""
        ...


class Scorer(Protocol):
    """An engine that scores token sequences: {"logprobs": [...], "entropy": [...]} a sequence, column 0 = 0."""

    def score(
        self, sequences: Sequence[Sequence[int]], needs: Sequence[str] = ("logprobs",)
    ) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class World:
    """The opened resources; passed down, never stored by a component.

    open_model  another model (`TeacherModel`) as an `OpenedModel`, opened once
    reads       the columns that something in the recipe reads
    state       what components keep between steps, {name: nested dicts, lists, tensors, numbers, text}: goes into the
                checkpoint, the same on every rank
    gather      a list of every rank, joined in rank order
    report      {name: value}, the same on every rank, into the step's row of metrics
    """

    tokenizer: Any
    seed: int
    policy: Any = None
    sampler: Sampler | None = None
    scorer: Scorer | None = None
    reference: Any = None
    open_model: Callable[[Any], Any] = lambda settings: None
    reads: frozenset[str] = frozenset()
    state: dict[str, Any] = field(default_factory=dict)
    gather: Callable[[list[Any]], list[Any]] = lambda items: items
    rank: int = 0
    num_ranks: int = 1
    device: str = "cpu"
    base_dir: Path = Path(".")
    step: int = 0
    progress: float = 0.0
    record: Callable[[dict[str, Any]], None] = lambda row: None
    report: Callable[[dict[str, float]], None] = lambda values: None


@dataclass(frozen=True)
class EvalContext:
    """What a task gets: the model in eval mode, its tokenizer, the engines, and where relative paths start.

    limit: at most this many examples, for tasks that name no limit of their own.
    """

    model: Any
    tokenizer: Any
    sampler: Sampler
    scorer: Scorer
    seed: int = 0
    batch_tokens: int = 8192
    base_dir: Path = Path(".")
    limit: int | None = None
    progress: Callable[[int, int], None] = lambda done, total: None


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream named by `names`: every random stream is a function of (seed, names) alone."""
    from hashlib import blake2b

    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
