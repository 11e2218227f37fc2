"""Code that a model wrote, run against unit tests in a child process. Off unless the recipe allows it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from statewise.errors import DataError, RecipeError
from statewise.signals import sandbox
from statewise.verifier import Verifier

if TYPE_CHECKING:
    from statewise.types import Example

FENCE = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
OUTPUT_BYTES = 1 << 16  # read of what the tests print; the rest is thrown away


class Code(Verifier, kind="code"):
    """1 where the last fenced block of the text (else the text), followed by the row's tests, runs to its end.

    tests: the column that holds the tests, Python text or a list of statements such as "assert f(2) == 4".
    solution: a column with code that passes, for the test before training.
    A child process without this one's environment, in an empty folder that is deleted afterwards, with limits on time,
    memory (MiB), files (MiB) and processes, and without a network where the system lets an ordinary user give that up.
    It is a guard against accidents and no prison: run code of models you don't trust in a container.
    """

    allow_code_execution: bool = False
    tests: str = "tests"
    solution: str = "solution"
    time_limit: float = Field(5.0, gt=0)
    memory_limit: int = Field(512, ge=32)
    file_limit: int = Field(8, ge=0)

    @model_validator(mode="after")
    def _allowed(self) -> Code:
        if not self.allow_code_execution:
            raise RecipeError(
                "verifier.code: would run text written by a model on this machine; set allow_code_execution = true where "
                "that is meant, best inside a container."
            )
        return self

    def score(self, text: str, example: Example) -> float:
        # Only a program that got to its end knows the word, so that leaving early doesn't count as passing.
        word = token_hex(16)
        program = "\n".join([code_of(text), "", self._tests(example), f"print({word!r})", ""])
        return float(self._run(program).rstrip().endswith(word.encode()))

    def gold(self, example: Example) -> str | None:
        found = example.metadata.get(self.solution)
        return found if isinstance(found, str) else None

    def cheats(self, example: Example, golds: Sequence[str]) -> list[str]:
        return ["", "raise SystemExit(0)", "import os\nos._exit(0)"]

    def _tests(self, example: Example) -> str:
        tests = example.metadata.get(self.tests)
        if isinstance(tests, list) and tests and all(isinstance(t, str) for t in tests):
            return "\n".join(tests)
        if isinstance(tests, str) and tests.strip():
            return tests
        raise DataError(
            f"sample '{example.id}': {self.tests} is {tests!r}, expected Python text or a list of statements; name the "
            "column in verifier.tests."
        )

    def _run(self, program: str) -> bytes:
        """What the program printed last; empty where it ran out of time."""
        with tempfile.TemporaryDirectory(prefix="statewise_") as folder:
            file = Path(folder) / "program.py"
            file.write_text(program, encoding="utf-8", errors="replace")
            limits = [str(int(self.time_limit) + 1), str(self.memory_limit << 20), str(self.file_limit << 20)]
            with (Path(folder) / "output").open("w+b") as output:
                child = subprocess.Popen(
                    [sys.executable, "-I", "-S", sandbox.__file__, *limits, str(file)],
                    cwd=folder,
                    env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                finished = _ends(child, self.time_limit)
                output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
                return output.read() if finished and child.returncode == 0 else b""


def _ends(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the child ends by itself; whatever it started is ended in any case."""
    try:
        child.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def code_of(text: str) -> str:
    """The last fenced block of a text, else the text."""
    blocks = FENCE.findall(text)
    return blocks[-1] if blocks else text
