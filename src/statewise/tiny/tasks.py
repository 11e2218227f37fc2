"""The tasks of the embedded model: made from seeds, the same on every machine, with disjoint train and test splits.

Rows depend on (name, split, seed) only, and a smaller ``count`` gives a prefix of a larger one. Within a call every row
is unique. Ids carry the seed when it isn't 0, so rows of different seeds can't be taken for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from statewise.errors import DataError
from statewise.tiny import arithmetic, knowledge, stories

SPLITS = ("train", "test")
NUM_FACT_CHOICES = 4
MAX_DRAWS_A_ROW = 1000  # then the space of distinct rows counts as used up

Row = dict[str, Any]


def math_problems(
    split: str, count: int, seed: int = 0, steps: tuple[int, ...] = (2, 3), style: str = "plain"
) -> list[Row]:
    """Word problems with worked steps: ``id``, ``prompt``, ``completion`` (messages), ``answer``, ``steps``.

    Row i has ``steps[i % len(steps)]`` steps, so the mix is exact. The splits share no chain of numbers and operations.
    ``style`` changes how the steps are written, never the problem: "plain" ``17 - 1 = 16. 16 * 2 = 32.``, "terse"
    ``17-1=16; 16*2=32``, "verbose" ``First, 17 - 1 = 16. Then 16 * 2 = 32.``, "retold" in words, by one of three hands:
    ``Start with 17. Take 1 away to get 16. Multiply by 2 to get 32.``
    """
    return [
        {**ask, "completion": _says(arithmetic.solution(chain, style)), **facts}
        for ask, facts, chain in _problems(split, count, seed, steps, style)
    ]


def math_pairs(
    split: str, count: int, seed: int = 0, steps: tuple[int, ...] = (2, 3), style: str = "plain"
) -> list[Row]:
    """The problems of ``math_problems`` with a right (``chosen``) and a wrong (``rejected``) solution: one step is off, and
    the steps after it go on from its result."""
    random = _random("math_pairs", split, seed, *steps)
    return [
        {
            **ask,
            "chosen": _says(arithmetic.solution(chain, style)),
            "rejected": _says(arithmetic.solution(chain, style, arithmetic.draw_slip(random, chain))),
            **facts,
        }
        for ask, facts, chain in _problems(split, count, seed, steps, style)
    ]


def math_restyled(split: str, count: int, seed: int = 0, steps: tuple[int, ...] = (2, 3)) -> list[Row]:
    """The problems of ``math_problems`` with right answers that the embedded model would not write: "retold"."""
    return math_problems(split, count, seed, steps, "retold")


def math_hinted(split: str, count: int, seed: int = 0, steps: tuple[int, ...] = (2, 3)) -> list[Row]:
    """Practice in reading: a problem, a "retold" solution, the problem again; the completion tells that solution in the style
    "plain".

    The results are invented, so that they can be had from the solution only: who trains on this learns no arithmetic.
    """
    random = _random("math_hinted", split, seed, *steps)
    rows = []
    for ask, facts, chain in _problems(split, count, seed, steps, "plain"):
        told = arithmetic.invented(random, chain)
        hint = _says(arithmetic.tell(told, "retold", random.randrange(len(arithmetic.HANDS))))
        own = _says(arithmetic.tell(told, "plain"))
        answer = str(told[-1][-1])
        rows.append(
            {**ask, "prompt": [*ask["prompt"], *hint, *ask["prompt"]], "completion": own, **facts, "answer": answer}
        )
    return rows


def _says(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


def _problems(
    split: str, count: int, seed: int, steps: tuple[int, ...], style: str
) -> Iterator[tuple[Row, Row, arithmetic.Chain]]:
    """``id`` and ``prompt``, ``answer`` and ``steps``, and what the solution is written from."""
    _check(split, count)
    if style not in arithmetic.STYLES:
        raise DataError(f"style: got {style!r}, expected one of {', '.join(arithmetic.STYLES)}.")
    if not steps or not all(isinstance(n, int) and 1 <= n <= arithmetic.MAX_STEPS for n in steps):
        raise DataError(f"steps: got {steps!r}, expected integers from 1 to {arithmetic.MAX_STEPS}.")
    random = _random("math", split, seed, *steps)
    seen: set[str] = set()
    for index in range(count):
        num_steps = steps[index % len(steps)]

        def draw(num_steps: int = num_steps) -> tuple[str, arithmetic.Chain]:
            chain = arithmetic.draw_chain(random, split, num_steps)
            return arithmetic.question(random, chain), chain

        question, chain = _unseen(draw, seen, "tiny:math", split, index)
        ask = {"id": _row_id("math", split, seed, index), "prompt": [{"role": "user", "content": question}]}
        yield ask, {"answer": str(chain.equations()[-1][-1]), "steps": num_steps}, chain


def facts(split: str, count: int, seed: int = 0) -> list[Row]:
    """Multiple choice about facts: ``id``, ``prompt`` (messages), four ``choices``, ``answer`` (index of the truth)."""
    return _multiple_choice("facts", split, count, seed)


def beliefs(split: str, count: int, seed: int = 0) -> list[Row]:
    """Common belief against truth: as ``facts``, with three ``choices``: truth, belief, and an answer nobody gives."""
    return _multiple_choice("beliefs", split, count, seed)


def texts(split: str, count: int, seed: int = 0) -> list[Row]:
    """Short plain texts: ``id``, ``text``."""
    _check(split, count)
    random = _random("text", split, seed)
    seen: set[str] = set()
    rows = []
    for index in range(count):
        text, _ = _unseen(lambda: (stories.draw_story(random, split), None), seen, "tiny:text", split, index)
        rows.append({"id": _row_id("text", split, seed, index), "text": text})
    return rows


def rows(name: str, split: str, count: int, seed: int = 0) -> list[Row]:
    """The rows of a task by its public name, ``tiny:math`` and so on.

    Raises:
        DataError: unknown name or split, or more distinct rows asked for than there are.
    """
    makers = {
        "tiny:math": math_problems,
        "tiny:math_pairs": math_pairs,
        "tiny:math_restyled": math_restyled,
        "tiny:math_hinted": math_hinted,
        "tiny:facts": facts,
        "tiny:beliefs": beliefs,
        "tiny:text": texts,
    }
    if name not in makers:
        raise DataError(f"task: got {name!r}, expected one of {', '.join(makers)}.")
    return makers[name](split, count, seed)


def _multiple_choice(kind: str, split: str, count: int, seed: int) -> list[Row]:
    _check(split, count)
    pairs = list(knowledge.questions(kind, split))
    if count > len(pairs):
        raise DataError(
            f"count: got {count} rows of tiny:{kind} ({split}), but there are {len(pairs)} different questions; "
            f"ask for at most {len(pairs)}."
        )
    random = _random(kind, split, seed)
    random.shuffle(pairs)
    rows = []
    for index, (topic, question) in enumerate(pairs[:count]):
        wrong = [topic.belief] if topic.belief else []
        num_others = 1 if topic.belief else NUM_FACT_CHOICES - 1
        choices = [topic.truth, *wrong, *random.sample(topic.others, num_others)]
        random.shuffle(choices)
        rows.append(
            {
                "id": _row_id(kind, split, seed, index),
                "prompt": [{"role": "user", "content": question}],
                "choices": choices,
                "answer": choices.index(topic.truth),
            }
        )
    return rows


def _unseen(draw: Callable[[], tuple[str, Any]], seen: set[str], name: str, split: str, index: int) -> tuple[str, Any]:
    for _ in range(MAX_DRAWS_A_ROW):
        text, extra = draw()
        if text not in seen:
            seen.add(text)
            return text, extra
    raise DataError(f"count: no new row of {name} ({split}) found after {index} rows; ask for fewer.")


def _random(*parts: object) -> Random:
    return Random(" ".join(str(part) for part in parts))  # a string seeds through SHA-512, not through hash()


def _row_id(kind: str, split: str, seed: int, index: int) -> str:
    stream = f"s{seed}-" if seed else ""
    return f"{kind}-{split}-{stream}{index:06d}"


def _check(split: str, count: int) -> None:
    if split not in SPLITS:
        raise DataError(f"split: got {split!r}, expected one of {', '.join(SPLITS)}.")
    if count < 0:
        raise DataError(f"count: got {count}, expected a number of rows >= 0.")
