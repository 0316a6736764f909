"""The plan of a pipeline: what it will do, and the guarantee of each hop, checked before anything starts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.analysis.checkpoints.doctor import Fit
from penstock.analysis.checkpoints.rescale import spread
from penstock.analysis.engine import Engine
from penstock.analysis.launch import examined
from penstock.analysis.operators.keyed import keeps_state, unnumbered
from penstock.analysis.plans import Need, Verdict, guessed, need
from penstock.analysis.query import Mode, Query, Static
from penstock.analysis.session import wait_for_slots
from penstock.collect.registry import kind_of
from penstock.collect.shedding import Shedding
from penstock.core.contracts import Guarantee, Source
from penstock.core.errors import Misconfigured, raise_all
from penstock.core.text import did_you_mean, redact_address
from penstock.pipeline.config import LOCAL, LOCALS, Config
from penstock.pipeline.description import Description
from penstock.pipeline.sources import make_source
from penstock.plan.checks import Finding, Level, unconnected, unknown_fields

_SUFFICIENT = {
    Guarantee.EXACTLY_ONCE: {Guarantee.EXACTLY_ONCE},
    Guarantee.AT_LEAST_ONCE: {Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE},
    Guarantee.AT_MOST_ONCE: {Guarantee.EXACTLY_ONCE, Guarantee.AT_MOST_ONCE},
}


@dataclass(frozen=True)
class HopGuarantee:
    """The guarantee of a hop, with the reason; if it is weaker than required, with a fix."""

    required: Guarantee
    guarantee: str
    why: str
    fix: str = ""

    @property
    def weaker(self) -> bool:
        return self.guarantee not in _SUFFICIENT[self.required]


def of_source(source: Source, required: Guarantee) -> HopGuarantee:
    # A sender that repeats unacknowledged records cannot be kept from sending a record twice.
    if required is Guarantee.AT_MOST_ONCE and source.guarantee is not Guarantee.AT_LEAST_ONCE:
        why = "each connection starts with new records, and nothing is requested again"
        return HopGuarantee(required, Guarantee.AT_MOST_ONCE, why)
    return HopGuarantee(required, source.guarantee, source.description, _FIXES.get(source.guarantee, ""))


_FIXES = {
    Guarantee.AT_LEAST_ONCE: "number the records at the senders, or remove duplicates with unique=",
    Guarantee.BEST_EFFORT: "use a feed that can resume, or let senders wait for the acknowledgement",
}


def of_query(
    identified: bool, abandons: bool, required: Guarantee, *, keyed: bool = False, unnumbered: str | None = None
) -> HopGuarantee:
    """The guarantee of a query.

    `identified`: its rows have a version or an origin. `abandons`: a batch that a crash interrupts is not repeated.
    `keyed`: its rows have an origin and come from Python state. `unnumbered`: why some rows have no origin.
    """
    why, fix = "rows may be written again after a crash", ""
    if unnumbered is not None:
        guarantee, why = Guarantee.AT_LEAST_ONCE, f"{why}, and {unnumbered}"
        fix = "store them in a table, such as redis://…, which keeps the last row of a key"
    elif identified and keyed:
        guarantee = Guarantee.EXACTLY_ONCE
        why = "the first row of a record has its number; further rows may be repeated after a crash"
    elif identified:
        guarantee, why = Guarantee.EXACTLY_ONCE, f"{why}; their version shows which is newer"
    elif abandons:
        guarantee = Guarantee.AT_MOST_ONCE
        why = "a batch that a crash interrupts is not repeated; the audit counts its records as missing"
    else:
        guarantee, why = Guarantee.AT_LEAST_ONCE, f"{why}, and nothing identifies them"
        fix = "add seen() to its aggregation, or keep the column origin"
    return HopGuarantee(required, guarantee, why, fix)


def of_store(required: Guarantee) -> HopGuarantee:
    """A transaction neither drops a row nor applies it twice."""
    why = "rows and offsets are written in one transaction, older versions never win"
    return HopGuarantee(required, Guarantee.EXACTLY_ONCE, why)


def of_page(required: Guarantee) -> HopGuarantee:
    why = "a snapshot, then the changes; a client that reconnects gets the changes that it missed"
    return HopGuarantee(required, Guarantee.EXACTLY_ONCE, why)


@dataclass(frozen=True)
class Hop:
    """One step of a record: its start, the part that moves it, its end, and the guarantee."""

    start: str
    by: str
    end: str
    guarantee: str
    why: str
    wanted: str = ""
    """The delivery that the pipeline requires; empty for a static table."""
    fix: str = ""
    """If the guarantee is weaker than required: how to strengthen it."""


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
    cost: str
    """The class of its cost: jvm, arrow or row."""
    price: str
    """The cost of each record, as text."""
    checkpoint: str
    """Whether the query fits its checkpoint, as far as the files show."""


@dataclass(frozen=True)
class Plan:
    pipeline: str
    channels: str
    """The address of the channels, and their guarantees."""
    hops: tuple[Hop, ...]
    queries: tuple[QueryPlan, ...]
    remarks: tuple[str, ...]
    slots: Need
    findings: tuple[Finding, ...] = ()
    """Errors and warnings."""

    @property
    def wrong(self) -> bool:
        return any(finding.level is Level.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def slots_needed(
    description: Description, config: Config, partitions: Mapping[str, int], real_time: Mapping[str, int] | None = None
) -> Need:
    """The slots that the queries need.

    `partitions`: of existing channels; the declared number otherwise. `real_time`: the result of `real_time_queries`;
    without it the maximum is assumed.
    """
    partitions = {name: partitions.get(name, channel.partitions) for name, channel in description.channels.items()}
    validated = [*(channel.name for channel in description.validated), *(store.channel for store in description.lakes)]
    if real_time is None:
        real_time = guessed(description.queries, config.spark.real_time_queries, partitions)
    spreads = {query.name: spread(f"{config.checkpoints}/{query.name}") for query in description.queries}
    fixed = {name: number for name, number in spreads.items() if number is not None}
    return need(description.queries, real_time, partitions, validated, config.spark.shuffle_partitions, fixed)


def real_time_queries(
    description: Description, engine: Engine, verdicts: Mapping[str, Verdict] | None = None
) -> dict[str, int]:
    """The queries that run in real time, with their numbers of shuffles."""
    found = engine.verdicts(description.queries) if verdicts is None else verdicts
    in_real_time = [query for query in description.queries if found[query.name].mode is Mode.REAL_TIME]
    return {query.name: engine.shuffles(query) for query in in_real_time}


def plan(description: Description, config: Config, engine: Engine, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Analyse every query with Spark; Misconfigured with the errors of all queries. `say` gets progress messages."""
    _check_columns(description, engine, say)
    if description.queries:
        say("trying which queries can run in real time")
    verdicts = engine.verdicts(description.queries)
    queries: list[QueryPlan] = []
    findings = [*unconnected(description), *_charts(description, engine)]
    remarks: list[str] = []
    guarantees: dict[str, HopGuarantee] = {}
    for query in description.queries:
        identity = _identity(engine.columns(query))
        result = engine.over_nothing(query)
        guarantees[query.name] = of_query(
            identity != _NONE,
            engine.abandons(query),
            description.delivery,
            keyed=identity == _ORIGIN and keeps_state(result),
            unnumbered=unnumbered(result) if identity == _ORIGIN else None,
        )
        remarks += _remarks(query, identity, engine, guarantees[query.name])
        verdict, cost, diagnosis = verdicts[query.name], engine.cost(query), examined(engine, query)
        if diagnosis.fit is Fit.REFUSED:
            findings.append(Finding(Level.ERROR, diagnosis.location, diagnosis.problem, diagnosis.fix))
        queries.append(
            QueryPlan(
                query.name, verdict.mode, verdict.why, query.inputs, query.into, query.key, identity, query.doc,
                cost, cost.description, str(diagnosis),
            )
        )  # fmt: skip
    remarks += [
        f"channel {channel.name}: it has no schema; its records are text in the column value"
        for channel in description.channels.values()
        if not channel.schema and not channel.result_of
    ]
    slots = slots_needed(description, config, {}, real_time_queries(description, engine, verdicts))
    # A local Spark gets as many slots as necessary.
    if config.spark.master != LOCAL and (
        remark := slots.check(wait_for_slots(engine.spark, slots.least), config.spark.master)
    ):
        remarks.append(remark)
    hops = tuple(_hops(description, config, guarantees))
    filled = {source.into for source in description.sources}
    remarks += [
        f"{hop.start}: {hop.guarantee} is weaker than {hop.wanted}, which is required; {hop.fix}."
        for hop in hops
        if hop.fix and hop.end in filled and not hop.by.startswith(_QUERY)
    ]
    return Plan(description.name, _channels(config), hops, tuple(queries), tuple(remarks), slots, tuple(findings))


