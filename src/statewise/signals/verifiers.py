"""The built-in verifiers. Importing registers their kinds."""

from __future__ import annotations

import inspect
import logging
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from statewise.answers import ANSWER_IS, extract_answer, last_boxed, normalised, same_answer
from statewise.errors import DataError, MissingExtra, RecipeError, nearest
from statewise.plugins import load_file
from statewise.signals.code import Code
from statewise.verifier import Judge, Verifier, as_number

if TYPE_CHECKING:
    from statewise.types import Example

__all__ = ["Answer", "Boxed", "Choice", "Code", "Exact", "Function", "Regex"]


class Answer(Verifier, kind="answer"):
    """1 where the final answer of the text (after ####, in a box, after "answer is", else the last number) is the right
    one. Of a reference answer with #### or a box, such as GSM8K's, what stands there counts."""

    def score(self, text: str, example: Example) -> float:
        return float(same_answer(extract_answer(text), _reference(example)))

    def cheats(self, example: Example, golds: Sequence[str]) -> list[str]:
        listed = super().cheats(example, [extract_answer(gold) or gold for gold in golds])
        return [*listed, f"#### {listed[1]}", f"\\boxed{{{listed[1]}}}", f"The answer is {listed[1]}"]


class Boxed(Verifier, kind="boxed"):
    r"""1 where math-verify finds the last \boxed{...} equal to the reference answer, as mathematics: 1/2 = 0.5."""

    def score(self, text: str, example: Example) -> float:
        boxed = last_boxed(text)
        if boxed is None:
            return 0.0
        library = _math_verify()
        config = [library.LatexExtractionConfig()]
        # The library's own time limits are alarms, which would undo ours.
        wanted, found = (
            library.parse(f"\\boxed{{{x}}}", extraction_config=config, parsing_timeout=None)
            for x in (_reference(example), boxed)
        )
        return float(library.verify(wanted, found, timeout_seconds=None))

    def opened(self, base_dir: Path) -> Judge:
        _math_verify()
        return self.score

    def gold(self, example: Example) -> str | None:
        return f"\\boxed{{{_reference(example)}}}"

    def cheats(self, example: Example, golds: Sequence[str]) -> list[str]:
        listed = super().cheats(example, [last_boxed(gold) or gold for gold in golds])
        boxes = " ".join(f"\\boxed{{{item}}}" for item in listed[1].split(", "))
        return [*listed, f"\\boxed{{{listed[1]}}}", boxes]


class Choice(Verifier, kind="choice"):
    """1 where the text ends in the right choice: its letter, its text, or both, alone on the last line or after "answer
    is". The row has a list `choices`, and in `answer` the number (from 0), letter or text of the right one."""

    def score(self, text: str, example: Example) -> float:
        marks = list(ANSWER_IS.finditer(text))
        lines = text[marks[-1].end() if marks else 0 :].strip().splitlines()
        said = normalised(lines[0 if marks else -1]) if lines else ""
        choices = _choices(example)
        return float(said in _ways_to_say(choices, _right(example, choices)))

    def gold(self, example: Example) -> str | None:
        choices = _choices(example)
        return choices[_right(example, choices)]

    def cheats(self, example: Example, golds: Sequence[str]) -> list[str]:
        choices = _choices(example)
        letters = list(string.ascii_uppercase[: len(choices)])
        return [*super().cheats(example, golds), *(sign.join(x) for sign in (", ", " ") for x in (letters, choices))]


class Exact(Verifier, kind="exact"):
    """1 where the whole text is the reference answer. normalise: without case, spacing and punctuation around it."""

    normalise: bool = True

    def score(self, text: str, example: Example) -> float:
        said, right = text.strip(), str(_known(example)).strip()
        return float(normalised(said) == normalised(right) != "" if self.normalise else said == right != "")


class Regex(Verifier, kind="regex"):
    """The last match of `pattern`: what its first group holds is compared with the reference answer; without a group, a
    match is all that is asked. sample: a text that is right, with {answer} where the reference answer stands."""

    pattern: str
    sample: str = "{answer}"

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise RecipeError(f"verifier.regex: pattern {value!r} is no regular expression: {error}.") from None
        return value

    def score(self, text: str, example: Example) -> float:
        compiled = re.compile(self.pattern)
        matches = list(compiled.finditer(text))
        if not matches or not compiled.groups:
            return float(bool(matches))
        return float(same_answer(matches[-1][1], _reference(example)))

    def gold(self, example: Example) -> str | None:
        grouped = re.compile(self.pattern).groups
        return self.sample.replace("{answer}", _reference(example)) if grouped else None

    def cheats(self, example: Example, golds: Sequence[str]) -> list[str]:
        found = [re.search(self.pattern, gold) for gold in golds]
        listed = super().cheats(example, [match[1] for match in found if match])
        return [*listed, self.sample.replace("{answer}", listed[1])]


