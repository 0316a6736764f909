"""The page in a real browser."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import pytest
from playwright.sync_api import Browser, Page, expect

from penstock.deliver.site import ChartSpec
from penstock.demo import charts
from penstock.testing import MemoryChannels

Served = Callable[..., AbstractContextManager[str]]
CHARTS = ["by_country", "trending", "answers", "members", "venues"]
# The browser itself writes this one when a server is away; no page can keep it from doing so.
AWAY = re.compile(r"ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE")


class Demo(Protocol):
    channels: MemoryChannels
    missing: int

    def app(self, cache: Path, charts: Sequence[ChartSpec] | None = None, names: Sequence[str] = ()) -> Any: ...


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def page(chromium: Browser, complaints: list[str]) -> Iterator[Page]:
    opened = chromium.new_page(viewport={"width": 1280, "height": 900})
    opened.on("console", lambda line: complaints.append(line.text) if line.type in {"error", "warning"} else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    yield opened
    opened.close()


@pytest.fixture
def address(demo: Demo, served: Served, vega_cache: Path) -> Iterator[str]:
    with served(demo.app(vega_cache)) as at:
        yield at


def until_it_changes(page: Page, selector: str) -> None:
    before = page.inner_text(selector)
    expect(page.locator(selector)).not_to_have_text(before, timeout=20_000)


def ink(page: Page, chart: str) -> str:
    """What is painted on a chart's canvas."""
    return str(page.evaluate("name => document.querySelector(`[data-chart=${name}] canvas`).toDataURL()", chart))


def test_charts_and_numbers_are_live(page: Page, address: str, complaints: list[str]) -> None:
    page.goto(address)
    expect(page.locator("#connection")).to_have_text("live · 5 feeds", timeout=30_000)
    for chart in CHARTS:
        expect(page.locator(f"[data-chart={chart}] canvas")).to_be_visible()
        expect(page.locator(f"[data-chart={chart}] .foot span").first).to_have_text(re.compile(r"^[1-9]\S* rows$"))
        before = ink(page, chart)
        page.wait_for_function(
            "([name, before]) => document.querySelector(`[data-chart=${name}] canvas`).toDataURL() !== before",
            arg=[chart, before],
            timeout=20_000,
        )
    for figure in ("#rate", "#taken"):
        until_it_changes(page, figure)
    for figure in ("#p50", "#p95", "#p99", "#max"):
        expect(page.locator(figure)).to_have_text(re.compile(r"^\d.*(ms|s)$"))
    assert complaints == []


