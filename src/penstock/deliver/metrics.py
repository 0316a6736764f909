"""What all processes said last, as Prometheus reads it: its text format, version 0.0.4. No I/O.

A value that is not known is left out: a series that ends says more than a number that was made up.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from penstock.audit.judge import Verdict
from penstock.core.clock import is_alive

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_QUANTILES = {"0": "min", "0.5": "p50", "0.95": "p95", "0.99": "p99", "1": "max"}
_QUERY = "query:"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

_Document = Mapping[object, object]
_Number = int | float


class _Family:
    """One metric: its help, its type, and a value for each set of labels."""

    def __init__(self, name: str, kind: Literal["counter", "gauge", "summary"], says: str) -> None:
        self._head = f"# HELP {name} {says}\n# TYPE {name} {kind}\n"
        self._name = name
        self._series: dict[str, _Number] = {}

    def add(self, value: object, suffix: str = "", **labels: str) -> None:
        """Count a value; what is not a number is left out, and what has the same labels is added up."""
        series = self._name + suffix + _labels(labels)
        number = _number(value)
        if number is not None and (total := _number(self._series.get(series, 0) + number)) is not None:
            self._series[series] = total

    def summarise(self, told: object, **labels: str) -> None:
        """A summary of milliseconds as one of seconds; its quantiles 0 and 1 are the least and the most."""
        latency = _document(told)
        for quantile, name in _QUANTILES.items():
            self.add(_seconds(latency.get(name)), **labels, quantile=quantile)
        count, mean = _number(latency.get("count")), _seconds(latency.get("mean"))
        if count is not None and mean is not None:
            self.add(mean * count, "_sum", **labels)
            self.add(count, "_count", **labels)

    def text(self) -> str:
        if not self._series:
            return ""
        return self._head + "".join(f"{series} {value}\n" for series, value in self._series.items())


def metrics(status: Mapping[str, object]) -> bytes:
    """The status document of the delivery as metrics. Whatever a process said, the answer can be parsed."""
    document = _document(status)
    families = [*_balance(document), *_nodes(document), *_queries(document), *_processes(document)]
    # Half a character pair, which a name from outside may hold, cannot be sent.
    return "".join(family.text() for family in families).encode(errors="replace")


def _balance(status: _Document) -> Iterator[_Family]:
    balance = _document(status.get("balance"))
    records = _Family("penstock_records_total", "counter", "Records that a stage took, by what became of them.")
    in_flight = _Family("penstock_in_flight", "gauge", "Records that are due at a stage and may still come.")
    missing = _Family("penstock_missing", "gauge", "Records that should have been taken by a stage, and were not.")
    latency = _Family("penstock_latency_seconds", "summary", "From a record's sender to the end of a stage.")
    step = _Family("penstock_step_seconds", "summary", "From the beginning of a stage to its end.")
    for hop in _documents(balance.get("hops")):
        # A source reads no channel: it is told by the one that it fills.
        labels = {"stage": _text(hop.get("stage")), "channel": _text(hop.get("reads")) or _text(hop.get("writes"))}
        for outcome, number in _document(hop.get("outcomes")).items():
            records.add(number, **labels, outcome=_text(outcome))
        in_flight.add(hop.get("in_flight"), **labels)
        missing.add(hop.get("missing"), **labels)
        latency.summarise(hop.get("latency"), **labels)
        step.summarise(hop.get("step"), **labels)
    yield from (records, in_flight, missing)

    verdict = _Family("penstock_verdict", "gauge", "1 for the verdict of the audit, 0 for the other two.")
    # While the auditor is silent, nobody knows.
    found = _text(balance.get("verdict")) if _spoke(status, "audit") else Verdict.NOT_KNOWN
    for one in Verdict:
        verdict.add(int(found == one), verdict=one)
    yield verdict

    discrepancies = _Family("penstock_discrepancies", "gauge", "Records or rows that are not as they have to be.")
    for finding in _documents(balance.get("discrepancies")):
        discrepancies.add(finding.get("count"), kind=_text(finding.get("kind")), stage=_text(finding.get("stage")))
    doubts = _Family("penstock_doubts", "gauge", "Reasons why the verdict is not known.")
    for doubt in _documents(balance.get("doubts")):
        doubts.add(1, kind=_text(doubt.get("kind")), subject=_text(doubt.get("subject")))
    yield from (discrepancies, doubts)

    unknown = _Family(
        "penstock_unknown_seconds", "gauge", "How long a source that cannot be asked again was not heard."
    )
    senders = _Family("penstock_senders", "gauge", "Senders that were seen in a channel, or have said that they sent.")
    for channel in _documents(balance.get("channels")):
        if channel.get("kind", "source") == "source":
            unknown.add(channel.get("unknown_seconds"), channel=_text(channel.get("channel")))
            senders.add(channel.get("senders"), channel=_text(channel.get("channel")))
    yield from (unknown, senders, latency, step)

    alarms = _Family("penstock_alarms", "gauge", "Alarms that are on.")
    for alarm in _documents(balance.get("alarms")):
        alarms.add(1, name=_text(alarm.get("name")), stage=_text(alarm.get("stage")))
    yield alarms


def _nodes(status: _Document) -> Iterator[_Family]:
    lag = _Family("penstock_lag", "gauge", "Entries that wait for a part of the pipeline.")
    rate = _Family("penstock_rate", "gauge", "What a part of the pipeline passes on per second.")
    for node, figures in sorted(_by_name(status.get("nodes"))):
        lag.add(figures.get("lag"), node=node)
        rate.add(figures.get("rate"), node=node)
    yield from (lag, rate)


def _queries(status: _Document) -> Iterator[_Family]:
    """What Spark told of the last batch of each query."""
    kinds = {
        "mode": "1, with the mode in which a query runs.",
        "input_rate": "Records that a query took per second of its last batch.",
        "batch_seconds": "How long the last batch of a query took, and the parts of it.",
        "age_seconds": "How long ago the last batch of a query ended: so old are the other figures.",
        "watermark_seconds": "The watermark of a query, in seconds since 1970.",
        "watermark_behind_seconds": "How far the watermark of a query is behind the newest event time.",
        "event_time_skew_seconds": "How old the newest event was when the last batch ended.",
        "state_rows": "Rows of state, where Spark counts them.",
        "state_bytes": "What the state of a query takes, in memory and on disk.",
        "state_load_seconds": "How long it took to load state: for the last batch, and when the query started.",
        "state_cache_hit_ratio": "Blocks of state that were found in memory, of all that the last batch read.",
    }
    found = {name: _Family(f"penstock_query_{name}", "gauge", says) for name, says in kinds.items()}
    now = _number(status.get("now"))
    for node, figures in sorted(_by_name(status.get("nodes"))):
        if not node.startswith(_QUERY):
            continue
        query = node.removeprefix(_QUERY)
        if mode := _text(figures.get("mode")):
            found["mode"].add(1, query=query, mode=mode)
        found["input_rate"].add(figures.get("rate_in"), query=query)
        for part, ms in _items(figures.get("times")):
            found["batch_seconds"].add(_seconds(ms), query=query, part=part)
        at = _number(figures.get("at"))
        if now is not None and at is not None and (age := _number(now - at)) is not None:
            found["age_seconds"].add(max(0, age) / 1e6, query=query)
        if (watermark := _number(figures.get("watermark"))) is not None:
            found["watermark_seconds"].add(watermark / 1e6, query=query)
        found["watermark_behind_seconds"].add(_seconds(figures.get("behind")), query=query)
        found["event_time_skew_seconds"].add(_seconds(figures.get("skew")), query=query)
        store = _document(figures.get("store"))
        found["state_rows"].add(store.get("rows"), query=query)
        for place in ("memory", "disk"):
            found["state_bytes"].add(store.get(place), query=query, place=place)
        for when, ms in (("last", store.get("load")), ("start", store.get("restored"))):
            found["state_load_seconds"].add(_seconds(ms), query=query, when=when)
        hits, misses = _number(store.get("hits")), _number(store.get("misses"))
        if hits is not None and misses is not None and hits + misses > 0:
            found["state_cache_hit_ratio"].add(round(hits / (hits + misses), 4), query=query)
    yield from found.values()


def _processes(status: _Document) -> Iterator[_Family]:
    processes = dict(_by_name(status.get("processes")))
    usage = dict(_by_name(processes.get("run", {}).get("usage")))
    # A process of an earlier run that is none of this one any more said its last word long ago.
    ours = sorted(name for name in processes if not usage or name == "run" or name in usage)
    up = _Family("penstock_up", "gauge", "1 when a process has spoken within the last 10 seconds.")
    memory = _Family("penstock_memory_bytes", "gauge", "Memory of a process, with its children where they are seen.")
    deaths = _Family("penstock_deaths_total", "counter", "How often a process died, since the run began.")
    for name in ours:
        up.add(int(_spoke(status, name)), process=name)
    for name in sorted({*ours, *usage}):
        seen, told = usage.get(name, {}).get("memory"), processes.get(name, {}).get("memory")
        memory.add(told if seen is None else seen, process=name)
        deaths.add(usage.get(name, {}).get("deaths"), process=name)
    yield from (up, memory, deaths)


def _spoke(status: _Document, process: str) -> bool:
    now = _number(status.get("now"))
    at = _number(_document(_document(status.get("processes")).get(process)).get("at"))
    return now is not None and is_alive(at, now)


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"


# --- what others wrote may have any shape -----------------------------------------------------------------------------


def _document(value: object) -> _Document:
    return value if isinstance(value, Mapping) else {}


def _documents(value: object) -> list[_Document]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list | tuple) else []


def _by_name(value: object) -> Iterator[tuple[str, _Document]]:
    for name, one in _items(value):
        yield name, _document(one)


def _items(value: object) -> Iterator[tuple[str, object]]:
    for name, one in _document(value).items():
        yield _text(name), one


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> _Number | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer that no float can hold
        return None


def _seconds(ms: object) -> float | None:
    number = _number(ms)
    return None if number is None else round(number / 1_000, 9)