class Function(Verifier, kind="function"):
    """A function of yours, `name(text, example) -> number`: `call = "file.py:name"`, beside the recipe or where you are.

    example: `example["column"]` of the row; `messages` or `text` of the prompt, the reference `answer`, `id`.
    """

    call: str

    @field_validator("call")
    @classmethod
    def _names_both(cls, value: str) -> str:
        if not re.fullmatch(r".+\.py:\w+", value):
            raise RecipeError(f"verifier.function.call: received '{value}', expected 'file.py:function'.")
        return value

    def score(self, text: str, example: Example) -> float:
        return self.opened(Path("."))(text, example)

    def opened(self, base_dir: Path) -> Judge:
        file, _, name = self.call.rpartition(":")
        module = load_file(file, base_dir)
        function = getattr(module, name, None)
        if not callable(function):
            classes = [c.kind for c in vars(module).values() if _is_verifier(c, module)]
            if classes:
                raise RecipeError(
                    f"verifier.function: '{file}' defines no function '{name}'; it defines the verifier '{classes[0]}': name the "
                    f'file in plugins, plugins = ["{file}"], and the verifier by its kind, verifier = "{classes[0]}".'
                )
            defined = [n for n, value in vars(module).items() if inspect.isfunction(value)]
            raise RecipeError(f"verifier.function: '{file}' defines no function '{name}'{nearest(name, defined)}")
        if not _takes_two(function):
            raise RecipeError(
                f"verifier.function: '{self.call}' is {name}{inspect.signature(function)}, expected {name}(text, example) "
                "-> number: the text of one completion, and its row (example.answer, example.metadata)."
            )
        return lambda text, example: as_number(function(text, example), f"verifier '{self.call}'")

    def files(self) -> tuple[str, ...]:
        return (self.call.rpartition(":")[0],)

    def gold(self, example: Example) -> str | None:
        written = example.metadata.get("completion")
        if isinstance(written, list) and written:
            written = written[-1].get("content")
        return written if isinstance(written, str) else super().gold(example)


def _is_verifier(value: Any, module: Any) -> bool:
    own = inspect.isclass(value) and issubclass(value, Verifier) and value.__module__ == module.__name__
    return own and bool(value.kind)


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind("", None)
    except TypeError:
        return False
    except ValueError:  # a builtin that doesn't say what it takes
        return True
    return True


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError:
        raise MissingExtra("math-verify", "math", "the verifier 'boxed'") from None
    for name in ("parser", "grader"):  # they warn at every call without a time limit of theirs
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    return math_verify


def _known(example: Example) -> Any:
    if example.answer is None:
        raise DataError(
            f"sample '{example.id}': has no reference answer (it has: {', '.join(map(str, example.metadata))}); name the "
            'column in source.columns, such as { answer = "solution" }.'
        )
    return example.answer


def _reference(example: Example) -> str:
    """The reference answer, without the steps before it."""
    answer = str(_known(example)).strip()
    boxed = last_boxed(answer)
    return boxed or (extract_answer(answer) or answer if "####" in answer else answer)


def _choices(example: Example) -> list[str]:
    choices = example.metadata.get("choices")
    if isinstance(choices, dict):  # such as ARC's {"text": [...], "label": [...]}
        choices = choices.get("text")
    if not isinstance(choices, list) or len(choices) < 2:
        raise DataError(f"sample '{example.id}': choices is {choices!r}, expected a list of at least two texts.")
    return [str(choice) for choice in choices]


def _right(example: Example, choices: list[str]) -> int:
    """The number of the right choice, from its number, letter or text."""
    answer = _known(example)
    if isinstance(answer, int) and 0 <= answer < len(choices):
        return answer
    letters = string.ascii_uppercase[: len(choices)]
    if isinstance(answer, str) and answer.strip().upper() in letters and len(answer.strip()) == 1:
        return letters.index(answer.strip().upper())
    if answer in choices:
        return choices.index(answer)
    raise DataError(
        f"sample '{example.id}': answer is {answer!r}, expected a number from 0 to {len(choices) - 1}, a letter from A to "
        f"{letters[-1]}, or one of the choices."
    )


def _ways_to_say(choices: list[str], right: int) -> set[str]:
    letter, text = string.ascii_lowercase[right], normalised(choices[right])
    ways = {letter, f"{letter} {text}", f"{letter}. {text}", f"{letter}) {text}", f"{letter}: {text}"}
    # A text that two choices share says neither.
    return ways | ({text} if sum(normalised(c) == text for c in choices) == 1 else set())