def _check_columns(description: Description, engine: Engine, say: Callable[[str], None]) -> None:
    """Let Spark analyse each channel and query; raise all errors."""
    wrong: dict[str, Misconfigured] = {}
    for channel in description.channels.values():
        if not channel.result_of:
            try:
                engine.typed(channel.name)
            except Misconfigured as error:
                wrong[channel.name] = error
    for query in description.queries:
        if not wrong.keys() & {*query.inputs}:
            say(f"checking the columns of {query.name}")
            try:
                engine.columns(query)
            except Misconfigured as error:
                wrong[query.into] = error
    raise_all([*wrong.values()])


def _charts(description: Description, engine: Engine) -> Iterator[Finding]:
    """Find charts with a column that their rows do not have. They would be empty."""
    results = {query.into: query for query in description.queries}
    for page in description.pages:
        query = results.get(page.channel)
        rows = engine.typed(page.channel) if query is None else engine.over_nothing(query)
        # The page flattens structs: window_start.
        columns = {
            f"{one.name}_{inner}" if inner else one.name
            for one in rows.schema
            for inner in getattr(one.dataType, "names", None) or ("",)
        }
        for name in sorted(unknown_fields(page.spec() or {}, columns)):
            problem = f'its chart uses "{name}", which is not a column of {page.channel}'
            fix = did_you_mean(name, columns, f"the columns are {', '.join(sorted(columns))}")
            yield Finding(Level.WARNING, f"page {page.title}", problem, fix)


