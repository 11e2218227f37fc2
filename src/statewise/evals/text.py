"""Held-out text: how well the model still predicts it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from statewise.errors import DataError
from statewise.evals.likelihood import context_length, likelihoods
from statewise.evals.prompts import encode
from statewise.evals.rows import FileTask, Purpose, Row, RowsTask, TinyTask
from statewise.types import EvalContext

Record = dict[str, Any]


class CrossEntropy(RowsTask):
    """Nats a token over all texts; a text longer than `window` tokens is read in windows that share one token.

    A text's first token is context only, unless the tokenizer puts a BOS before it.
    """

    metric: ClassVar[str] = "nats_per_token"
    higher_is_better: ClassVar[bool] = False

    window: int = Field(1024, ge=2)
    usual_purpose: ClassVar[Purpose] = "probe"

    @property
    def is_random(self) -> bool:
        return False

    def run(self, context: EvalContext) -> list[Record]:
        """Records with id, score (nats a token), weight (tokens), nats and bytes."""
        size = min(self.window, context_length(context))
        chosen = self.chosen(context)
        ids = [encode(context.tokenizer, str(row.get("text") or ""), chat=False) for _, row in chosen]
        pieces = [(i, x[at : at + size]) for i, x in enumerate(ids) for at in range(0, max(len(x) - 1, 0), size - 1)]
        nats, counts = [0.0] * len(ids), [0] * len(ids)
        groups = [(piece[:1], [piece[1:]]) for _, piece in pieces]
        for (index, _), (value,) in zip(pieces, likelihoods(context, groups), strict=True):
            nats[index] -= value.total
            counts[index] += value.num_tokens
        records = []
        for (name, row), x, total, count in zip(chosen, ids, nats, counts, strict=True):
            if not count:
                raise DataError(f"task '{self.kind}': text '{name}' has {len(x)} tokens, expected at least 2.")
            first = context.tokenizer.decode(x[:1], skip_special_tokens=True)  # not predicted, so not counted
            num_bytes = len(str(row["text"]).encode()) - len(first.encode())
            told = {"nats": total, "num_bytes": num_bytes, "prompt": row["text"]}
            records.append({"id": name, "score": total / count, "weight": count, **told})
        return records

    def extra(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Bits a byte of UTF-8, comparable across tokenizers; perplexity a token."""
        nats, num_bytes = sum(r["nats"] for r in records), sum(r["num_bytes"] for r in records)
        tokens = sum(r["weight"] for r in records)
        bits = nats / math.log(2) / num_bytes if num_bytes > 0 else math.nan
        return {"bits_per_byte": bits, "perplexity": math.exp(min(nats / tokens, 700.0)), "num_tokens": float(tokens)}


class Text(FileTask, CrossEntropy, kind="text"):
    """Texts of any file: the column `text`."""

    def prepare(self, row: Row) -> Row:
        self.field(row, "text")
        return row


class TinyText(TinyTask, CrossEntropy, kind="tiny:text"):
    """Short texts of the kind that the embedded model was trained on."""
