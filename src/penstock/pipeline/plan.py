"""What a pipeline will do, checked and explained before anything starts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from penstock.analysis.engine import Engine
from penstock.analysis.query import Query
from penstock.contracts import Guarantee
from penstock.pipeline.description import Description
from penstock.pipeline.wiring import LOCALS, Wiring, shown


@dataclass(frozen=True)
class Hop:
    """One step of a record: from where, by what, to where, and what that promises."""

    start: str
    by: str
    end: str
    guarantee: str
    why: str


@dataclass(frozen=True)
class QueryPlan:
    name: str
    mode: str
    why: str
    reads: tuple[str, ...]
    writes: str
    key: tuple[str, ...]
    identity: str
    doc: str


@dataclass(frozen=True)
class Plan:
    pipeline: str
    channels: str
    """Where they lie, and what that promises."""
    hops: tuple[Hop, ...]
    queries: tuple[QueryPlan, ...]
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(description: Description, wiring: Wiring, engine: Engine) -> Plan:
    """Analyse every query with Spark and say what follows; Misconfigured when something cannot work."""
    verdicts = engine.verdicts(description.queries)
    queries: list[QueryPlan] = []
    remarks: list[str] = []
    for query in description.queries:
        identity = _identity(engine.columns(query))
        remarks += _remarks(query, identity, engine)
        verdict = verdicts[query.name]
        queries.append(
            QueryPlan(query.name, verdict.mode, verdict.why, query.inputs, query.into, query.key, identity, query.doc)
        )
    remarks += [
        f"channel {channel.name}: it has no schema; its records are text in the column value"
        for channel in description.channels.values()
        if not channel.schema and not channel.result_of
    ]
    return Plan(description.name, _channels(wiring), tuple(_hops(description, wiring)), tuple(queries), tuple(remarks))


_NONE = "none"
_ORIGIN = "origin of its record"
_VERSION = "version by seen()"


def _remarks(query: Query, identity: str, engine: Engine) -> Iterator[str]:
    """What a query leaves open, and the way out."""
    if identity == _NONE:
        yield (
            f"query {query.name}: its rows carry neither seen() nor origin; after a crash an older row may win, and "
            "the audit cannot tell how many records they hold. "
            "Add seen() to its aggregation, or keep the column origin."
        )
    elif (why := engine.uncounted(query)) is not None:
        yield f"query {query.name}: the audit cannot check that each record is in its rows: {why}."
    if identity == _VERSION and query.watermark is None and any(engine.shapes[name].unique for name in query.inputs):
        yield f"query {query.name}: without watermark= it cannot tell what its channel holds twice."


def _identity(columns: list[str]) -> str:
    if "seen" in columns:
        return _VERSION
    return _ORIGIN if "origin" in columns else _NONE


def _channels(wiring: Wiring) -> str:
    address = wiring.channels.address
    local = ", started here" if address in LOCALS else ""
    return f"{shown(address)}{local}: {wiring.at('local', 'redis://local').bind().promise.words}"


def _hops(description: Description, wiring: Wiring) -> list[Hop]:
    hops = []
    for source in description.sources:
        resumed = source.resume and source.numbered is not None
        hops.append(
            Hop(
                shown(wiring.address(source)),
                "websocket",
                source.into,
                Guarantee.EXACTLY_ONCE if resumed else Guarantee.BEST_EFFORT,
                "it resumes after the last number that the channel holds"
                if resumed
                else "what it sends while nobody listens is unknown",
            )
        )
    for query in description.queries:
        why = "rows may be written again after a crash; their version tells which is newer"
        hops += [Hop(name, f"query {query.name}", query.into, Guarantee.AT_LEAST_ONCE, why) for name in query.inputs]
    for store in description.stores:
        why = "rows and positions are written in one transaction, older versions never win"
        hops.append(Hop(store.channel, "loader", shown(store.url), Guarantee.EXACTLY_ONCE, why))
    for page in description.pages:
        why = "a snapshot, then the changes; whoever comes back gets what it missed"
        hops.append(Hop(page.channel, "feed", "browsers", Guarantee.EXACTLY_ONCE, why))
    return hops
