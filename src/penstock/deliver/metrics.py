"""The status of all processes as Prometheus metrics. No I/O.

Unknown values are omitted: a series that ends is clearer than an invented number.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter

from prometheus_client import Metric, generate_latest

from penstock.audit.judge import Verdict
from penstock.core.clock import is_running

_METRICS = (
    ("records_total", "Records that a stage read, by outcome.", "stage channel outcome"),
    ("deaths_total", "Deaths of a process since the run began.", "process"),
    ("in_flight", "Records that a stage has not read yet.", "stage channel"),
    ("missing", "Records that a stage should have read, and has not.", "stage channel"),
    ("verdict", "1 for the verdict of the audit, 0 for the other two.", "verdict"),
    ("discrepancies", "Records or rows with a discrepancy, by kind.", "kind stage"),
    ("doubts", "Reasons why the verdict is unknown.", "kind subject"),
    ("unknown_seconds", "Outage of a source that cannot be replayed.", "channel"),
    ("senders", "Senders that were seen in a channel, or reported that they sent to it.", "channel"),
    ("alarms", "Active alarms.", "name stage"),
    ("lag", "Entries that a node of the pipeline has not read yet.", "node"),
    ("rate", "Records per second of a node of the pipeline.", "node"),
    ("query_mode", "1, with the mode of a query.", "query mode"),
    ("query_input_rate", "Records per second in the last batch of a query.", "query"),
    ("query_batch_seconds", "Duration of the last batch of a query, and of its parts.", "query part"),
    ("query_age_seconds", "Time since the end of the last batch of a query: the age of its other metrics.", "query"),
    ("query_watermark_seconds", "The watermark of a query, in seconds since 1970.", "query"),
    ("query_watermark_behind_seconds", "Distance from the watermark of a query to the newest event time.", "query"),
    ("query_event_time_skew_seconds", "Age of the newest event at the end of the last batch.", "query"),
    ("query_state_rows", "Rows of state, if Spark counts them.", "query"),
    ("query_state_bytes", "Size of the state of a query, in memory and on disk.", "query place"),
    ("query_state_load_seconds", "Time to load state: for the last batch, and at the start.", "query when"),
    ("query_state_cache_hit_ratio", "Share of the state blocks of the last batch that were in memory.", "query"),
    ("up", "1 if a process has reported within the last 10 seconds.", "process"),
    ("memory_bytes", "Memory of a process, with its children if they are visible.", "process"),
    ("latency_seconds", "Latency from the sender of a record to the end of a stage.", "stage channel"),
    ("step_seconds", "Latency from the beginning to the end of a stage.", "stage channel"),
)
"""Names, texts and labels. Counters end in `_total`; the others are gauges, except `_SUMMARIES`."""
_SUMMARIES = ("latency_seconds", "step_seconds")
_QUANTILES = {"0": "min", "0.5": "p50", "0.95": "p95", "0.99": "p99", "1": "max"}
_QUERY = "query:"

_Document = Mapping[object, object]
_Number = int | float


def metrics(status: Mapping[str, object]) -> bytes:
    """The status document of the delivery in the text format of Prometheus. Any status gives valid text."""
    collector, document = _Collector(), _document(status)
    for part in (_balance, _nodes, _queries, _processes):
        part(document, collector)
    return generate_latest(collector)


class _Collector:
    """All metrics. Values that are not numbers are omitted; values with equal labels are added."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, dict[tuple[str, tuple[str, ...]], _Number]] = defaultdict(dict)

    def add(self, name: str, value: object, *labels: str, suffix: str = "") -> None:
        samples, series = self._samples[name], (suffix, labels)
        if (number := _number(value)) is not None and (total := _number(samples.get(series, 0) + number)) is not None:
            samples[series] = total

    def add_summary(self, name: str, summary: object, stage: str, channel: str) -> None:
        """Add a summary in milliseconds as seconds; the quantiles 0 and 1 are the minimum and the maximum."""
        latency = _document(summary)
        for quantile, figure in _QUANTILES.items():
            self.add(name, _seconds(latency.get(figure)), stage, channel, quantile)
        count, mean = _number(latency.get("count")), _seconds(latency.get("mean"))
        if count is not None and mean is not None and (total := _number(mean * count)) is not None:
            self.add(name, int(count), stage, channel, suffix="_count")
            self.add(name, total, stage, channel, suffix="_sum")

    def collect(self) -> Iterator[Metric]:
        for name, text, labels in _METRICS:
            kind = "counter" if name.endswith("_total") else "summary" if name in _SUMMARIES else "gauge"
            metric = Metric(f"penstock_{name.removesuffix('_total')}", text, kind)
            for (suffix, values), number in self._samples[name].items():
                named = dict(zip((*labels.split(), "quantile"), values, strict=False))
                metric.add_sample(f"penstock_{name}{suffix}", named, number)
            if metric.samples:
                yield metric


