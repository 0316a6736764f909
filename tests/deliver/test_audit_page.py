"""The page of the audit in a real browser, fed with documents."""

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from penstock.deliver.app import build
from penstock.testing import MemoryChannels

Served = Callable[..., AbstractContextManager[str]]
Document = dict[str, Any]
MILLION = 1_000_000
HOSTILE = '<img src=x onerror="document.title=1">\n"\\ ‮ ' + "long " * 40


class Audit:
    """What an auditor would say of a pipeline with a source, two queries, a store and a feed."""

    def __init__(self) -> None:
        self.channels = MemoryChannels()
        self.at = time.time_ns() // 1_000
        self.hops = [
            hop("source:rsvps", "", "rsvps", passed=MILLION - 3, refused=3, step=None),
            hop("query:by_country", "rsvps", "by_country", passed=799_000, filtered=200_000, late=997, note="by hand"),
            hop("query:trending", "rsvps", "trending", passed=900_000, duplicate=40, shed=99_957, latency=slow()),
            hop("store:redis/by_country", "by_country", "", passed=120_000),
            hop("feed:trending", "trending", "", passed=80_000),
        ]
        self.paths = [hop("source:rsvps → query:by_country", "", "by_country", passed=799_000, filtered=200_000)]
        self.senders = [sender(f"sender-{n}", self.at) for n in range(1, 25)]
        self.alarms: list[Document] = []
        self.rest: Document = {}

    def say(self) -> None:
        """Report all this as a status."""
        missing = sum(one["missing"] for one in self.hops)
        rsvps = channel("rsvps", "source", MILLION, senders=1_024, missing=self.hops[0]["missing"])
        balance = {
            "verdict": "missing" if missing else "whole",
            "at": self.at,
            "as_of": self.at - 100_000,
            "hops": self.hops,
            "paths": self.paths,
            "channels": [
                {**rsvps, "worst": self.senders},
                channel("rsvps.dead", "dead", 3),
                channel("by_country", "result", 120_000),
                channel("trending", "result", 80_000),
            ],
            "alarms": self.alarms,
            **self.rest,
        }
        self._report({"process": "audit", "at": self.at, "memory": 10**8, "nodes": {}, "balance": balance})

    def _report(self, status: Document) -> None:
        self.channels.append("status", json.dumps(status).encode(), b"audit")


def slow() -> Document:
    return {"count": 9, "min": 90.0, "mean": 190.0, "p50": 174.0, "p95": 420.0, "p99": 638.0, "max": 12_690.0}


def hop(stage: str, reads: str, writes: str, in_flight: int = 0, missing: int = 0, **more: Any) -> Document:
    names = ("passed", "refused", "filtered", "late", "duplicate", "shed")
    outcomes = {name: more.pop(name, 0) for name in names}
    done = sum(outcomes.values())
    quick = {"count": done, "min": 0.4, "mean": 5.1, "p50": 4.0, "p95": 9.6, "p99": 11.2, "max": 31.0}
    document = {"stage": stage, "reads": reads, "writes": writes, "due": done + in_flight + missing, "taken": done}
    document |= {"in_flight": in_flight, "missing": missing, "outcomes": outcomes, "gaps": [], "note": ""}
    return {**document, "latency": quick, "step": {**quick, "p50": 2.2}, **more}


def channel(name: str, kind: str, records: int, senders: int = 0, missing: int = 0) -> Document:
    document: Document = {"channel": name, "kind": kind, "senders": senders, "records": records, "distinct": records}
    document |= {"duplicates": 0, "missing": missing, "claimed": records + missing, "in_flight": 0, "refused": 0}
    latency = {"count": records, "min": 0.4, "mean": 5.1, "p50": 4.0, "p95": 9.6, "p99": 11.2, "max": 31.0}
    return {**document, "unknown_seconds": 0, "without_identity": 0, "gaps": [], "gap_count": 0, "latency": latency}


def sender(name: str, at: int, epoch: int = 1, **more: Any) -> Document:
    fields: Document = {
        "sender": name,
        "epoch": epoch,
        "first": 1,
        "last": 5_000,
        "records": 5_000,
        "distinct": 5_000,
    }
    fields |= {"duplicates": 0, "missing": 0, "reordered": 0, "newest": at - 40_000}
    return {**fields, "latency": {"count": 5_000, "min": 0.4, "mean": 4.2, "max": 22.0}, **more}


