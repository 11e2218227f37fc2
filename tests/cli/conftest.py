"""A recipe file with a source of its own, and the command line called in this process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from statewise.cli import main

SOURCE = '''
from statewise.component import Source

class Nothing(Source, kind="nothing_for_cli_tests"):
    """Has gold tokens and gives none."""
    writes = ("gold",)

    def sample(self, step, num_rollouts, world):
        return []
'''
RECIPE = """
plugins = ["nothing.py"]
source = "nothing_for_cli_tests"
signal = ["gold"]

[[objective]]
loss = "nll"

[budget]
max_steps = 10
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "nothing.py").write_text(SOURCE)
    (tmp_path / "words.toml").write_text(RECIPE)
    return tmp_path / "words.toml"


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*words: object) -> Result:
        with pytest.raises(SystemExit) as caught:
            main([str(w) for w in words])
        out, err = capsys.readouterr()
        return Result(int(caught.value.code or 0), out, err)

    return call
