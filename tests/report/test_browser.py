"""The page in Chromium: no error, sorting, filters, links, PNG; skipped where Playwright or Chromium is absent."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import ARMS, Runs, write_run

from statewise.report import report
from statewise.report.page import Section, Table, write_page
from statewise.report.sections import _estimate

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
USABLE_SECONDS = 2.0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as api:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        try:
            opened = api.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"needs Chromium: {error.message.splitlines()[0]}")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any, runs: Runs, tmp_path: Path) -> Iterator[Any]:
    """The report of two arms; at the end no error may have been logged and no script of the data run."""
    path = report(runs, tmp_path / "report.html", versus="stress")
    context = browser.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True, offline=True)
    opened = context.new_page()
    errors: list[str] = []
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.goto(path.as_uri())
    yield opened
    assert errors == []
    assert opened.evaluate("window.hacked") is None
    context.close()


def column(page: Any, table: Any, index: int) -> list[str]:
    return [row.locator("td").nth(index).inner_text() for row in table.locator("tbody tr:not([hidden])").all()]


def test_columns_sort_both_ways_and_empty_cells_stay_last(page: Any) -> None:
    table = page.locator("#scores table").first
    heading = table.locator("th", has_text=re.compile("^gain"))
    index = heading.evaluate("cell => cell.cellIndex")
    heading.locator("button").focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    up = column(page, table, index)
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "descending"
    assert column(page, table, index) == [*up[:2][::-1], up[2]]
    assert up[0].startswith("-0.") and up[2] == "–"


def test_tables_filter(page: Any) -> None:
    page.locator("#scores details summary").click()
    box = page.locator("#scores details .table")
    box.locator("input").fill("stress facts")
    shown = column(page, box, 0)
    assert 0 < len(shown) < 9
    assert box.locator("output").inner_text() == f"{len(shown)} of 9"


def test_completions_are_searched_and_shown_in_parts(page: Any) -> None:
    box = page.locator("#completions .side-by-side")
    shown = box.locator(".item:not([hidden])")
    assert shown.count() == 10
    box.locator(".more").click()
    assert shown.count() == 60
    box.locator(".more").click()
    assert shown.count() == box.locator(".item").count() == 80
    assert not box.locator(".more").is_visible()
    box.locator("input").fill("mild math q33")
    assert {
        text.split("\n\n")[1] for text in shown.locator("pre:first-of-type").all_inner_texts() if "question" in text
    } == {"question 33"}


def test_markup_in_data_stays_text(page: Any) -> None:
    box = page.locator("#completions")
    box.locator("input").fill("window.hacked")
    assert "<b>bold</b>" in box.locator(".item:not([hidden]) pre").nth(1).inner_text()
    assert box.locator("b").count() == 0


def test_a_link_opens_the_card(page: Any) -> None:
    page.locator("#scores a", has_text="mild").first.click()
    page.locator("#run-mild[open]").wait_for(timeout=5000)  # the page hears of a new address a moment later
    assert page.locator("#run-mild pre").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_screen(page: Any, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    for section in page.locator("section").all():
        section.scroll_into_view_if_needed()
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_table_of_eleven_columns_fits_without_scrolling(browser: Any, tmp_path: Path) -> None:
    tasks = ["math", "facts", "beliefs", "sampled math"]
    value = {"value": 0.373, "low": 0.314, "high": 0.432}
    score, change = _estimate(value), _estimate(value, "+.3f")
    columns = ["arm", "seeds", *tasks, "gain", "p", "against stress_sft", "retention", "mean F"]
    rows = [["stress_sft", 5, *[score] * 4, change, 0.014, change, score, change]]
    path = write_page(tmp_path / "wide.html", "Wide", "", [Section("Scores", [Table(columns, rows)])])
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())
    box = page.locator(".scroll")
    assert box.evaluate("box => box.scrollWidth - box.clientWidth") == 0
    page.set_viewport_size({"width": 390, "height": 900})  # here it scrolls in its box, beside the arm
    box.evaluate("box => { box.scrollLeft = 300; }")
    assert page.locator("td").first.bounding_box()["x"] == box.bounding_box()["x"]
    page.close()


def test_figures_are_drawn_and_saved_as_png(page: Any, tmp_path: Path) -> None:
    figure = page.locator("#target-against-retention figure")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for()
    with page.expect_download() as waiting:
        figure.locator("button.png").click()
    waiting.value.save_as(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_printing_draws_every_figure_and_opens_the_cards(page: Any) -> None:
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator(".plot").count() == page.locator(".plot .main-svg:first-child").count()
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0


def test_thirty_runs_are_usable_in_two_seconds(browser: Any, tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / f"{arm}{seed}", f"arm{arm}", seed, ARMS["mild"], n=100, steps=200)
        for arm in range(10)
        for seed in range(3)
    ]
    path = report(paths, tmp_path / "report.html")
    times = []
    for _ in range(3):  # the best, so that a busy machine does not fail it
        opened = browser.new_page()
        opened.goto(path.as_uri())
        ready = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
        times.append(opened.evaluate(ready) / 1000)
        opened.close()
    assert min(times) < USABLE_SECONDS
