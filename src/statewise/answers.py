"""The final answer of a text, and whether two answers are the same. Linear in the length of the text."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

# No repetition stands before something that can fail after it was long, so that a search stays linear.
NUMBER = re.compile(
    r"""
    (?:(?<![A-Za-z0-9_)\]}])(?P<sign>[-−]))?        # a minus after an operand is an operation, not a sign
    [$€£]?
    (?<![A-Za-z0-9_])
    (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ | (?=\.[0-9]))
    (?P<decimals>\.[0-9]+)?
    (?: [eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9])
      | [ ]?(?:[×x*]|\\times)[ ]?10\^\{?(?P<power>[-−]?[0-9]{1,3})\}? )?
    (?: [ ]?/[ ]?(?P<denominator>[0-9]+(?:\.[0-9]+)?) )?
    """,
    re.VERBOSE,
)
BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
ANSWER_IS = re.compile(r"answer(?:\s+is)?\s*[:=]|answer\s+is\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
CALCULATION = re.compile(r"[-−+*/×÷().,$^0-9 ]*=")
FRACTION = re.compile(r"\\[dt]?frac\s*\{(-?[0-9.,]+)\}\s*\{([0-9.,]+)\}")
WORDS = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
LATEX = {r"\$": "$", r"\%": "%", r"\!": "", r"\,": "", r"\ ": " ", "{,}": ","}
DECORATION = " \t\r\n*_`'\"“”‘’$()[].,;:!?"
MAX_DIGITS = 200  # a longer number is compared as text: arithmetic on it could take for ever


def extract_answer(text: str) -> str | None:
    r"""The answer that a text ends in, or None.

    In this order: what follows the last `####`; the last `\boxed{...}`; what follows the last "answer is" or "answer:";
    the last number. A number loses separators, currency and units ("#### $1,234.50 a day" gives "1234.50"); another
    answer is the line or sentence, without punctuation around it.
    """
    _, mark, tail = text.rpartition("####")
    if mark and (found := _answer_in(tail.lstrip().split("\n", 1)[0])):
        return found
    boxed = last_boxed(text)
    if boxed is not None and (found := _content(boxed)):
        return found
    marks = list(ANSWER_IS.finditer(text))
    if marks:
        sentence = SENTENCE_END.split(text[marks[-1].end() :].lstrip(), maxsplit=1)[0]
        if found := _answer_in(sentence):
            return found
    numbers = list(NUMBER.finditer(text))
    return _canonical(numbers[-1]) if numbers else None


def same_answer(predicted: object, reference: object) -> bool:
    """Equal as numbers (1,234.00 = 1234, 6/8 = 0.75, exactly), or else as text without case, spacing and punctuation.

    A unit may be left out on one side but not be another one. None is equal to nothing.
    """
    if predicted is None or reference is None:
        return False
    ours, theirs = _quantity(str(predicted)), _quantity(str(reference))
    if ours is not None and theirs is not None:
        return ours[0] == theirs[0] and (ours[1] == theirs[1] or not ours[1] or not theirs[1])
    return normalised(str(predicted)) == normalised(str(reference)) != ""


def _answer_in(line: str) -> str | None:
    """The first number of a line, or the result of a calculation that it begins with, or the line itself."""
    line = _without_latex(line)
    boxed = last_boxed(line)
    if boxed is not None:
        return _content(boxed)
    calculation = CALCULATION.match(line)
    number = NUMBER.search(line, calculation.end() if calculation else 0)
    return _canonical(number) if number else line.strip(DECORATION) or None


def _content(boxed: str) -> str | None:
    r"""What a `\boxed` holds: a bare number where it is a quantity, else the expression as it stands."""
    plain = _without_latex(boxed).strip().strip("$").strip()
    number = NUMBER.match(plain)
    if number and _quantity(plain) is not None:
        return _canonical(number)
    return plain or None


def last_boxed(text: str) -> str | None:
    """Content of the last boxed expression whose braces close."""
    opened: list[int | None] = []
    found: tuple[int, int] | None = None
    for token in BRACES.finditer(text):
        if token[0].startswith("\\boxed"):
            opened.append(token.end())
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened:
            start = opened.pop()
            found = (start, token.start()) if start is not None else found
    return text[slice(*found)] if found else None


def _without_latex(text: str) -> str:
    if "\\" not in text and "{" not in text:
        return text
    text = WORDS.sub(r" \1", FRACTION.sub(r"\1/\2", text))
    for old, new in LATEX.items():
        text = text.replace(old, new)
    return text


def _canonical(number: re.Match[str]) -> str:
    """Digits without separators, "-" as the sign, exponents as "e3", fractions as "3/4"."""
    sign = "-" if number["sign"] else ""
    exponent = (number["exponent"] or number["power"] or "").replace("−", "-")
    value = sign + (number["digits"].replace(",", "") or "0") + (number["decimals"] or "")
    return value + (f"e{exponent}" if exponent else "") + (f"/{number['denominator']}" if number["denominator"] else "")


def _quantity(text: str) -> tuple[Fraction, str] | None:
    """(value, unit) of a text that is one number with at most a unit after it."""
    text = _without_latex(text).strip().strip(DECORATION.replace("$", "").replace(".", "")).strip()
    number = NUMBER.match(text)
    if number is None or len(number[0]) > MAX_DIGITS:
        return None
    unit = normalised(text[number.end() :])
    if any(c.isdigit() for c in unit) or any(c in unit for c in "+*/=^\\"):
        return None
    top, _, bottom = _canonical(number).partition("/")
    if bottom and Fraction(bottom) == 0:
        return None
    return Fraction(top) / Fraction(bottom or 1), unit


def normalised(text: str) -> str:
    """Without case, repeated spacing, LaTeX dress and punctuation around it."""
    folded = unicodedata.normalize("NFKC", _without_latex(text)).casefold()
    return " ".join(folded.split()).strip(DECORATION + "%°")
