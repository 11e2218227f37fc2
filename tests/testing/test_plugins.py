"""`statewise check` on the files of docs/plugins.md, each in a process of its own, where nothing is imported yet."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
FILES = {m[1]: m[2] for m in re.finditer(r"```python\n# file: (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)}


def check(folder: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(text)
    command = [sys.executable, "-m", "statewise", "check", name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("name", "component"), [("sums.py", "source sums"), ("copying.py", "task copying")])
def test_only_what_the_file_defines_is_checked(tmp_path: Path, name: str, component: str):
    done = check(tmp_path, name, FILES[name])
    assert f"checking {component}\n" in done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
