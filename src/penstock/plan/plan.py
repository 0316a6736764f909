"""What a pipeline will do, checked and explained before anything starts."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.analysis.checkpoints.doctor import Fit
from penstock.analysis.checkpoints.rescale import spread
from penstock.analysis.engine import Engine
from penstock.analysis.launch import examined
from penstock.analysis.modes import Need, Verdict, guessed, need
from penstock.analysis.query import Mode, Query, Static
from penstock.analysis.session import wait_for_slots
from penstock.analysis.state.keyed import keeps_state, unnumbered
from penstock.collect.registry import kind_of
from penstock.collect.shedding import shedding
from penstock.core.errors import Misconfigured, raise_all
from penstock.core.text import did_you_mean, redact_address
from penstock.pipeline.config import LOCAL, LOCALS, Config
from penstock.pipeline.description import Description
from penstock.pipeline.sources import made
from penstock.plan.checks import Finding, Level, unconnected, unknown_fields
from penstock.plan.delivery import Given, of_page, of_query, of_source, of_store


@dataclass(frozen=True)
class Hop:
    """One step of a record: from where, by what, to where, and what that promises."""

    start: str
    by: str
    end: str
    guarantee: str
    why: str
    wanted: str = ""
    """The delivery that the pipeline asks for; empty where nothing flows."""
    fix: str = ""
    """Where the guarantee is weaker than that: how there would be more."""


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
    """Its class: jvm, arrow or row."""
    price: str
    """What that means for each record."""
    checkpoint: str
    """Whether it fits the one that it has: what the checkpoint doctor says, as far as files tell."""


@dataclass(frozen=True)
class Plan:
    pipeline: str
    channels: str
    """Where they lie, and what that promises."""
    hops: tuple[Hop, ...]
    queries: tuple[QueryPlan, ...]
    remarks: tuple[str, ...]
    slots: Need
    findings: tuple[Finding, ...] = ()
    """What is wrong, or may be."""

    @property
    def wrong(self) -> bool:
        return any(finding.level is Level.ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def slots_needed(
    description: Description, config: Config, there: Mapping[str, int], real_time: Mapping[str, int] | None = None
) -> Need:
    """What the queries need, by the partitions that channels have, or should have as long as nobody knows.

    `real_time`: those that run so, as `standing_in` tells; the worst is assumed where it is not known.
    """
    partitions = {name: there.get(name, channel.partitions) for name, channel in description.channels.items()}
    sifted = [*(channel.name for channel in description.validated), *(store.channel for store in description.lakes)]
    if real_time is None:
        real_time = guessed(description.queries, config.spark.real_time_queries, partitions)
    kept = {query.name: spread(f"{config.checkpoints}/{query.name}") for query in description.queries}
    settled = {name: number for name, number in kept.items() if number is not None}
    return need(description.queries, real_time, partitions, sifted, config.spark.shuffle_partitions, settled)


def standing_in(
    description: Description, engine: Engine, verdicts: Mapping[str, Verdict] | None = None
) -> dict[str, int]:
    """The queries that run in real time, and how often each of them shuffles."""
    found = engine.verdicts(description.queries) if verdicts is None else verdicts
    in_real_time = [query for query in description.queries if found[query.name].mode is Mode.REAL_TIME]
    return {query.name: engine.shuffles(query) for query in in_real_time}


def plan(description: Description, config: Config, engine: Engine, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Analyse every query with Spark and say what follows; Misconfigured when queries cannot work: all of them.

    `say` is told how far it is.
    """
    _analysed(description, engine, say)
    if description.queries:
        say("trying which queries can run in real time")
    verdicts = engine.verdicts(description.queries)
    queries: list[QueryPlan] = []
    findings = [*unconnected(description), *_charts(description, engine)]
    remarks: list[str] = []
    given: dict[str, Given] = {}
    for query in description.queries:
        identity = _identity(engine.columns(query))
        result = engine.over_nothing(query)
        given[query.name] = of_query(
            identity != _NONE,
            engine.gives_up(query),
            description.delivery,
            keyed=identity == _ORIGIN and keeps_state(result),
            unnumbered=unnumbered(result) if identity == _ORIGIN else None,
        )
        remarks += _remarks(query, identity, engine, given[query.name])
        verdict, cost, diagnosis = verdicts[query.name], engine.cost(query), examined(engine, query)
        if diagnosis.fit is Fit.REFUSED:
            findings.append(Finding(Level.ERROR, diagnosis.place, diagnosis.problem, diagnosis.fix))
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
    slots = slots_needed(description, config, {}, standing_in(description, engine, verdicts))
    # Of our own Spark we make as large a one as is needed.
    if config.spark.master != LOCAL and (
        remark := slots.check(wait_for_slots(engine.spark, slots.least), config.spark.master)
    ):
        remarks.append(remark)
    hops = tuple(_hops(description, config, given))
    filled = {source.into for source in description.sources}
    remarks += [
        f"{hop.start}: {hop.guarantee} is weaker than {hop.wanted}, which is asked for; {hop.fix}."
        for hop in hops
        if hop.fix and hop.end in filled and not hop.by.startswith(_QUERY)
    ]
    return Plan(description.name, _channels(config), hops, tuple(queries), tuple(remarks), slots, tuple(findings))


