"""Scoring rollouts with a verifier: texts, time limits, and the test that a verifier has to pass before training."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import DataError, RecipeError, StatewiseError, told
from statewise.sources.ranks import divided
from statewise.verifier import Judge, Verifier, as_number

if TYPE_CHECKING:
    from statewise.types import Example, Rollout, World

TESTED_EXAMPLES = 16  # enough to meet the ways in which a data set writes its answers, in well under a second
SHOWN = 120  # characters of a text in a message


@dataclass(frozen=True)
class Verdicts:
    """A score a rollout; 0 where the time ran out."""

    scores: list[float]
    num_timeouts: int


def judged(verifier: Verifier, rollouts: Sequence[Rollout], world: World) -> Verdicts:
    """The scores of what follows each rollout's prompt; the work is divided over the ranks."""
    judge = verifier.opened(world.base_dir)

    def work(own: list[Rollout], places: list[int]) -> list[float | None]:
        texts = [completion_text(rollout, world.tokenizer) for rollout in own]
        return [scored(verifier, judge, t, r.example) for t, r in zip(texts, own, strict=True)]

    found = divided(rollouts, work, world)
    return Verdicts([value or 0.0 for value in found], sum(value is None for value in found))


def completion_text(rollout: Rollout, tokenizer: Any) -> str:
    """What was written after the prompt, by whomever, without special tokens."""
    ids = [t for s in rollout.segments if s.author not in ("prompt", "environment") for t in s.tokens]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def scored(verifier: Verifier, judge: Judge, text: str, example: Example) -> float | None:
    """The score of a text, None where the time ran out. Raises DataError where the verifier fails or gives no number."""
    try:
        with _time_limit(verifier.time_limit):
            verdict = judge(text, example)
    except _OutOfTime:
        return None
    except StatewiseError:
        raise
    except Exception as error:
        raise DataError(
            f"verifier '{verifier.kind}' failed on sample '{example.id}': {told(error)}; the text was {text[:SHOWN]!r}."
        ) from error
    score = as_number(verdict, f"verifier '{verifier.kind}' on sample '{example.id}'")
    if not math.isfinite(score):
        raise DataError(
            f"verifier '{verifier.kind}': received {score} for sample '{example.id}', expected a finite number."
        )
    return score


class _OutOfTime(BaseException):
    """Not an Exception, so that a verifier that catches those is interrupted too."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupts the block after `seconds`; only in the main thread, which is where signals arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def self_test(verifier: Verifier, examples: Sequence[Example], base_dir: Path, where: str) -> None:
    """Raises RecipeError where the verifier rejects a reference answer, or scores nothing or everything as high as it.

    Looks at examples spread over the data; `where` names the verifier's field.
    """
    judge = verifier.opened(base_dir)
    stride = max(1, len(examples) // TESTED_EXAMPLES)
    chosen = list(examples)[::stride][:TESTED_EXAMPLES]
    golds = {e.id: verifier.gold(e) for e in chosen}
    known = [gold for gold in golds.values() if gold is not None]
    for example in chosen:
        gold = golds[example.id]
        cheats = verifier.cheats(example, known)
        scores = [scored(verifier, judge, text, example) or 0.0 for text in cheats]
        if gold is None:
            continue
        right = scored(verifier, judge, gold, example) or 0.0
        if right <= 0:
            raise RecipeError(
                f"{where}: '{verifier.kind}' gives {right:g} to the reference answer of sample '{example.id}', "
                f"{gold[:SHOWN]!r}; expected more than 0. Name the column that holds the answer in source.columns, take "
                "another verifier, or set self_test = false."
            )
        for text, score in zip(cheats, scores, strict=True):
            if score >= right:
                raise RecipeError(
                    f"{where}: '{verifier.kind}' gives {score:g} to {text[:SHOWN]!r} for sample '{example.id}', as much as "
                    f"to its reference answer {gold[:SHOWN]!r}: a policy would learn to write that. Make the verifier "
                    "stricter, or set self_test = false."
                )
