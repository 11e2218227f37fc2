"""Size limits, forbidden calls, and imports that only point down."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "statewise"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 300, 50

# Low to high; a module imports, when it is itself imported, only from its own layer or lower ones.
LAYERS = [
    [
        "statewise",
        "errors",
        "foreign",
        "files",
        "environment",
        "plugins",
        "answers",
        "registry",
        "hub",
        "palette",
        "estimates",
    ],
    ["types"],
    ["component", "verifier"],
    ["stats"],
    ["selectors", "weights", "losses"],
    ["objective"],
    ["settings", "teachers", "overrides", "refusals", "recipe"],
    ["models"],
    ["geometry"],
    ["sources"],
    ["signals"],
    ["tiny"],
    ["evals"],
    ["run"],
    ["report"],
    ["training"],
    ["onpolicy", "drift"],
    ["diagnostics", "doctor"],
    ["study"],
    ["testing"],
    ["cli", "__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
# Words that stand for loading code or objects from data.
FORBIDDEN = [r"\bpickle\b", r"torch\.load\(", r"(?<![\w.])eval\(", r"(?<![\w.])exec\(", r"trust_remote_code"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imported_when_loaded(tree: ast.Module) -> list[str]:
    """Modules of statewise that importing this one imports: not those in functions or under TYPE_CHECKING."""
    found: list[str] = []
    stack: list[ast.AST] = list(tree.body)
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "statewise"
            found += [f"statewise.{a.name}" if whole else node.module for a in node.names if a.name != "__version__"]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            stack += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            stack += ast.iter_child_nodes(node)
    return [name for name in found if name.split(".")[0] == "statewise"]


def wrong_imports(module: str, source: str) -> list[str]:
    own = LEVEL[layer(module)]
    return [name for name in imported_when_loaded(ast.parse(source)) if LEVEL[layer(name)] > own]


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 30


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_forbidden_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    code = re.sub(r"\bno pickle\b", "", text)  # saying that there is none is allowed
    assert [pattern for pattern in FORBIDDEN if re.search(pattern, code)] == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(PACKAGE).with_suffix("")
    module = ".".join(["statewise", *(part for part in relative.parts if part != "__init__")])
    assert wrong_imports(module, path.read_text(encoding="utf-8")) == []


def test_the_import_check_finds_what_it_must() -> None:
    assert wrong_imports("statewise.errors", "from statewise.recipe import Recipe") == ["statewise.recipe"]
    assert wrong_imports("statewise.models.head", "from statewise import training") == ["statewise.training"]
    assert wrong_imports("statewise.models.head", "class A:\n  import statewise.cli.runs") == ["statewise.cli.runs"]
    lazy = "if TYPE_CHECKING:\n  from statewise.cli import app\ndef f():\n  from statewise.cli import app"
    assert wrong_imports("statewise.errors", lazy) == []
    assert wrong_imports("statewise.training.loop", "from statewise.recipe import Recipe") == []


def test_complexity() -> None:
    """Cyclomatic complexity at most 10, as pyproject.toml says."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--output-format", "concise", str(PACKAGE)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