_QUERY = "query "
_NONE = "none"
_ORIGIN = "origin of its record"
_VERSION = "version by seen()"


def _remarks(query: Query, identity: str, engine: Engine, hop: HopGuarantee) -> Iterator[str]:
    """What a query does not guarantee, with the fix."""
    if hop.weaker:
        why = hop.why
        if identity == _NONE:
            why = "its rows have neither seen() nor origin; after a crash an older row may replace a newer one, "
            why += "and the audit does not know how many records they hold"
        weaker = f"{hop.guarantee.capitalize()} is weaker than {hop.required}, which is required"
        yield f"query {query.name}: {why}. {weaker}: {hop.fix}."
    if identity != _NONE and (uncounted := engine.uncounted(query)) is not None:
        yield f"query {query.name}: the audit cannot check that each record is in its rows: {uncounted}."
    if identity == _VERSION and any(engine.shapes[name].unique for name in query.inputs):
        if len(query.inputs) > 1:
            yield f"query {query.name}: it reads several channels, and reads duplicates in them twice."
        elif query.watermark is None:
            yield f"query {query.name}: without watermark= it cannot recognize duplicates in its channel."


def _identity(columns: list[str]) -> str:
    if "seen" in columns:
        return _VERSION
    return _ORIGIN if "origin" in columns else _NONE


def _channels(config: Config) -> str:
    address = config.channels.address
    local = ", started here" if address in LOCALS else ""
    promise = config.with_services("local", "redis://local").bind().promise
    return f"{redact_address(address)}{local}: {promise.description}"


def _hops(description: Description, config: Config, guarantees: Mapping[str, HopGuarantee]) -> list[Hop]:
    """The hops. `guarantees`: that of each query."""
    required = description.delivery
    hops = []
    for spec in description.sources:
        source = make_source(spec, config, required)
        wrapped = source if spec.shed is None else Shedding(source, spec.shed)
        address = redact_address(config.source_address(spec))
        hops.append(_hop(address, kind_of(source), spec.into, of_source(wrapped, required)))
    for query in description.queries:
        hops += [_hop(name, f"{_QUERY}{query.name}", query.into, guarantees[query.name]) for name in query.inputs]
        named = (static for static in description.statics if static.name in query.statics)
        hops += [_static(static, f"query {query.name}") for static in named]
    for store in description.stores:
        by = "Spark" if store in description.lakes else "loader"
        hops.append(_hop(store.channel, by, redact_address(store.url), of_store(required)))
    hops += [_hop(page.channel, "feed", "browsers", of_page(required)) for page in description.pages]
    return hops


def _hop(start: str, by: str, end: str, hop: HopGuarantee) -> Hop:
    return Hop(start, by, end, hop.guarantee, hop.why, hop.required, hop.fix if hop.weaker else "")


def _static(static: Static, end: str) -> Hop:
    start = static.rows if isinstance(static.rows, str) else "a function" if callable(static.rows) else "the pipeline"
    again = "" if static.refresh is None else f" and every {static.refresh.total_seconds():g} s"
    return Hop(start, f"table {static.name}", end, "a copy", f"it is read at the start{again}")