def _analysed(description: Description, engine: Engine, say: Callable[[str], None]) -> None:
    """Ask Spark for the columns of each channel and query; raise what it has against any of them."""
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
    """Charts that name a column that their rows do not have: they would stay empty."""
    results = {query.into: query for query in description.queries}
    for page in description.pages:
        query = results.get(page.channel)
        rows = engine.typed(page.channel) if query is None else engine.over_nothing(query)
        # The page makes columns of the fields of a struct: window_start.
        columns = {
            f"{one.name}_{inner}" if inner else one.name
            for one in rows.schema
            for inner in getattr(one.dataType, "names", None) or ("",)
        }
        for name in sorted(unknown_fields(page.spec() or {}, columns)):
            problem = f'its chart names "{name}", which is not a column of {page.channel}'
            fix = did_you_mean(name, columns, f"the columns are {', '.join(sorted(columns))}")
            yield Finding(Level.WARNING, f"page {page.title}", problem, fix)


_QUERY = "query "
_NONE = "none"
_ORIGIN = "origin of its record"
_VERSION = "version by seen()"


def _remarks(query: Query, identity: str, engine: Engine, given: Given) -> Iterator[str]:
    """What a query leaves open, and the way out."""
    if identity == _NONE:
        if given.weaker:
            yield (
                f"query {query.name}: its rows carry neither seen() nor origin; after a crash an older row may win, "
                "and the audit cannot tell how many records they hold. "
                f"{given.guarantee.capitalize()} is weaker than {given.wanted}, which is asked for: {given.fix}."
            )
    else:
        if given.weaker:
            yield (
                f"query {query.name}: {given.why}. "
                f"{given.guarantee.capitalize()} is weaker than {given.wanted}, which is asked for: {given.fix}."
            )
        if (why := engine.uncounted(query)) is not None:
            yield f"query {query.name}: the audit cannot check that each record is in its rows: {why}."
    if identity == _VERSION and any(engine.shapes[name].unique for name in query.inputs):
        if len(query.inputs) > 1:
            yield f"query {query.name}: it reads several channels; what these hold twice comes to it twice."
        elif query.watermark is None:
            yield f"query {query.name}: without watermark= it cannot tell what its channel holds twice."


def _identity(columns: list[str]) -> str:
    if "seen" in columns:
        return _VERSION
    return _ORIGIN if "origin" in columns else _NONE


def _channels(config: Config) -> str:
    address = config.channels.address
    local = ", started here" if address in LOCALS else ""
    return f"{redact_address(address)}{local}: {config.at('local', 'redis://local').bind().promise.description}"


def _hops(description: Description, config: Config, given: Mapping[str, Given]) -> list[Hop]:
    """`given`: what each query gives."""
    wanted = description.delivery
    hops = []
    for spec in description.sources:
        source = made(spec, config, wanted)
        told = source if spec.shed is None else shedding(source, spec.shed)
        hops.append(_hop(redact_address(config.address(spec)), kind_of(source), spec.into, of_source(told, wanted)))
    for query in description.queries:
        hops += [_hop(name, f"{_QUERY}{query.name}", query.into, given[query.name]) for name in query.inputs]
        named = (static for static in description.statics if static.name in query.statics)
        hops += [_static(static, f"query {query.name}") for static in named]
    hops += [
        _hop(
            store.channel,
            "Spark" if store in description.lakes else "loader",
            redact_address(store.url),
            of_store(wanted),
        )
        for store in description.stores
    ]
    hops += [_hop(page.channel, "feed", "browsers", of_page(wanted)) for page in description.pages]
    return hops


def _hop(start: str, by: str, end: str, given: Given) -> Hop:
    return Hop(start, by, end, given.guarantee, given.why, given.wanted, given.fix if given.weaker else "")


def _static(static: Static, end: str) -> Hop:
    start = static.rows if isinstance(static.rows, str) else "a function" if callable(static.rows) else "the pipeline"
    again = "" if static.refresh is None else f", and again every {static.refresh.total_seconds():g} s"
    return Hop(start, f"table {static.name}", end, "as it stands", f"it is read at the start{again}")
