"""One HTML file from sections of blocks: opens offline, sortable, searchable, printable, in light and dark.

Everything given is text and is escaped. The same sections give the same bytes.
"""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from itertools import count
from pathlib import Path
from typing import Any, Literal

from statewise.estimates import number
from statewise.files import atomic_write, to_json

SAFE_LINK = re.compile(r"(?:https?://|#|[\w./-]+$)")  # anchors, relative paths and the web: no javascript:, no data:
DENSE_COLUMNS = 9
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Cell:
    """A table cell that shows `text`, sorts by `sort`, links to `href` and tells `hint` under the pointer."""

    text: str
    sort: float | str | None = None
    href: str | None = None
    hint: str | None = None

    def __post_init__(self) -> None:
        if self.href is not None and not SAFE_LINK.match(self.href):
            raise ValueError(f"href: received {self.href!r}, expected '#anchor', a relative path, http:// or https://")


Value = Cell | str | float | int | None


@dataclass(frozen=True)
class Paragraph:
    """Text; blank lines part paragraphs. "note" stands back, "warning" stands out, "code" keeps its spaces."""

    text: str
    kind: Literal["text", "note", "warning", "code"] = "text"

    block = "paragraph"

    def parts(self) -> list[str]:
        return (
            [self.text] if self.kind == "code" else [part for part in re.split(r"\n\s*\n", self.text) if part.strip()]
        )


@dataclass(frozen=True)
class Table:
    """Rows under columns. Every column sorts; from six rows on there is a filter."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]
    caption: str = ""

    block = "table"

    @property
    def is_dense(self) -> bool:
        """Whether it needs smaller letters to fit a page."""
        return len(self.columns) >= DENSE_COLUMNS

    def cells(self) -> list[list[Cell]]:
        return [[_cell(value) for value in row] for row in self.rows]

    def numeric(self) -> list[bool]:
        """Which columns hold numbers alone."""
        kinds = [[row[i] for row in self.rows if row[i] is not None] for i in range(len(self.columns))]
        return [bool(column) and all(_is_number(value) for value in column) for column in kinds]


@dataclass(frozen=True)
class Figure:
    """A plotly figure (an object, or its {"data", "layout"}). The page gives it colours, fonts and its background."""

    figure: Any
    caption: str = ""

    block = "figure"

    def plain(self) -> dict[str, Any]:
        whole = self.figure if isinstance(self.figure, dict) else json.loads(self.figure.to_json())
        layout = {key: value for key, value in whole.get("layout", {}).items() if key != "template"}
        return {"data": list(whole.get("data", [])), "layout": layout}


@dataclass(frozen=True)
class Tokens:
    """Tokens on a scale from blue (below 0) through none to orange (above 0); None where a token has no value."""

    tokens: Sequence[str]
    values: Sequence[float | None]
    caption: str = ""

    block = "tokens"

    @property
    def limit(self) -> float:
        """The value of the strongest colour: the largest magnitude."""
        return max((abs(v) for v in self.values if v is not None and math.isfinite(v)), default=0.0)

    def marks(self) -> list[dict[str, Any]]:
        """{text, breaks, side, share, hint} a token: share in [0, 1] of the strongest colour."""
        found = []
        for token, value in zip(self.tokens, self.values, strict=True):
            amount = float(value) if value is not None and math.isfinite(value) else None
            shown = token.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")
            found.append(
                {
                    "text": shown,
                    "breaks": token.endswith("\n"),
                    "side": "none" if not amount else "above" if amount > 0 else "below",
                    "share": f"{abs(amount) / self.limit:.3f}" if amount else "0",
                    "hint": "no value" if amount is None else number(amount),
                }
            )
        return found


@dataclass(frozen=True)
class SideBySide:
    """Texts next to each other, searchable. `items`: a text for each of `labels`, such as prompt, before, after."""

    items: Sequence[Sequence[str]]
    labels: Sequence[str]
    caption: str = ""

    block = "side_by_side"


@dataclass(frozen=True)
class Details:
    """Blocks behind a line that opens them."""

    summary: str
    blocks: Sequence[Block]
    anchor: str = ""

    block = "details"


Block = Paragraph | Table | Figure | Tokens | SideBySide | Details


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it, in one column or, where the page is wide, in two."""

    title: str
    blocks: Sequence[Block]
    columns: Literal[1, 2] = 1

    @property
    def anchor(self) -> str:
        return anchor(self.title)


def anchor(text: str) -> str:
    """What `#...` links to: letters, digits and dashes of the text."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def label(text: str) -> str:
    """Text for the inside of a plotly figure, which reads a few tags: with their signs escaped it stays text."""
    return escape(text, quote=False)


def write_page(path: str | Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write the page and return its path. `lead`: what a reader must know who reads nothing else.

    Raises ValueError for rows and tokens of the wrong length and for two sections of one name.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, render(title, lead, sections).encode("utf-8", "backslashreplace"))
    return target


def render(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The page as text."""
    from jinja2 import Environment, FileSystemLoader

    _check(sections)
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    figures = [block.plain() for block in _walk(sections) if isinstance(block, Figure)]
    script, library = _file("page.js"), plotly_source() if figures else ""
    return environment.get_template("page.html").render(
        title=title,
        lead=[part for part in re.split(r"\n\s*\n", lead) if part.strip()],
        sections=sections,
        next_figure=map("figure-{}".format, count()).__next__,  # the template asks in the order of `figures`
        figures=json_for_script(figures),
        style=_file("page.css"),
        script=script,
        library=library,
        # Only the page's own scripts may run: one that slipped in with data would not.
        policy="default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src "
        + " ".join(f"'sha256-{b64encode(sha256(s.encode()).digest()).decode()}'" for s in (script, library)),
    )


def json_for_script(value: Any) -> str:
    """JSON that can stand inside <script>: no character in it ends the element or a line."""
    text = to_json(value)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _walk(sections: Sequence[Section]) -> list[Block]:
    found: list[Block] = []
    stack: list[Block] = [block for section in sections for block in section.blocks][::-1]
    while stack:
        block = stack.pop()
        found.append(block)
        stack += list(block.blocks)[::-1] if isinstance(block, Details) else []
    return found


def _check(sections: Sequence[Section]) -> None:
    anchors = [section.anchor for section in sections]
    twice = {name for name in anchors if anchors.count(name) > 1}
    if twice:
        raise ValueError(f"sections: several are called {sorted(twice)}; give each its own title")
    for block in _walk(sections):
        if isinstance(block, Table | SideBySide):
            rows, width = (
                (block.rows, len(block.columns)) if isinstance(block, Table) else (block.items, len(block.labels))
            )
            wrong = next((row for row in rows if len(row) != width), None)
            if wrong is not None:
                raise ValueError(f"{block.block}: received a row of {len(wrong)} for {width} columns: {wrong!r:.200}")
        if isinstance(block, Tokens) and len(block.tokens) != len(block.values):
            raise ValueError(f"tokens: received {len(block.values)} values for {len(block.tokens)} tokens")


def _cell(value: Value) -> Cell:
    if isinstance(value, Cell):
        return value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Cell("–")
    if _is_number(value):
        return Cell(number(value) if isinstance(value, float) else f"{value:,}", sort=float(value))
    return Cell(str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _file(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def plotly_source() -> str:
    """plotly.js as the plotly package holds it; read as a file, since importing the package takes half a second."""
    from importlib.util import find_spec

    spec = find_spec("plotly")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