def test_without_a_chart_the_rows_are_a_live_table(
    page: Page, demo: Demo, served: Served, vega_cache: Path, complaints: list[str]
) -> None:
    tables = [ChartSpec(name, name, name, "", None) for name in ("by_country", "answers", "venues")]
    with served(demo.app(vega_cache, tables)) as address:
        page.goto(address)
        heads = page.locator("[data-chart=by_country] thead th")
        expect(heads).to_have_text(["window_start", "window_end", "country", "people", "records"], timeout=30_000)
        first = page.locator("[data-chart=by_country] tbody tr").first
        expect(first.locator("td").first).to_have_text(re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"))
        expect(page.locator("[data-chart=answers] tbody tr")).to_have_count(16, timeout=30_000)
        expect(page.locator("[data-chart=venues] tbody tr")).to_have_count(100, timeout=30_000)
        until_it_changes(page, "[data-chart=answers] tbody")
        page.screenshot(path=str(vega_cache / "table.png"))
    assert complaints == []


COVERED = """() => {
  const canvas = document.querySelector("[data-chart=map] canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return data.filter((alpha, at) => at % 4 === 3 && alpha > 0).length / (canvas.width * canvas.height);
}"""


def test_the_map_of_the_demo_has_coastlines(page: Page, demo: Demo, served: Served, vega_cache: Path) -> None:
    """Land covers a part of the map, also without rows. The lines of the grid cover less."""
    chart = charts.busy_venues()
    covered = []
    for spec in (chart, {**chart, "datasets": {"land": []}}):
        with served(demo.app(vega_cache, [ChartSpec("map", "empty", "Map", "", spec)], ["empty"])) as address:
            page.goto(address)
            expect(page.locator("[data-chart=map] canvas")).to_be_visible(timeout=30_000)
            covered.append(page.evaluate(COVERED))
    assert covered[0] > 0.15 > covered[1]


# No font has a glyph for it: it is unassigned.
NO_GLYPH = "\u0378"
NAMES = ["São Paulo", f"Köln {NO_GLYPH}\u200d{NO_GLYPH}", NO_GLYPH * 2]
DRAWN = """
window.drawn = new Set();
const native = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...place) {
  drawn.add(text);
  native.call(this, text, ...place);
};
"""


def test_a_character_without_a_glyph_is_not_shown_as_a_box(
    page: Page, demo: Demo, served: Served, vega_cache: Path, complaints: list[str]
) -> None:
    for name in NAMES:
        row = json.dumps({"city": name, "response": "yes", "n": 10_000}).encode()
        demo.channels.append("answers", row, json.dumps([name]).encode())
    encoding = {"y": {"field": "city", "type": "nominal"}, "x": {"field": "n", "type": "quantitative"}}
    chart = {"data": {"name": "rows"}, "mark": {"type": "bar", "tooltip": True}, "encoding": encoding}
    both = [ChartSpec("table", "answers", "Table", "", None), ChartSpec("bars", "answers", "Bars", "", chart)]
    page.add_init_script(DRAWN)
    with served(demo.app(vega_cache, both)) as address:
        page.goto(address)
        cells = page.locator("[data-chart=table] tbody td:first-child")
        expect(cells.filter(has_text="São Paulo").first).to_be_visible(timeout=30_000)
        expect(cells.get_by_text("Köln", exact=True)).to_have_attribute("title", NAMES[1])
        expect(cells.get_by_text("U+378 U+378", exact=True)).to_have_attribute("title", NAMES[2])
        page.wait_for_function("['São Paulo', 'Köln', 'U+378 U+378'].every((name) => drawn.has(name))", timeout=30_000)
        assert not page.evaluate("(missing) => [...drawn].filter((text) => text.includes(missing))", NO_GLYPH)
        page.screenshot(path=str(vega_cache / "glyphs.png"))
    assert complaints == []


def test_names_that_this_machine_can_show_are_unchanged_and_others_are_not_boxes(page: Page, address: str) -> None:
    """Compares the pictures of names with those of as many missing glyphs."""
    page.goto(address)
    names = ["Łódź", "Ελλάδα", "東京", "🎉", "ไทย", "Zürich 🎉"]
    shown = page.evaluate("async (names) => names.map((await import('/glyphs.js')).readable)", names)
    assert shown[:2] == names[:2]
    for name, text in zip(names, shown, strict=True):
        assert text == name or text == "Zürich" or text.startswith("U+")
    pictures = """(names) => {
      const context = new OffscreenCanvas(200, 30).getContext("2d");
      context.font = `20px ${getComputedStyle(document.body).fontFamily}`;
      return names.map((name) => {
        context.clearRect(0, 0, 200, 30);
        context.fillText(name, 0, 24);
        return context.getImageData(0, 0, 200, 30).data.join();
      });
    }"""
    boxes = page.evaluate(pictures, [NO_GLYPH * length for length in range(1, 8)])
    assert not set(boxes) & set(page.evaluate(pictures, shown))


def test_the_graph_has_the_metrics_of_each_node(page: Page, address: str, complaints: list[str]) -> None:
    page.goto(address)
    expect(page.locator("#graph [data-node]")).to_have_count(15, timeout=30_000)
    expect(page.locator("[data-node='source:rsvps'] .live")).to_have_text(re.compile(r"/s"))
    page.focus("[data-node='query:by_country']")
    expect(page.locator("#tip")).to_contain_text("in real-time mode")
    assert complaints == []


def test_the_last_batch_of_each_query_is_shown_with_its_age(page: Page, address: str, complaints: list[str]) -> None:
    page.goto(address)
    rows = page.locator("#queries tbody tr")
    # The others have not ended a batch.
    expect(rows).to_have_count(2, timeout=30_000)
    expect(rows.first.locator("th")).to_have_text("by countryreal-time")
    rate, _, *cells, age = [text.replace("\u202f", " ") for text in rows.first.locator("td").all_text_contents()]
    assert rate == "199"
    batch, state = "60.0 s90 ms · 59.8 s · 55 ms", "3.3 MiB212 ms"
    assert cells == ["2", "3", batch, state, "90 %", "30.0 s", "1 400 ms"]
    assert re.fullmatch(r"2\d s ago", age)
    assert complaints == []


def test_the_verdict_changes_when_records_are_missing(page: Page, address: str, demo: Demo) -> None:
    page.goto(address)
    expect(page.locator("#verdict")).to_have_text("every record accounted for", timeout=30_000)
    demo.missing = 11
    expect(page.locator("#verdict")).to_have_text("11 missing")
    expect(page.locator("#balance")).to_contain_text("missing sender-7/1: 120–130")


def test_a_browser_reports_latencies(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_function(
        "fetch('/status').then(answer => answer.json()).then(({nodes}) => nodes.page.browser?.count > 100)",
        timeout=30_000,
    )


def test_the_page_continues_after_a_restart_of_the_server(
    page: Page, demo: Demo, served: Served, vega_cache: Path, complaints: list[str]
) -> None:
    with served(demo.app(vega_cache)) as address:
        page.goto(address)
        expect(page.locator("#connection")).to_have_attribute("data-state", "live", timeout=30_000)
        page.evaluate("window.notReloaded = true")
    expect(page.locator("#connection")).to_have_attribute("data-state", "lost", timeout=20_000)
    with served(demo.app(vega_cache), port=int(address.rpartition(":")[2])):
        expect(page.locator("#connection")).to_have_attribute("data-state", "live", timeout=30_000)
        until_it_changes(page, "#taken")
        assert page.evaluate("window.notReloaded")
        expect(page.locator("[data-chart=by_country] .foot span").first).to_have_text(re.compile(r"rows$"))
    assert [one for one in complaints if not AWAY.search(one)] == []


@pytest.mark.parametrize(("width", "colours"), [(390, "light"), (820, "dark")])
def test_nothing_sticks_out_on_a_small_screen(page: Page, address: str, width: int, colours: Any) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=colours)
    page.goto(address)
    expect(page.locator("#connection")).to_have_attribute("data-state", "live", timeout=30_000)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
