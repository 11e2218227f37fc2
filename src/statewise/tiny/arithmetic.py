"""Word problems over a chain of additions, subtractions and multiplications, with worked steps.

The split of a problem is a hash of its chain of numbers and operations, whatever the words around it: the model is
never tested on a calculation it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from statewise.tiny.knowledge import digest, words

NAMES = words("Tom Anna Ben Mia Sam Lily Max Emma Leo Nina Paul Rosa Jack Eva Dan Kim")
ITEMS = words("apples books coins cards pens shells stamps eggs cups balls stones flowers")
WORDINGS = {
    "+": ("{n} buys {k} more.", "{n} finds {k} more.", "{n} gets {k} more."),
    "-": ("{n} loses {k}.", "{n} sells {k}.", "{n} gives away {k}."),
    "*": ("Then {n} has {k} times as many.", "The number grows {k} times."),
}
STYLES = ("plain", "terse", "verbose", "retold")
# "retold": three hands that write in words; of each how it begins, then the sentence for each operation.
HANDS = (
    (
        "Start with {left}.",
        {"+": "Add {k} to get {v}.", "-": "Take {k} away to get {v}.", "*": "Multiply by {k} to get {v}."},
    ),
    (
        "At first there are {left}.",
        {"+": "With {k} more that makes {v}.", "-": "Without {k} that leaves {v}.", "*": "{k} times that makes {v}."},
    ),
    ("{left} at the start.", {"+": "{k} come in: {v}.", "-": "{k} go out: {v}.", "*": "Times {k}: {v}."}),
)
MAX_STEPS = 4
MAX_START = 20
MAX_OPERAND = 15  # of an addition or subtraction
MAX_FACTOR = 3
MAX_SLIP = 3  # by which the result of a wrong step is off
MAX_VALUE = 99  # of every intermediate result: single steps stay learnable for a model of 1M parameters
TEST_SHARE = 5  # one chain in five is a test chain
Equation = tuple[int, str, int, int]  # left, operation, right, result
OPERATIONS = ("+", "-", "*")


@dataclass(frozen=True)
class Chain:
    """``start`` followed by (operation, operand) pairs; every intermediate value is in [1, MAX_VALUE]."""

    start: int
    moves: tuple[tuple[str, int], ...]

    def equations(self, slip: tuple[int, int] = (0, 0)) -> list[Equation]:
        """(left, operation, operand, result) of each step; `slip`: the result of step number slip[0] is off by slip[1],
        and the steps after it go on from there."""
        value, steps = self.start, []
        for index, (operation, operand) in enumerate(self.moves):
            result = apply(value, operation, operand) + (slip[1] if index == slip[0] else 0)
            steps.append((value, operation, operand, result))
            value = result
        return steps

    @property
    def split(self) -> str:
        return "test" if digest(f"chain {self.start} {self.moves}") % TEST_SHARE == 0 else "train"


def apply(value: int, operation: str, operand: int) -> int:
    return {"+": value + operand, "-": value - operand, "*": value * operand}[operation]


def draw_move(random: Random, value: int) -> tuple[str, int]:
    """A move that keeps the value in [1, MAX_VALUE]."""
    while True:
        operation = random.choice(OPERATIONS)
        operand = random.randint(2, MAX_FACTOR) if operation == "*" else random.randint(1, MAX_OPERAND)
        if 1 <= apply(value, operation, operand) <= MAX_VALUE:
            return operation, operand


def draw_chain(random: Random, split: str, num_steps: int) -> Chain:
    """A chain of the split, by rejection."""
    while True:
        start = value = random.randint(2, MAX_START)
        moves = []
        for _ in range(num_steps):
            moves.append(draw_move(random, value))
            value = apply(value, *moves[-1])
        chain = Chain(start, tuple(moves))
        if chain.split == split:
            return chain


def question(random: Random, chain: Chain) -> str:
    name, item = random.choice(NAMES), random.choice(ITEMS)
    sentences = [f"{name} has {chain.start} {item}."]
    for operation, operand in chain.moves:
        sentences.append(random.choice(WORDINGS[operation]).format(n=name, k=operand))
    return " ".join([*sentences, f"How many {item} does {name} have now?"])


def draw_slip(random: Random, chain: Chain) -> tuple[int, int]:
    """A slip that leaves every intermediate value positive; the answer is then always wrong."""
    at, size = random.randrange(len(chain.moves)), random.randint(1, MAX_SLIP)
    down = (at, -size)
    small = any(result < 1 for *_, result in chain.equations(down))
    return (at, size) if small or random.random() < 0.5 else down


def solution(chain: Chain, style: str = "plain", slip: tuple[int, int] = (0, 0)) -> str:
    """The worked steps and, on the last line, ``#### answer``."""
    return tell(chain.equations(slip), style, digest(f"hand {chain.start} {chain.moves}") % len(HANDS))


def invented(random: Random, chain: Chain) -> list[Equation]:
    """The steps of the chain with results out of the air, each step going on from the one before."""
    value, steps = chain.start, []
    for operation, operand in chain.moves:
        result = random.randint(1, MAX_VALUE)
        steps.append((value, operation, operand, result))
        value = result
    return steps


def tell(steps: Sequence[Equation], style: str, hand: int = 0) -> str:
    """The steps in a style and, on the last line, ``#### answer``. hand: which of HANDS, in "retold"."""
    if style == "retold":
        opening, sentences = HANDS[hand]
        parts = [opening.format(left=steps[0][0]), *(sentences[op].format(k=k, v=value) for _, op, k, value in steps)]
        worked = " ".join(parts)
    elif style == "terse":
        worked = "; ".join(f"{left}{op}{right}={result}" for left, op, right, result in steps)
    else:
        parts = [f"{left} {op} {right} = {result}." for left, op, right, result in steps]
        if style == "verbose":
            openings = ["First,"] + ["Then"] * (len(parts) - 1)
            parts = [f"{opening} {step}" for opening, step in zip(openings, parts, strict=True)]
        worked = " ".join(parts)
    return f"{worked}\n#### {steps[-1][-1]}"
