"""Every code block of every page does what it says, in a temporary directory that the blocks of a page share.

    ```python          runs; blocks of a page share a namespace
    ```toml            loads as a recipe
    ```toml fragment   loads as a recipe when merged into BASE
    ```toml tasks      loads as a file of `statewise eval --tasks`
    ```toml study      can be planned as a study
    ```bash            its lines are `statewise ...` commands and must exit with 0
    ```... no-run      is only shown: needs make, pip, a network, a GPU or a model that is not shipped

A first line `# file: NAME`, or `file=NAME` after the language, writes the block to that file; a Python file is not run.
"""

import contextlib
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from statewise import registry
from statewise.cli import main
from statewise.cli.words import read_tasks
from statewise.errors import RecipeError
from statewise.recipe import Recipe
from statewise.study.plan import make_plan

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BASE = """
source = { kind = "dataset", data = "tiny:math", count = 32 }
signal = ["gold", "behavior", "reference"]
objective = ["nll"]
batch = { rollouts = 8, minibatches = 2 }
budget = { max_steps = 2 }
"""
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ ]*$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.M)
NAMED_TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")
RUN_LANGUAGES = {"python", "toml", "bash"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string in words, its text, where it starts."""

    words: tuple[str, ...]
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def file(self) -> str | None:
        named = [w.removeprefix("file=") for w in self.words[1:] if w.startswith("file=")]
        comment = re.match(r"# file: (\S+)\n", self.text)
        return named[0] if named else comment and comment[1]


def blocks_of(text: str) -> list[Block]:
    return [
        Block(tuple(found["info"].split()), found["text"], text.count("\n", 0, found.start()) + 1)
        for found in FENCE.finditer(text)
    ]


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.fixture
def page_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory; what plug-ins register is forgotten afterwards."""
    for role in registry.BUILTIN:
        registry.kinds(role)
    before = {role: dict(kinds) for role, kinds in registry.REGISTRY.items()}
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for role, kinds in registry.REGISTRY.items():
        kinds.clear()
        kinds.update(before.get(role, {}))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_blocks(page: Path, page_dir: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks_of(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.file is not None:
            (page_dir / block.file).write_text(block.text, encoding="utf-8")
        if "no-run" in block.words or block.language not in RUN_LANGUAGES:
            continue
        if block.language == "python" and block.file is None:
            run_python(block, where, namespace)
        elif block.language == "toml":
            load_toml(block, where, page_dir)
        elif block.language == "bash":
            run_commands(block, where)


def run_python(block: Block, where: str, namespace: dict[str, Any]) -> None:
    code = compile("\n" * block.line + block.text, where.rpartition(":")[0], "exec")  # so that tracebacks name the line
    exec(code, namespace)


def load_toml(block: Block, where: str, directory: Path) -> None:
    plain = tomllib.loads(block.text)
    if "study" in block.words:
        assert block.file is not None and make_plan(directory / block.file).jobs, where
        return
    if "tasks" in block.words:
        file = directory / "tasks_of_a_block.toml"
        file.write_text(block.text)
        assert read_tasks(file), where
        return
    if "fragment" in block.words:
        plain = tomllib.loads(BASE) | plain
    recipe = Recipe.from_plain(plain, base_dir=directory, name=where)
    assert tomllib.loads(recipe.to_toml()) == recipe.to_plain(), where


def run_commands(block: Block, where: str) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert words[0] == "statewise", f"{where}: '{line}' is no statewise command; mark the block no-run"
        code, output = call(words[1:])
        assert code == 0, f"{where}: '{line}' ended with {code}:\n{output}"


def call(words: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            main(words)
        except SystemExit as stop:
            return int(stop.code or 0), output.getvalue()
    return 0, output.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_links(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in LINK.finditer(text):
        target = found["target"]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.relative_to(ROOT)}: no file '{target}'"
        if anchor:
            assert anchor in anchors(file), f"{page.relative_to(ROOT)}: no heading '#{anchor}' in {file.name}"


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes links of them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = (found["title"].lower() for found in HEADING.finditer(text))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_named_tests_exist(page: Path) -> None:
    """A page that names a test as `tests/area/test_file.py::test_name` names one that is there."""
    for found in NAMED_TEST.finditer(page.read_text(encoding="utf-8")):
        file = ROOT / found["file"]
        assert file.is_file() and f"def {found['name']}(" in file.read_text(encoding="utf-8"), found[0]


FAULTY = {
    "```python\nassert 1 + 1 == 3, 'no'\n```": "no",
    '```toml fragment\nobjective = [{ loss = "nll", weight = "probabilty" }]\n```': "did you mean 'probability'",
    "```bash\nstatewise recipe show nothing_of_this_name\n```": "ended with 2",
    "```bash\nls\n```": "is no statewise command",
}


@pytest.mark.parametrize("text", FAULTY)
def test_a_faulty_block_is_seen(text: str, tmp_path: Path, page_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    with pytest.raises((AssertionError, RecipeError), match=FAULTY[text]):
        test_blocks(page, page_dir)
