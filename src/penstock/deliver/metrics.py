"""The status of all processes as Prometheus metrics. No I/O.

A value that is not known is left out: a series that ends says more than a number that was made up.
"""

import math
from collections.abc import Iterator, Mapping
from operator import itemgetter

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.samples import Sample

from penstock.audit.judge import Verdict
from penstock.core.clock import is_running

_COUNTERS = (
    ("records_total", "Records that a stage took, by what became of them.", "stage channel outcome"),
    ("deaths_total", "How often a process died, since the run began.", "process"),
)
_SUMMARIES = (
    ("latency_seconds", "From a record's sender to the end of a stage.", "stage channel"),
    ("step_seconds", "From the beginning of a stage to its end.", "stage channel"),
)
_GAUGES = (
    ("in_flight", "Records that are due at a stage and may still come.", "stage channel"),
    ("missing", "Records that should have been taken by a stage, and were not.", "stage channel"),
    ("verdict", "1 for the verdict of the audit, 0 for the other two.", "verdict"),
    ("discrepancies", "Records or rows that are not as they have to be.", "kind stage"),
    ("doubts", "Reasons why the verdict is not known.", "kind subject"),
    ("unknown_seconds", "How long a source that cannot be asked again was not heard.", "channel"),
    ("senders", "Senders that were seen in a channel, or have said that they sent.", "channel"),
    ("alarms", "Alarms that are on.", "name stage"),
    ("lag", "Entries that wait for a part of the pipeline.", "node"),
    ("rate", "What a part of the pipeline passes on per second.", "node"),
    ("query_mode", "1, with the mode in which a query runs.", "query mode"),
    ("query_input_rate", "Records that a query took per second of its last batch.", "query"),
    ("query_batch_seconds", "How long the last batch of a query took, and the parts of it.", "query part"),
    ("query_age_seconds", "How long ago the last batch of a query ended: so old are the other figures.", "query"),
    ("query_watermark_seconds", "The watermark of a query, in seconds since 1970.", "query"),
    ("query_watermark_behind_seconds", "How far the watermark of a query is behind the newest event time.", "query"),
    ("query_event_time_skew_seconds", "How old the newest event was when the last batch ended.", "query"),
    ("query_state_rows", "Rows of state, where Spark counts them.", "query"),
    ("query_state_bytes", "What the state of a query takes, in memory and on disk.", "query place"),
    ("query_state_load_seconds", "How long loading state took: for the last batch, and at the start.", "query when"),
    ("query_state_cache_hit_ratio", "Blocks of state found in memory, of all that the last batch read.", "query"),
    ("up", "1 when a process has spoken within the last 10 seconds.", "process"),
    ("memory_bytes", "Memory of a process, with its children where they are seen.", "process"),
)
_QUANTILES = {"0": "min", "0.5": "p50", "0.95": "p95", "0.99": "p99", "1": "max"}
_QUERY = "query:"

_Document = Mapping[object, object]
_Number = int | float


def metrics(status: Mapping[str, object]) -> bytes:
    """The status document of the delivery in the text format of Prometheus. It is valid for any status."""
    collector, document = _Collector(), _document(status)
    for part in (_balance, _nodes, _queries, _processes):
        part(document, collector)
    return generate_latest(collector)


class _Collector:
    """All metrics. Values that are not numbers are left out, values with the same labels are added up."""

    def __init__(self) -> None:
        prefix = "penstock_"
        self._summaries = {
            name: SummaryMetricFamily(prefix + name, says, labels=labels.split()) for name, says, labels in _SUMMARIES
        }
        self._others: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
            **{
                name: CounterMetricFamily(prefix + name, says, labels=labels.split())
                for name, says, labels in _COUNTERS
            },
            **{name: GaugeMetricFamily(prefix + name, says, labels=labels.split()) for name, says, labels in _GAUGES},
        }

    def add(self, name: str, value: object, *labels: str) -> None:
        if (number := _number(value)) is not None:
            self._others[name].add_metric(labels, number)

    def summarise(self, name: str, summary: object, stage: str, channel: str) -> None:
        """A summary of milliseconds as one of seconds; its quantiles 0 and 1 are the least and the most."""
        metric, latency = self._summaries[name], _document(summary)
        for quantile, figure in _QUANTILES.items():
            if (seconds := _seconds(latency.get(figure))) is not None:
                metric.add_sample(metric.name, {"stage": stage, "channel": channel, "quantile": quantile}, seconds)
        count, mean = _number(latency.get("count")), _seconds(latency.get("mean"))
        if count is not None and mean is not None and (total := _number(mean * count)) is not None:
            metric.add_metric([stage, channel], int(count), total)

    def collect(self) -> Iterator[Metric]:
        for metric in (*self._others.values(), *self._summaries.values()):
            totals: dict[tuple[str, tuple[tuple[str, str], ...]], _Number] = {}
            for sample in metric.samples:
                series = sample.name, tuple(sample.labels.items())
                if (total := _number(totals.get(series, 0) + sample.value)) is not None:
                    totals[series] = total
            metric.samples = [Sample(name, dict(labels), total) for (name, labels), total in totals.items()]
            if totals:
                yield metric


def _balance(status: _Document, into: _Collector) -> None:
    balance = _document(status.get("balance"))
    for hop in _documents(balance.get("hops")):
        # A source reads no channel: its label is the channel that it fills.
        stage, channel = _text(hop.get("stage")), _text(hop.get("reads")) or _text(hop.get("writes"))
        for outcome, number in _items(hop.get("outcomes")):
            into.add("records_total", number, stage, channel, outcome)
        into.add("in_flight", hop.get("in_flight"), stage, channel)
        into.add("missing", hop.get("missing"), stage, channel)
        into.summarise("latency_seconds", hop.get("latency"), stage, channel)
        into.summarise("step_seconds", hop.get("step"), stage, channel)
    # While the auditor is silent, the verdict is not known.
    verdict = _text(balance.get("verdict")) if _spoke(status, "audit") else Verdict.NOT_KNOWN
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
    """What Spark reported of the last batch of each query."""
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
        for place in ("memory", "disk"):
            into.add("query_state_bytes", store.get(place), query, place)
        for when, ms in (("last", store.get("load")), ("start", store.get("restored"))):
            into.add("query_state_load_seconds", _seconds(ms), query, when)
        hits, misses = _number(store.get("hits")), _number(store.get("misses"))
        if hits is not None and misses is not None and hits + misses > 0:
            into.add("query_state_cache_hit_ratio", round(hits / (hits + misses), 4), query)


def _processes(status: _Document, into: _Collector) -> None:
    processes = dict(_by_name(status.get("processes")))
    usage = dict(_by_name(processes.get("run", {}).get("usage")))
    # Processes of an earlier run that are not part of this one are left out.
    ours = sorted(name for name in processes if not usage or name == "run" or name in usage)
    for name in ours:
        into.add("up", int(_spoke(status, name)), name)
    for name in sorted({*ours, *usage}):
        seen, reported = usage.get(name, {}).get("memory"), processes.get(name, {}).get("memory")
        into.add("memory_bytes", reported if seen is None else seen, name)
        into.add("deaths_total", usage.get(name, {}).get("deaths"), name)


def _spoke(status: _Document, process: str) -> bool:
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
    # A lone surrogate, which a name from outside may hold, cannot be encoded.
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