@pytest.fixture
def audit() -> Audit:
    return Audit()


@pytest.fixture
def address(audit: Audit, served: Served, vega_cache: Path) -> Iterator[str]:
    audit.say()
    with served(build(audit.channels, [], [], {}, "status", "RSVPs <live>", cache=vega_cache)) as at:
        yield at


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    """The page, open; the console must be empty at the end."""
    complaints: list[str] = []
    opened = chromium.new_page(viewport={"width": 1280, "height": 900})
    opened.on("console", lambda line: complaints.append(line.text) if line.type in {"error", "warning"} else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(f"{address}/audit")
    expect(opened.locator("#connection")).to_have_text("live", timeout=20_000)
    yield opened
    opened.close()
    assert complaints == []


def branch(page: Page, stage: str, outcome: str) -> Locator:
    return page.locator(f".ribbon[data-from='{stage}'][data-outcome='{outcome}'][data-to='']")


def height(ribbon: Locator) -> float:
    box = ribbon.bounding_box()
    assert box is not None
    return box["height"]


def row(page: Page, table: str, start: str) -> list[str]:
    found = page.locator(f"{table} tr", has_text=re.compile(f"^{re.escape(start)}")).first
    return [re.sub(r"\s", "", text) for text in found.locator("td").all_inner_texts()]


def test_a_complete_pipeline(page: Page) -> None:
    expect(page.locator("#verdict")).to_have_text("Whole: every record accounted for")
    expect(page.locator("#verdict")).to_have_attribute("data-verdict", "whole")
    expect(page.locator("#sum")).to_have_text(
        re.compile(r"One source, 1\s000\s000 records due: 999\s997 passed, 3 refused")
    )
    expect(page.locator("#alarms")).to_be_hidden()
    expect(page.locator("#as-of")).to_be_empty()


def test_every_outcome_branches_off_where_it_happened(page: Page) -> None:
    expect(page.locator("#outcomes li")).to_have_count(8)
    for stage, outcome, label in [
        ("source:rsvps", "refused", "3 refused"),
        ("query:by_country", "filtered", "200 000 filtered"),
        ("query:by_country", "late", "997 late"),
        ("query:trending", "duplicate", "40 duplicate"),
        ("query:trending", "shed", "99 957 shed"),
        ("store:redis/by_country", "passed", "120 000 passed"),
    ]:
        expect(branch(page, stage, outcome)).to_have_count(1)
        text = page.locator(f"[data-node='{stage}'] .branch[data-outcome='{outcome}']")
        expect(text).to_have_text(re.compile(label.replace(" ", r"\s") + "$"))
    for start, end in [
        ("source:rsvps", "channel:rsvps"),
        ("channel:rsvps", "query:trending"),
        ("query:trending", "channel:trending"),
        ("channel:by_country", "store:redis/by_country"),
    ]:
        expect(page.locator(f".ribbon[data-from='{start}'][data-to='{end}']")).to_have_count(1)


def test_one_missing_record_of_a_million_is_shown(page: Page, audit: Audit) -> None:
    gap = {"sender": "kiosk 7", "epoch": 1, "first": 4100, "last": 4100}
    audit.hops[0] = hop("source:rsvps", "", "rsvps", passed=MILLION - 1, missing=1, gaps=[gap])
    audit.senders[6] = sender("kiosk 7", audit.at, missing=1)
    audit.alarms = [
        {"name": "missing", "stage": "source:rsvps", "text": "kiosk 7 lost 4100", "since": audit.at - 10**8}
    ]
    audit.say()
    expect(page.locator("#verdict")).to_have_text("Not whole: 1 missing")
    assert height(branch(page, "source:rsvps", "missing")) >= 3
    expect(page.locator("[data-node='source:rsvps'] .branch[data-outcome='missing']")).to_have_text("1 missing")
    expect(page.locator("#findings li").first).to_have_text("source:rsvps misses kiosk 7/1: 4100")
    cell = page.locator("#heat li[data-state='missing']")
    expect(cell).to_have_text("kiosk 71 missing")
    assert page.locator("#heat li").first.get_attribute("data-state") == "missing"
    expect(page.locator("#alarms li")).to_contain_text("kiosk 7 lost 4100")
    assert row(page, "#sheet", "source rsvps")[-1] == "1"


def test_the_sheet_has_the_same_numbers(page: Page) -> None:
    assert row(page, "#sheet", "query by_country") == ["999997", "799000", "200000", "997", "0", "0", "0", "0", "0"]
    assert row(page, "#sheet", "source rsvps → query by_country")[:3] == ["999000", "799000", "200000"]
    assert row(page, "#latencies", "query trending")[:5] == ["90ms", "190ms", "174ms", "638ms", "12.7s"]
    assert row(page, "#latencies", "source rsvps")[5:] == ["–"] * 5
    assert page.locator("#sheet td").first.evaluate("cell => getComputedStyle(cell).textAlign") == "right"
    expect(page.locator("#findings")).to_contain_text("query:by_country: by hand")


def test_missing_records_that_are_not_listed_are_counted(page: Page, audit: Audit) -> None:
    gaps = [{"sender": "kiosk 7", "epoch": 1, "first": 2 * n, "last": 2 * n} for n in range(150)]
    audit.hops[0] = hop("source:rsvps", "", "rsvps", passed=MILLION, missing=150, gaps=gaps)
    audit.hops[1] = hop("query:by_country", "rsvps", "by_country", passed=MILLION - 1, missing=1)
    audit.say()
    expect(page.locator("#findings li")).to_have_count(102)
    expect(page.locator("#findings")).to_contain_text("source:rsvps misses 50 more records")
    expect(page.locator("#findings")).to_contain_text("query:by_country misses 1 record")


def test_the_states_of_senders(page: Page, audit: Audit) -> None:
    minute = 60_000_000
    audit.senders[:6] = [
        sender("gone", audit.at, newest=audit.at - 5 * minute),
        sender("reborn", audit.at, newest=audit.at - 5 * minute),
        sender("reborn", audit.at, epoch=2),
        sender("crawling", audit.at, latency={"count": 9, "min": 1.0, "mean": 900.0, "max": 2_000.0}),
        sender("twice", audit.at, duplicates=12),
        sender("mixed", audit.at, reordered=4),
    ]
    audit.say()
    for state, name, description in [
        ("silent", "gone", "silent 5"),
        ("slow", "crawling", "slow 900"),
        ("disorder", "twice", "12 duplicates"),
        ("disorder", "mixed", "4 out of order"),
    ]:
        expect(page.locator(f"#heat li[data-state='{state}']", has_text=name)).to_contain_text(description)
    expect(page.locator("#heat li[data-state='whole']", has_text="reborn")).to_have_count(2)
    expect(page.locator("#heat .hint")).to_have_text(re.compile(r"and 1\s001 others, in order"))


def test_hidden_senders_are_not_in_order_if_all_shown_have_problems(page: Page, audit: Audit) -> None:
    audit.senders = [sender(f"s{n}", audit.at, missing=1) for n in range(50)]
    audit.say()
    expect(page.locator("#heat .hint")).to_have_text("and 974 others, none of them worse than these")


def test_thousands_of_senders_become_small_cells(page: Page, audit: Audit) -> None:
    audit.senders = [sender(f"s{n}", audit.at) for n in range(1_500)]
    audit.say()
    expect(page.locator("#heat li")).to_have_count(1_500)
    assert height(page.locator("#heat ul")) < 600


def test_the_keyboard_reaches_stages_and_senders(page: Page) -> None:
    page.focus("[data-node='query:by_country']")
    expect(page.locator("#tip")).to_contain_text("reads rsvps")
    expect(page.locator("[data-node='query:by_country']")).to_have_attribute("aria-label", re.compile("997 late"))
    first = page.locator("#heat li").first
    first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#heat li").nth(1)).to_be_focused()
    expect(page.locator("#tip")).to_contain_text("latency mean")
    expect(page.locator("#heat li[tabindex='0']")).to_have_count(1)


def test_an_update_keeps_elements_and_the_focus(page: Page, audit: Audit) -> None:
    page.focus("[data-node='query:trending']")
    page.evaluate("for (const at of document.querySelectorAll('#sheet td, .ribbon, #heat li')) at.kept = true")
    audit.hops[2]["outcomes"]["shed"] += 1
    audit.say()
    expect(page.locator("[data-node='query:trending'] .branch[data-outcome='shed']")).to_contain_text("958")
    expect(page.locator("#tip")).to_contain_text("958")
    expect(page.locator("[data-node='query:trending']")).to_be_focused()
    assert page.evaluate("[...document.querySelectorAll('#sheet td, .ribbon, #heat li')].every(at => at.kept)")


def test_external_names_are_only_text(page: Page, audit: Audit) -> None:
    stage = f"query:{HOSTILE}"
    audit.hops[1] = hop(stage, "rsvps", HOSTILE, passed=5, missing=2, note=HOSTILE)
    audit.hops[1]["gaps"] = [{"sender": HOSTILE, "epoch": 1, "first": 1, "last": 2}]
    audit.senders[0] = sender(HOSTILE, audit.at, missing=2)
    audit.alarms = [{"name": HOSTILE, "stage": stage, "text": HOSTILE, "since": None}]
    audit.say()
    expect(page.locator("#alarms li")).to_contain_text("<img src=x")
    expect(page.locator("#findings")).to_contain_text("(2 records)")
    page.locator("#heat li").first.focus()
    expect(page.locator("#tip")).to_contain_text("<img src=x")
    assert page.locator("main img, .tip img").count() == 0
    assert page.title() == "Audit · RSVPs <live> · Penstock"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_an_unknown_verdict(page: Page, audit: Audit) -> None:
    audit.rest = {"channels": [], "hops": [], "paths": []}
    audit.say()
    expect(page.locator("#verdict")).to_have_text("no records counted yet")
    expect(page.locator("#flow-card")).to_be_hidden()
    audit.rest = {"channels": [{**channel("rsvps", "source", 9), "unknown_seconds": 12.5}], "as_of": audit.at - 10**9}
    audit.say()
    expect(page.locator("#verdict")).to_have_text("12.5 s unknown")
    expect(page.locator("#as-of")).to_have_text(re.compile(r"^as of .*\d\d:\d\d:\d\d UTC$"))
    expect(page.locator("#findings")).to_contain_text("rsvps: an outage of 12.5 s")
    doubts = [{"kind": "process", "subject": "analyse", "text": "the process analyse is down"}]
    audit.rest = {"verdict": "not known", "doubts": doubts}
    audit.say()
    expect(page.locator("#verdict")).to_have_attribute("data-verdict", "unknown")
    expect(page.locator("#verdict")).to_contain_text("the process analyse is down")
    expect(page.locator("#findings")).to_contain_text("the process analyse is down")
    row = {"kind": "changed", "stage": "store:redis/x", "count": 1, "text": "a row differs", "examples": ["<b>nl</b>"]}
    audit.rest = {"verdict": "missing", "doubts": doubts, "discrepancies": [row]}
    audit.say()
    expect(page.locator("#verdict")).to_have_attribute("data-verdict", "missing")
    expect(page.locator("#findings")).to_contain_text("a row differs: <b>nl</b>")
    audit.rest, audit.at = {}, audit.at - 60_000_000
    audit.say()
    expect(page.locator("#verdict")).to_have_text(re.compile("the audit has not reported"))


def test_a_balance_without_hops_still_has_a_verdict(page: Page, audit: Audit) -> None:
    audit.rest = {"hops": None, "paths": None, "alarms": None, "channels": [channel("rsvps", "source", 9, missing=3)]}
    audit.say()
    expect(page.locator("#verdict")).to_have_text("Not whole: 3 missing")
    expect(page.locator("#connection")).to_have_text("live")


def test_the_two_pages_lead_to_each_other(page: Page) -> None:
    page.click("nav >> text=Live")
    expect(page.locator("#charts")).to_be_attached()
    page.click("nav >> text=Audit")
    expect(page.locator("#verdict")).to_have_text("Whole: every record accounted for")


@pytest.mark.parametrize(("width", "colours"), [(390, "light"), (820, "dark")])
def test_nothing_sticks_out_on_a_small_screen(page: Page, width: int, colours: Any) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=colours)
    expect(page.locator(".sankey")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
