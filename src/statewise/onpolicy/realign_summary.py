"""What a realignment gave: yields, phi before and after, how much of each text was the plain stream's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from statewise.onpolicy.realigned import Realigned
from statewise.sources.realigning import KINDS

BELOW = (-1.0, -3.0, -5.0)  # nats; shares of tokens with a phi below
SHOWN, SHOWN_DISCARDED = 12, 2  # examples on the page: realigned ones, and of every reason to discard
WEIGHT_BINS = 20


@dataclass
class Phi:
    """phi of the tokens of a set of texts: moments, and each text's mean."""

    tokens: int = 0
    total: float = 0.0
    squares: float = 0.0
    below: np.ndarray = field(default_factory=lambda: np.zeros(len(BELOW), dtype=np.int64))
    means: list[float] = field(default_factory=list)

    def see(self, phi: Sequence[float]) -> None:
        if not len(phi):
            return
        values = np.asarray(phi, dtype=np.float64)
        self.tokens += len(values)
        self.total += float(values.sum())
        self.squares += float((values**2).sum())
        self.below += (values[:, None] < np.array(BELOW)).sum(0)
        self.means.append(float(values.mean()))

    def to_plain(self) -> dict[str, Any] | None:
        """{texts, tokens, mean, std, shares}: over tokens, in nats; None for an empty set."""
        if not self.tokens:
            return None
        mean = self.total / self.tokens
        shares = {
            f"share_below_minus_{-limit:g}": int(n) / self.tokens for limit, n in zip(BELOW, self.below, strict=True)
        }
        std = max(0.0, self.squares / self.tokens - mean**2) ** 0.5
        return {"texts": len(self.means), "tokens": self.tokens, "mean": mean, "std": std, **shares}


@dataclass
class Summary:
    """Sees every row once, in the order of the data."""

    kinds: Counter[str] = field(default_factory=Counter)
    sets: dict[str, Phi] = field(
        default_factory=lambda: {
            name: Phi() for name in ("original", "original_hinted", "kept", "own", "realigned", "alone")
        }
    )
    weights: np.ndarray = field(default_factory=lambda: np.zeros(WEIGHT_BINS, dtype=np.int64))
    weight_total: float = 0.0
    shown: list[Realigned] = field(default_factory=list)
    discarded: list[Realigned] = field(default_factory=list)

    def see(self, row: Realigned) -> Realigned:
        """Count the row, and give it back."""
        self.kinds[row.kind] += 1
        self.sets["original"].see(row.original_phi)
        self.sets["alone"].see(row.alone_phi)
        if row.is_kept:
            self.sets["kept"].see(row.text_phi)
            self.sets[row.kind].see(row.text_phi)
        if row.kind == "realigned":
            self.sets["original_hinted"].see(row.original_phi)
            self._see_weights(row)
        self._choose(row)
        return row

    def _see_weights(self, row: Realigned) -> None:
        """Of the tokens up to the delimiter."""
        weights = np.asarray(row.text_weights[: row.delimiter_at], dtype=np.float64)
        self.weights += np.histogram(weights, WEIGHT_BINS, (0, 1))[0]
        self.weight_total += float(weights.sum())

    def _choose(self, row: Realigned) -> None:
        if row.kind == "realigned" and len(row.alone_ids) and len(self.shown) < SHOWN:
            self.shown.append(row)
        of_kind = sum(other.kind == row.kind for other in self.discarded)
        if not row.is_kept and len(row.text_ids) and of_kind < SHOWN_DISCARDED:
            self.discarded.append(row)

    def to_plain(self) -> dict[str, Any]:
        """{rows, kept, yields, phi of each set, mean lambda before the delimiter}."""
        counted = int(self.weights.sum())
        return {
            "rows": self.kinds.total(),
            "kept": self.kinds["own"] + self.kinds["realigned"],
            "yields": {kind: self.kinds[kind] for kind in KINDS},
            "phi": {name: phi.to_plain() for name, phi in self.sets.items()},
            "mean_weight": self.weight_total / counted if counted else None,
        }
