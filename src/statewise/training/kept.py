"""Completions of frozen models in a folder, by content: what one run had sampled, another reads.

<folder>/<teacher>/<key>.completions.json: the answer to one call, under the hash of prompts, sampling and streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from statewise.files import atomic_write, to_json
from statewise.types import Completion, Sampling


def kept(
    place: Path,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    rows: Sequence[int] | None,
    ask: Callable[[], list[Completion]],
) -> tuple[list[Completion], bool]:
    """The completions, and whether they were found; else `ask` gives them and they are written. `place`: the teacher's."""
    told = [[list(prompt) for prompt in prompts], asdict(sampling), None if rows is None else list(rows)]
    file = place / f"{sha256(to_json(told).encode()).hexdigest()[:32]}.completions.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return [Completion(tuple(t), tuple(p), reason) for t, p, reason in found], True
    except (OSError, ValueError, TypeError):  # absent, or broken by hand: files appear whole
        fresh = ask()
        atomic_write(file, to_json([[c.tokens, c.logprobs, c.stop_reason] for c in fresh]))
        return fresh, False
