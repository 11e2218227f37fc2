"""How numbers are printed."""

import math

import pytest

from statewise.cli.output import print_table
from statewise.estimates import interval, number


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (-0.00001, ".4f", "0.0000"),
        (-0.00001, "+.4f", "0.0000"),
        (0.00001, "+.4f", "0.0000"),
        (-0.0, ".4g", "0"),
        (-0.00005001, ".4f", "-0.0001"),
        (0.25, "+.2f", "+0.25"),
        (-math.inf, ".3f", "-inf"),
        (math.nan, ".3f", "nan"),
    ],
)
def test_what_is_rounded_to_0_has_no_sign(value: float, form: str, text: str) -> None:
    assert number(value, form) == text


def test_nor_have_the_ends_of_an_interval() -> None:
    assert interval(-1e-6, -0.02, -1e-9, "+.4f") == "0.0000 [-0.0200, 0.0000]"


def test_nor_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["F"], [[-0.0]])
    assert capsys.readouterr().out.split() == ["F", "0"]
