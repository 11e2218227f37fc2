"""Nothing heavy is imported before it is needed, and help comes at once."""

import os
import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "peft", "accelerate", "datasets", "scipy", "pandas")
HELP_SECONDS = 0.4


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter holds after running `code`."""
    report = f"import sys\n{code}\nprint('loaded', *(n for n in {HEAVY!r} if n in sys.modules))"
    result = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    return set(result.stdout.splitlines()[-1].split()[1:])


def test_the_probe_sees_an_import() -> None:
    assert loaded_after("import pandas") == {"pandas"}


@pytest.mark.parametrize(
    "code",
    [
        "import statewise; dir(statewise); statewise.__version__",
        "import statewise.cli",
        "from statewise import Recipe, RunDir, Loss, Batch",
        "from statewise.component import kinds\nfor r in ('loss', 'weight', 'selector', 'signal', 'source'): kinds(r)",
        "from statewise.recipe import Recipe, shipped_recipes\nfor n in shipped_recipes(): Recipe.load(n).explain()",
    ],
)
def test_no_heavy_import(code: str) -> None:
    assert loaded_after(code) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["recipe", "--help"], ["--version"]])
def test_help_is_quick(arguments: list[str]) -> None:
    """Processor time, the best of three, so that a busy machine does not fail it."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "statewise", *arguments]
        subprocess.run(command, env={**os.environ, "COLUMNS": "100"}, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < HELP_SECONDS


def test_every_exported_name_exists() -> None:
    import statewise

    for name in statewise.__all__:
        assert getattr(statewise, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = statewise.nothing
