"""The page: everything is text, the same bytes each time, one file."""

import json
import re
from pathlib import Path

import pytest

from statewise.report.page import (
    Cell,
    Details,
    Figure,
    Paragraph,
    Section,
    SideBySide,
    Table,
    Tokens,
    anchor,
    json_for_script,
    label,
    render,
    write_page,
)

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>&amp;\u2028"
BARS = {"data": [{"type": "bar", "x": ["a", HOSTILE], "y": [1.0, float("nan")]}], "layout": {"template": "x"}}


def everything() -> list[Section]:
    return [
        Section(
            f"Table {HOSTILE}",
            [
                Paragraph(f"first {HOSTILE}\n\nsecond"),
                Paragraph(HOSTILE, "code"),
                Table(["name", HOSTILE], [[HOSTILE, 1.25], [Cell(HOSTILE, 3.0, "#x", HOSTILE), None]], HOSTILE),
            ],
        ),
        Section("Figures", [Figure(BARS, HOSTILE), Details(HOSTILE, [Figure(BARS, "inner")])]),
        Section(
            "Texts",
            [
                Tokens([HOSTILE, "b\n", "c"], [-2.0, None, 1.0], HOSTILE),
                SideBySide([[HOSTILE, "x"]], ["before", HOSTILE], HOSTILE),
            ],
        ),
    ]


def test_all_text_is_escaped() -> None:
    page = render(HOSTILE, HOSTILE, everything())
    assert "<script>window.hacked" not in page
    assert "<img src=x" not in page
    assert page.count("&lt;script&gt;window.hacked") >= 15


def test_the_same_sections_give_the_same_bytes(tmp_path: Path) -> None:
    one = write_page(tmp_path / "deep" / "one.html", "t", "l", everything())
    two = write_page(tmp_path / "two.html", "t", "l", everything())
    assert one.read_bytes() == two.read_bytes()


def test_plotly_is_there_once_and_only_where_a_figure_is() -> None:
    assert len(render("t", "l", [Section("a", [Paragraph("p")])])) < 40_000
    page = render("t", "l", everything())
    assert page.count("plotly.js v") == 1
    assert 4_000_000 < len(page) < 6_000_000
    head = page[: page.index("</style>")] + page[page.index("</style>") : page.index('id="figures-data"')]
    assert not re.search(r'(?:src|href)="https?:', head)  # nothing is fetched


def test_figures_keep_their_order_inside_details() -> None:
    page = render("t", "l", everything())
    ids = re.findall(r'class="plot" id="(figure-\d)" role="img" aria-label="([^"]*)"', page)
    assert [(name, text[-5:]) for name, text in ids] == [("figure-0", ids[0][1][-5:]), ("figure-1", "inner")]
    kept = json.loads(page.split('id="figures-data">')[1].split("</script>")[0])
    assert kept[0]["data"][0]["y"] == [1.0, None]
    assert kept[0]["layout"] == {}


def test_a_plotly_object_is_a_figure_too() -> None:
    import plotly.graph_objects as go

    plain = Figure(go.Figure(go.Bar(x=["a"], y=[2]), layout={"height": 300})).plain()
    assert plain["layout"] == {"height": 300}
    assert plain["data"][0]["type"] == "bar"


def test_half_a_surrogate_pair_is_shown_as_its_escape(tmp_path: Path) -> None:
    file = write_page(tmp_path / "page.html", "a\ud800b", "c\udfffd", [Section("e", [Paragraph("f\ud83d\0g")])])
    page = file.read_text(encoding="utf-8")
    assert all(text in page for text in (r"a\ud800b", r"c\udfffd", r"f\ud83d"))


def test_json_for_script_reads_back_and_holds_no_markup() -> None:
    text = json_for_script({"a": HOSTILE})
    assert json.loads(text) == {"a": HOSTILE}
    assert not set("<>&\u2028\u2029") & set(text)


def test_cells() -> None:
    table = Table(["a", "b", "c"], [[1, 0.123456, "x"], [None, float("nan"), Cell("y", 2.0)], [12345, 1e-9, None]])
    assert table.numeric() == [True, True, False]
    assert [cell.text for cell in table.cells()[0]] == ["1", "0.1235", "x"]
    assert [cell.text for cell in table.cells()[1]] == ["–", "–", "y"]
    assert [cell.text for cell in table.cells()[2]] == ["12,345", "1e-09", "–"]


def test_tokens_share_a_symmetric_scale() -> None:
    marks = Tokens(["a", "b\n", "c", "d"], [-2.0, None, 1.0, 0.0]).marks()
    assert [(m["side"], m["share"]) for m in marks] == [
        ("below", "1.000"),
        ("none", "0"),
        ("above", "0.500"),
        ("none", "0"),
    ]
    assert marks[1]["text"] == "b↵" and marks[1]["breaks"]
    assert Tokens(["a"], [float("nan")]).marks()[0]["hint"] == "no value"


@pytest.mark.parametrize(
    "href", ["javascript:alert(1)", "data:text/html,x", "JAVASCRIPT:x", "vbscript:x", " javascript:x"]
)
def test_links_that_run_code_are_refused(href: str) -> None:
    with pytest.raises(ValueError, match="href"):
        Cell("x", href=href)


@pytest.mark.parametrize("href", ["#a", "runs/a/run.json", "https://arxiv.org/abs/1", "../x.html"])
def test_links_that_lead_somewhere_are_kept(href: str) -> None:
    assert f'href="{href}"' in render("t", "l", [Section("a", [Table(["x"], [[Cell("x", href=href)]])])])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="row of 1 for 2"):
        render("t", "l", [Section("a", [Table(["x", "y"], [["one"]])])])
    with pytest.raises(ValueError, match="1 values for 2 tokens"):
        render("t", "l", [Section("a", [Details("d", [Tokens(["x", "y"], [0.0])])])])
    with pytest.raises(ValueError, match="several are called"):
        render("t", "l", [Section("A b", []), Section("a-b", [])])


def test_anchors_and_labels() -> None:
    assert anchor("Target & retention (Pareto)") == "target-retention-pareto"
    assert anchor("…") == "section"
    assert label("<b>a & b</b>") == "&lt;b&gt;a &amp; b&lt;/b&gt;"