def _balance(status: _Document, into: _Collector) -> None:
    balance = _document(status.get("balance"))
    for hop in _documents(balance.get("hops")):
        # A source reads no channel; its label is the channel that it writes.
        stage, channel = _text(hop.get("stage")), _text(hop.get("reads")) or _text(hop.get("writes"))
        for outcome, number in _items(hop.get("outcomes")):
            into.add("records_total", number, stage, channel, outcome)
        into.add("in_flight", hop.get("in_flight"), stage, channel)
        into.add("missing", hop.get("missing"), stage, channel)
        into.add_summary("latency_seconds", hop.get("latency"), stage, channel)
        into.add_summary("step_seconds", hop.get("step"), stage, channel)
    # Without a report of the auditor, the verdict is unknown.
    verdict = _text(balance.get("verdict")) if _is_up(status, "audit") else Verdict.NOT_KNOWN
    for one in Verdict:
        into.add("verdict", int(verdict == one), one)
    for finding in _documents(balance.get("discrepancies")):
        into.add("discrepancies", finding.get("count"), _text(finding.get("kind")), _text(finding.get("stage")))
    for doubt in _documents(balance.get("doubts")):
        into.add("doubts", 1, _text(doubt.get("kind")), _text(doubt.get("subject")))
    for source in _documents(balance.get("channels")):
        if source.get("kind", "source") == "source":
            into.add("unknown_seconds", source.get("unknown_seconds"), _text(source.get("channel")))
            into.add("senders", source.get("senders"), _text(source.get("channel")))
    for alarm in _documents(balance.get("alarms")):
        into.add("alarms", 1, _text(alarm.get("name")), _text(alarm.get("stage")))


def _nodes(status: _Document, into: _Collector) -> None:
    for node, figures in _by_name(status.get("nodes")):
        into.add("lag", figures.get("lag"), node)
        into.add("rate", figures.get("rate"), node)


def _queries(status: _Document, into: _Collector) -> None:
    """Spark's progress report of the last batch of each query."""
    now = _number(status.get("now"))
    for node, figures in _by_name(status.get("nodes")):
        if not node.startswith(_QUERY):
            continue
        query = node.removeprefix(_QUERY)
        if mode := _text(figures.get("mode")):
            into.add("query_mode", 1, query, mode)
        into.add("query_input_rate", figures.get("rate_in"), query)
        for part, ms in _items(figures.get("times")):
            into.add("query_batch_seconds", _seconds(ms), query, part)
        at = _number(figures.get("at"))
        if now is not None and at is not None and (age := _number(now - at)) is not None:
            into.add("query_age_seconds", max(0, age) / 1e6, query)
        if (watermark := _number(figures.get("watermark"))) is not None:
            into.add("query_watermark_seconds", watermark / 1e6, query)
        into.add("query_watermark_behind_seconds", _seconds(figures.get("behind")), query)
        into.add("query_event_time_skew_seconds", _seconds(figures.get("skew")), query)
        store = _document(figures.get("store"))
        into.add("query_state_rows", store.get("rows"), query)
        for medium in ("memory", "disk"):
            into.add("query_state_bytes", store.get(medium), query, medium)
        for when, ms in (("last", store.get("load")), ("start", store.get("restored"))):
            into.add("query_state_load_seconds", _seconds(ms), query, when)
        hits, misses = _number(store.get("hits")), _number(store.get("misses"))
        if hits is not None and misses is not None and hits + misses > 0:
            into.add("query_state_cache_hit_ratio", round(hits / (hits + misses), 4), query)


def _processes(status: _Document, into: _Collector) -> None:
    processes = dict(_by_name(status.get("processes")))
    usage = dict(_by_name(processes.get("run", {}).get("usage")))
    # Without processes of an earlier run.
    current = sorted(name for name in processes if not usage or name == "run" or name in usage)
    for name in current:
        into.add("up", int(_is_up(status, name)), name)
    for name in sorted({*current, *usage}):
        measured, reported = usage.get(name, {}).get("memory"), processes.get(name, {}).get("memory")
        into.add("memory_bytes", reported if measured is None else measured, name)
        into.add("deaths_total", usage.get(name, {}).get("deaths"), name)


def _is_up(status: _Document, process: str) -> bool:
    now = _number(status.get("now"))
    at = _number(dict(_by_name(status.get("processes"))).get(process, {}).get("at"))
    return now is not None and is_running(at, now)


# --- the status may have any shape ------------------------------------------------------------------------------------


def _document(value: object) -> _Document:
    return value if isinstance(value, Mapping) else {}


def _documents(value: object) -> list[_Document]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list | tuple) else []


def _by_name(value: object) -> Iterator[tuple[str, _Document]]:
    for name, one in sorted(_items(value), key=itemgetter(0)):
        yield name, _document(one)


def _items(value: object) -> Iterator[tuple[str, object]]:
    for name, one in _document(value).items():
        yield _text(name), one


def _text(value: object) -> str:
    # Names may hold lone surrogates, which UTF-8 cannot encode.
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


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
