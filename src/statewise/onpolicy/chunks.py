"""Scoring a chunk of rows: encode, sort by length, one pass of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from statewise.errors import DataError
from statewise.onpolicy.cll import score_sequences
from statewise.onpolicy.records import Bad, Chunk, Sample
from statewise.onpolicy.settings import Engine, ScoreSettings
from statewise.settings import ModelSettings
from statewise.sources.dataset import DatasetSource
from statewise.sources.plain import untemplated_row
from statewise.sources.reading import Placed, RowError
from statewise.types import Segment

Report = Callable[[int], None]
Numbered = list[tuple[int, Placed]]


def read_chunks(settings: ScoreSettings, base_dir: Path) -> Iterator[Numbered]:
    """The rows of the data, numbered, in chunks."""
    rows = enumerate(settings.data.stream(base_dir))
    return iter(lambda: list(islice(rows, settings.chunk_rows)), [])


@dataclass(frozen=True)
class Encoder:
    """Rows as token sequences. `room`: positions that the model has."""

    source: DatasetSource
    tokenizer: Any
    room: int

    def encode(self, placed: Placed) -> tuple[str, list[int], list[bool]]:
        """(id, tokens, mask of those to score). Raises DataError; its `reason` is that of the row's kind."""
        place, row = placed
        if isinstance(row, RowError):
            raise row
        example, (segments,) = self.source.encode(self.tokenizer, row, place)
        tokens, mask = _joined(segments)
        limit = min(self.source.max_length or self.room, self.room)
        if len(tokens) > limit and self.source.too_long != "truncate":
            raise RowError("has too many tokens", f"{len(tokens)}, at most {limit}")
        tokens, mask = tokens[:limit], mask[:limit]
        if not any(mask):
            raise RowError("has no token to score within max_length", f"{limit} tokens")
        return example.id, tokens, mask

    def doubt(self, placed: Placed) -> str | None:
        """What to say of a row whose prompt misses the chat template; None of one that can't be read."""
        place, row = placed
        try:
            if isinstance(row, RowError):
                return None
            example, _ = self.source.encode(self.tokenizer, row, place)
        except DataError:
            return None
        return untemplated_row(self.source, self.tokenizer, example, "chat")

    def try_encode(self, index: int, placed: Placed) -> tuple[str, list[int], list[bool]] | Bad:
        """A row that can't be scored is an error, or is left out, as on_bad_row and too_long say."""
        try:
            return self.encode(placed)
        except DataError as error:
            reason = getattr(error, "reason", str(error)[:120])
            long = reason == "has too many tokens"
            if (self.source.too_long if long else self.source.on_bad_row) == "error":
                mend = "max_length, or too_long = 'drop' or 'truncate'" if long else "on_bad_row = 'skip'"
                raise DataError(f"{placed[0]}: {error}. Mend the row, or set {mend}.") from None
            return Bad(index, placed[0], reason, str(error))


def _joined(segments: Sequence[Segment]) -> tuple[list[int], list[bool]]:
    tokens = [t for s in segments for t in s.tokens]
    mask = [s.train for s in segments for _ in s.tokens]
    return tokens, [False, *mask[1:]]


def open_encoder(settings: ScoreSettings) -> Encoder:
    """The encoder of a `ChunkScorer`, without its weights."""
    from statewise.models.load import load_tokenizer, read_num_positions

    return Encoder(settings.data, load_tokenizer(settings.model), read_num_positions(settings.model))


def opened_model(settings: ModelSettings) -> ModelSettings:
    """The settings with a run directory replaced by its last checkpoint."""
    if not (Path(settings.path) / "run.json").is_file():
        return settings
    from statewise.training.opened import directory_of

    return settings.model_copy(update={"path": directory_of(settings.path)})


class ChunkScorer:
    """A loaded model that scores chunks."""

    def __init__(self, settings: ScoreSettings, engine: Engine, index: int = 0):
        """`index`: number of the process, which takes one of the machine's GPUs."""
        import torch

        from statewise.models.generate import num_positions
        from statewise.models.load import load_policy
        from statewise.models.score import InProcessScorer

        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        device = engine.device or (f"cuda:{index % count}" if count else None)
        policy = load_policy(opened_model(settings.model), device=device)
        dtype = torch.float32 if settings.model.head_dtype == "float32" else None
        self.settings, self.policy = settings, policy
        self.scorer = InProcessScorer(
            policy.model, pad_id=policy.pad_id, batch_tokens=settings.batch_tokens, dtype=dtype, frozen=True
        )
        self.encoder = Encoder(settings.data, policy.tokenizer, num_positions(policy.model))

    def score(self, rows: Numbered, report: Report = lambda tokens: None) -> Chunk:
        """`report(tokens)` after each forward pass. Raises DataError for a bad row, unless those are left out."""
        start = time.perf_counter()
        found = [(index, placed[0], self.encoder.try_encode(index, placed)) for index, placed in rows]
        good = [(index, place, made) for index, place, made in found if not isinstance(made, Bad)]
        masks = [mask for _, _, (_, _, mask) in good]
        statistics = score_sequences(
            self.scorer,
            [tokens for _, _, (_, tokens, _) in good],
            masks,
            temperature=self.settings.temperature,
            report=report,
        )
        samples = [Sample(i, place, name, t, s) for (i, place, (name, t, _)), s in zip(good, statistics, strict=True)]
        facts = {
            "rows": len(rows),
            "tokens": sum(len(s.tokens) for s in samples),
            "scored_tokens": sum(map(len, statistics)),
            "seconds": time.perf_counter() - start,
        }
        return Chunk(samples, [made for _, _, made in found if isinstance(made, Bad)], facts)
