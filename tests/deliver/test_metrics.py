"""The metrics, read back by a parser that takes nothing but the format."""

import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from penstock.audit.judge import Verdict
from penstock.deliver.app import build
from penstock.deliver.metrics import metrics
from penstock.testing import MemoryChannels

Labels = frozenset[tuple[str, str]]
Samples = dict[tuple[str, Labels], float]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? ([^ ]+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
_SUFFIXES = {"counter": {""}, "gauge": {""}, "summary": {"", "_sum", "_count"}}


def parsed(text: str) -> Samples:
    """Every sample. A line that breaks the format, a family in two places, a series that comes twice: all fail."""
    assert text == "" or text.endswith("\n")
    samples: Samples = {}
    kinds: dict[str, str] = {}
    helped: list[str] = []
    family = ""
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            family = line.split(" ", 3)[2]
            assert family not in helped, f"{family} comes twice"
            helped.append(family)
            continue
        if line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert name == family
            assert kind in _SUFFIXES
            kinds[name] = kind
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, f"this is not a sample: {line!r}"
        name, labels, number = match[1], _labels(match[2] or ""), float(match[3])
        assert name.removeprefix(family) in _SUFFIXES[kinds[family]], f"{name} stands under {family}"
        assert kinds[family] != "counter" or name.endswith("_total")
        assert math.isfinite(number)
        assert (name, labels) not in samples, f"{line!r} comes twice"
        samples[name, labels] = number
    return samples


def _labels(text: str) -> Labels:
    found, at = [], 0
    while at < len(text):
        match = _LABEL.match(text, at)
        assert match, f"these are not labels: {text!r}"
        found.append((match[1], re.sub(r"\\.", lambda escape: _ESCAPED[escape[0]], match[2])))
        at = match.end()
    assert len({name for name, _ in found}) == len(found)
    return frozenset(found)


def read(status: dict[str, object]) -> Samples:
    return parsed(metrics(status).decode())


def value(samples: Samples, metric: str, /, **labels: str) -> float | None:
    return samples.get((metric, frozenset(labels.items())))


NOW = 1_700_000_000_000_000
LATENCY = {"count": 60_000, "min": 0.4, "mean": 2.5, "p50": 2.0, "p95": 6.1, "p99": 14.5, "max": 80.1}
OUTCOMES = {"passed": 60_000, "refused": 3, "filtered": 0, "late": 0, "duplicate": 0, "shed": 0}


def hop(stage: object = "source:rsvps", reads: str = "", writes: str = "rsvps", **more: Any) -> dict[str, object]:
    document = {"stage": stage, "reads": reads, "writes": writes, "due": 60_008, "taken": 60_003, "in_flight": 1}
    return {**document, "missing": 4, "outcomes": OUTCOMES, "gaps": [], "latency": LATENCY, "step": None, **more}


def status(**more: Any) -> dict[str, object]:
    """The status of a small pipeline."""
    balance = {
        "verdict": "missing",
        "hops": [hop(), hop("query:by_country", "rsvps", "by_country", step=LATENCY), hop("feed:x", "by_country", "")],
        "channels": [
            {"channel": "rsvps", "kind": "source", "senders": 20, "unknown_seconds": 1.5},
            {"channel": "by_country", "kind": "result", "senders": 0, "unknown_seconds": 0.0},
        ],
        "alarms": [{"name": "missing", "stage": "source:rsvps", "text": "…", "since": NOW}],
        **more.pop("balance", {}),
    }
    processes = {
        "audit": {"at": NOW - 1_000_000, "memory": 10**8},
        "collect": {"at": NOW - 10_000_001, "memory": 2 * 10**8},
    }
    nodes = {"query:by_country": {"rate": 160.5, "lag": 2}, "page": {"rate": 3, "lag": None}}
    return {"now": NOW, "processes": processes, "nodes": nodes, "balance": balance, **more}


def test_every_record_has_its_outcome_at_its_stage() -> None:
    samples = read(status())
    source = {"stage": "source:rsvps", "channel": "rsvps"}
    assert value(samples, "penstock_records_total", **source, outcome="passed") == 60_000
    assert value(samples, "penstock_records_total", **source, outcome="refused") == 3
    assert value(samples, "penstock_records_total", **source, outcome="late") == 0
    assert value(samples, "penstock_in_flight", **source) == 1
    assert value(samples, "penstock_missing", stage="query:by_country", channel="rsvps") == 4
    assert value(samples, "penstock_missing", stage="feed:x", channel="by_country") == 4


def verdict(samples: Samples) -> str:
    """The one that is 1."""
    (found,) = (one for one in Verdict if value(samples, "penstock_verdict", verdict=one) == 1)
    return found


def test_the_verdict_and_unknown_durations() -> None:
    samples = read(status())
    assert verdict(samples) == "missing"
    assert verdict(read(status(balance={"verdict": "whole"}))) == "whole"
    doubt = {"kind": "process", "subject": "analyse", "text": "it is down"}
    finding = {"kind": "changed", "stage": "store:redis/x", "count": 2, "text": "…", "examples": []}
    unsure = read(status(balance={"verdict": "not known", "doubts": [doubt], "discrepancies": [finding]}))
    assert verdict(unsure) == "not known"
    assert value(unsure, "penstock_doubts", kind="process", subject="analyse") == 1
    assert value(unsure, "penstock_discrepancies", kind="changed", stage="store:redis/x") == 2
    assert value(samples, "penstock_unknown_seconds", channel="rsvps") == 1.5
    assert value(samples, "penstock_senders", channel="rsvps") == 20
    assert value(samples, "penstock_senders", channel="by_country") is None
    assert value(samples, "penstock_alarms", name="missing", stage="source:rsvps") == 1


def test_a_latency_is_a_summary_in_seconds() -> None:
    samples = read(status())
    labels = {"stage": "query:by_country", "channel": "rsvps"}
    for quantile, seconds in {"0": 0.0004, "0.5": 0.002, "0.95": 0.0061, "0.99": 0.0145, "1": 0.0801}.items():
        assert value(samples, "penstock_latency_seconds", **labels, quantile=quantile) == seconds
    assert value(samples, "penstock_latency_seconds_sum", **labels) == pytest.approx(150)
    assert value(samples, "penstock_latency_seconds_count", **labels) == 60_000
    assert value(samples, "penstock_step_seconds_count", **labels) == 60_000
    assert value(samples, "penstock_step_seconds_count", stage="source:rsvps", channel="rsvps") is None


def test_nodes_and_processes() -> None:
    samples = read(status())
    assert value(samples, "penstock_lag", node="query:by_country") == 2
    assert value(samples, "penstock_lag", node="page") is None
    assert value(samples, "penstock_rate", node="query:by_country") == 160.5
    assert value(samples, "penstock_up", process="audit") == 1
    assert value(samples, "penstock_up", process="collect") == 0
    assert value(samples, "penstock_memory_bytes", process="collect") == 2 * 10**8


def test_the_last_batch_of_a_query_and_its_age() -> None:
    store = {"rows": 9, "memory": 500, "disk": 1_000, "load": 40, "restored": 250, "hits": 30, "misses": 10}
    figures = {
        "mode": "real-time", "rate_in": 200.5, "at": NOW - 12_000_000, "watermark": NOW - 42_000_000, "behind": 30_000,
        "skew": 400, "times": {"all": 60_000, "planning": 90, "work": 59_000, "commit": None}, "store": store,
    }  # fmt: skip
    samples = read(status(nodes={"query:a": figures, "source:b": figures, "query:new": {"rate": 1}}))
    document = {
        name: value(samples, f"penstock_query_{name}", query="a")
        for name in ("input_rate", "age_seconds", "watermark_seconds", "watermark_behind_seconds", "state_rows")
    }
    assert document == {
        "input_rate": 200.5, "age_seconds": 12, "watermark_seconds": NOW / 1e6 - 42, "watermark_behind_seconds": 30,
        "state_rows": 9,
    }  # fmt: skip
    assert value(samples, "penstock_query_mode", query="a", mode="real-time") == 1
    assert value(samples, "penstock_query_event_time_skew_seconds", query="a") == 0.4
    assert value(samples, "penstock_query_batch_seconds", query="a", part="planning") == 0.09
    assert value(samples, "penstock_query_batch_seconds", query="a", part="commit") is None
    assert value(samples, "penstock_query_state_bytes", query="a", place="disk") == 1_000
    assert value(samples, "penstock_query_state_load_seconds", query="a", when="start") == 0.25
    assert value(samples, "penstock_query_state_cache_hit_ratio", query="a") == 0.75
    assert not any(("query", name) in labels for name in ("b", "new") for _, labels in samples)


def test_memory_is_measured_by_the_supervisor_without_earlier_runs() -> None:
    usage = {"audit": {"pid": 1, "memory": 7, "deaths": 2}, "kafka": {"pid": 2, "memory": 9, "deaths": 0}}
    processes = {"run": {"at": NOW, "memory": 1, "usage": usage}, "audit": {"at": NOW, "memory": 5}, "old": {"at": 1}}
    samples = read(status(processes=processes))
    document = {name: value(samples, "penstock_memory_bytes", process=name) for name in ("audit", "kafka", "run")}
    assert document == {"audit": 7, "kafka": 9, "run": 1}
    assert value(samples, "penstock_deaths_total", process="audit") == 2
    assert value(samples, "penstock_up", process="old") is None
    assert value(samples, "penstock_up", process="run") == 1


def test_no_verdict_while_the_audit_does_not_report() -> None:
    silent = {"audit": {"at": NOW - 11_000_000}}
    samples = read(status(processes=silent))
    assert verdict(samples) == "not known"
    assert value(samples, "penstock_up", process="audit") == 0


def test_the_verdict_before_any_report() -> None:
    samples = read({"now": NOW, "processes": {}, "nodes": {}, "balance": None})
    assert verdict(samples) == "not known"
    assert {name for name, _ in samples} == {"penstock_verdict"}


def test_the_order_of_a_status_does_not_change_the_text() -> None:
    forth = status()
    back = {name: dict(reversed(part.items())) if isinstance(part, dict) else part for name, part in forth.items()}
    assert metrics(forth) == metrics(back)


HOSTILE = ['"', "\\", "\n", '\\"\n\\n', '"} 1\npenstock_up 1\n# ', "", "é \u202e \0 \r \u2028", "x" * 10_000]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_stays_within_its_label(name: str) -> None:
    document = status(
        nodes={name: {"rate": 1}},
        processes={name: {"at": NOW, "memory": 1}, "audit": {"at": NOW}},
        balance={
            "hops": [hop(name, name, name, outcomes={name: 5})],
            "channels": [{"channel": name, "kind": "source", "senders": 2}],
            "alarms": [{"name": name, "stage": name}],
        },
    )
    samples = read(document)
    assert value(samples, "penstock_records_total", stage=name, channel=name, outcome=name) == 5
    assert value(samples, "penstock_rate", node=name) == 1
    assert value(samples, "penstock_up", process=name) == 1
    assert value(samples, "penstock_alarms", name=name, stage=name) == 1
    assert verdict(samples) == "missing"


def test_a_lone_surrogate_is_replaced() -> None:
    assert value(read(status(nodes={"\ud800": {"rate": 1}})), "penstock_rate", node="?") == 1
    assert value(read(status(nodes={chr(0xD800 + n): {"rate": n} for n in (1, 2)})), "penstock_rate", node="?") == 3


@pytest.mark.parametrize("odd", [None, "7", True, [], {}, float("nan"), float("inf"), 10**400, -1e308])
def test_values_that_are_not_numbers_are_omitted(odd: object) -> None:
    document = status(
        now=odd,
        nodes={"a": odd, "b": {"rate": odd, "lag": odd}},
        processes={"audit": odd, "run": {"at": odd, "memory": odd, "usage": odd}},
        balance={
            "whole": odd,
            "hops": [
                odd,
                hop(stage=odd, outcomes=odd, missing=odd),
                hop(latency=odd),
                hop(latency={"count": odd, "mean": odd}),
            ],
            "channels": [odd, {"channel": odd, "senders": odd}],
            "alarms": odd,
        },
    )
    read(document)
    read({**document, "balance": odd})
    read({"now": NOW, "processes": odd, "nodes": odd, "balance": odd})


def test_equal_alarms_and_hops_are_added() -> None:
    alarm = {"name": "slow", "stage": "query:x"}
    samples = read(status(balance={"alarms": [alarm, alarm], "hops": [hop(), hop()]}))
    assert value(samples, "penstock_alarms", **alarm) == 2
    assert value(samples, "penstock_missing", stage="source:rsvps", channel="rsvps") == 8


def test_the_content_type(
    served: Callable[..., AbstractContextManager[str]], vega_cache: Path, eventually: Callable[..., None]
) -> None:
    channels = MemoryChannels()
    channels.append("status", orjson.dumps({"process": "audit", "at": 1, "memory": 5, "nodes": {}}), b"audit")
    app = build(channels, [], [], {}, "status", "a title", cache=vega_cache)
    with served(app) as address:
        eventually(app.state.delivery.ready.is_set)
        answer = httpx.get(f"{address}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert value(parsed(answer.text), "penstock_memory_bytes", process="audit") == 5
    assert value(parsed(answer.text), "penstock_rate", node="page") == 0
