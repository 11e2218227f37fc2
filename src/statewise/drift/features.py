"""Features of states: of the text of a prefix, and of what an encoder makes of prompt and prefix."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]|_")  # letters, digits, or one other sign
BUCKETS = 64
STYLE = (
    "log_characters",
    "log_words",
    "log_lines",
    "log_numbers",
    "mean_word_length",
    "distinct_words",
    "distinct_pairs",
    "digit_share",
    "upper_share",
    "space_share",
    "operator_share",
    "punctuation_share",
)
OPERATORS = frozenset("+-*/=<>^%×÷−")


def words(text: str) -> list[str]:
    """Runs of letters, runs of digits, and single other signs, in lower case."""
    return WORD.findall(text.lower())


def lexical(texts: Sequence[str]) -> np.ndarray:
    """[N, 12 + 64]: the features of STYLE, and the shares of the words in 64 hash buckets.

    log_x is log(1 + count); distinct_* is the number of different words (adjacent pairs) over their number; *_share is
    over characters; a word falls into bucket blake2b(word, 8 bytes) mod 64. An empty text is all 0.
    """
    return np.array([_lexical(text) for text in texts], dtype=np.float64).reshape(len(texts), len(STYLE) + BUCKETS)


def _lexical(text: str) -> list[float]:
    found = words(text)
    pairs = list(pairwise(found))
    length, count = max(len(text), 1), max(len(found), 1)
    style = [
        math.log1p(len(text)),
        math.log1p(len(found)),
        math.log1p(text.count("\n")),
        math.log1p(sum(word.isdigit() for word in found)),
        sum(map(len, found)) / count,
        len(set(found)) / count,
        len(set(pairs)) / max(len(pairs), 1),
        sum(c.isdigit() for c in text) / length,
        sum(c.isupper() for c in text) / length,
        sum(c.isspace() for c in text) / length,
        sum(c in OPERATORS for c in text) / length,
        sum(not (c.isalnum() or c.isspace() or c in OPERATORS) for c in text) / length,
    ]
    shares = [0.0] * BUCKETS
    for word in found:
        shares[_bucket(word)] += 1 / count
    return style + shares


def _bucket(word: str) -> int:
    return int.from_bytes(blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "big") % BUCKETS


def scaled(pooled: np.ndarray, blocks: Sequence[int] = ()) -> np.ndarray:
    """Every feature with mean 0 and standard deviation 1 over both policies' states; constant ones are 0.

    blocks: sizes of groups of columns, each divided by the root of its size, so that a group counts as one feature.
    """
    spread = pooled.std(0)
    out = (pooled - pooled.mean(0)) / np.where(spread > 1e-12, spread, np.inf)
    start = 0
    for size in blocks:
        out[:, start : start + size] /= math.sqrt(size)
        start += size
    return out


def scaled_lexical(texts: Sequence[str]) -> np.ndarray:
    """`lexical`, scaled, style and words as one block each."""
    return scaled(lexical(texts), (len(STYLE), BUCKETS))


def hidden(
    model: Any,
    sequences: Sequence[Sequence[int]],
    at: Sequence[Sequence[int]],
    *,
    pad_id: int,
    batch_tokens: int = 8192,
) -> np.ndarray:
    """[N, D] float64: the encoder's last hidden states (after its final norm) at the last token of each state.

    at: for each sequence the lengths of its states, each at least 1; rows come sequence by sequence.
    """
    import torch

    from statewise.models.generate import evaluating
    from statewise.models.head import backbone

    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    found: dict[int, np.ndarray] = {}
    device = next(model.parameters()).device
    with evaluating(model), torch.no_grad():
        while order:
            size = max(1, batch_tokens // max(len(sequences[order[0]]), 1))
            batch, order = order[:size], order[size:]
            width = len(sequences[batch[0]])
            ids = torch.full((len(batch), width), pad_id, dtype=torch.long)
            mask = torch.zeros(len(batch), width, dtype=torch.long)
            for row, index in enumerate(batch):
                ids[row, : len(sequences[index])] = torch.tensor(list(sequences[index]))
                mask[row, : len(sequences[index])] = 1
            out = backbone(model)(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
            for row, index in enumerate(batch):
                places = [length - 1 for length in at[index]]
                found[index] = out.last_hidden_state[row, places].double().cpu().numpy()
    return np.concatenate([found[i] for i in range(len(sequences))])
