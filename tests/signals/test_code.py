"""The verifier that runs code: off by default, and what a child process can't do."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from statewise.errors import DataError, RecipeError
from statewise.signals import sandbox
from statewise.signals.code import Code, code_of
from statewise.sources.judging import self_test
from statewise.types import Example

TESTS = ["assert double(2) == 4", "assert double(-1) == -2"]
ASKED = Example("one", metadata={"tests": TESTS, "solution": "def double(x):\n    return 2 * x"})
CODE = Code(allow_code_execution=True, time_limit=3.0)
RIGHT = "Here it is:\n```python\ndef double(x):\n    return x + x\n```\nDone."


def test_it_is_refused_unless_allowed():
    with pytest.raises(RecipeError, match="allow_code_execution = true"):
        Code()


def test_the_last_block_is_run():
    assert code_of("```\nfirst\n```\n```python\nlast\n```") == "last\n"
    assert code_of("plain") == "plain"
    assert CODE.score(RIGHT, ASKED) == 1.0
    assert CODE.score("def double(x):\n    return 2", ASKED) == 0.0


def test_the_self_test_passes():
    self_test(CODE, [ASKED], Path("."), "signal.reward.verifier")


@pytest.mark.parametrize(
    "trick",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "def double(x):\n    raise SystemExit(0)",
        "print('all tests passed')\nquit = exit = None",
        "syntax error (",
    ],
)
def test_leaving_early_does_not_pass(trick: str):
    assert CODE.score(trick, ASKED) == 0.0


def works(body: str) -> bool:
    """Whether a program whose only test is that it gets to its end does."""
    asked = Example("one", metadata={"tests": "pass"})
    return CODE.score(body, asked) == 1.0


def test_limits():
    assert works("x = 1")
    assert not works("x = bytearray(1 << 30)"), "memory"
    assert not works("open('big', 'wb').write(b'0' * (9 << 20))"), "file size"
    assert not works("files = [open('f%d' % i, 'w') for i in range(100)]"), "open files"
    assert works("import os\nassert sorted(os.listdir('.')) == ['output', 'program.py']")
    assert works("import os\nassert 'PYTHONPATH' not in os.environ and 'OMP_NUM_THREADS' not in os.environ")


def test_time_and_grandchildren(tmp_path: Path):
    quick = Code(allow_code_execution=True, time_limit=0.7)
    mark = tmp_path / "mark"
    later = f"import time; time.sleep(2); open({str(mark)!r}, 'w')"
    body = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {later!r}])"
    started = time.monotonic()
    assert quick.score(f"{body}\nwhile True: pass", ASKED) == 0.0
    assert time.monotonic() - started < 3
    time.sleep(2.5)
    assert not mark.exists(), "a process that the program started outlived it"


def test_no_network_where_the_system_allows():
    probe = "import sandbox; print(sandbox.leave_network())"
    beside = {"PYTHONPATH": str(Path(sandbox.__file__).parent)}
    command = [sys.executable, "-c", probe]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=beside).stdout.strip()
    if found != "True":
        pytest.skip("this system gives an ordinary process no network namespace")
    assert not works("import socket\nsocket.create_connection(('127.0.0.1', 9), 1)")
    assert works("import socket\nassert [name for _, name in socket.if_nameindex()] == ['lo']")


@pytest.mark.parametrize("tests", [None, "", [], [3]])
def test_rows_without_tests(tests: object):
    with pytest.raises(DataError, match="expected Python text or a list"):
        CODE.score("x = 1", Example("one", metadata={"tests": tests}))
