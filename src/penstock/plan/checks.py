"""Checks that a pipeline and its configuration fit together, before anything starts."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any

from penstock.channels.kafka import Kafka
from penstock.collect.listen import endpoint
from penstock.core.contracts import Channels, Source
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, redact_address
from penstock.pipeline.config import Config, parse_simulation
from penstock.pipeline.description import ROWS, Description
from penstock.pipeline.sources import make_source
from penstock.simulate.documents import check_options, kind_of

STORES = ("redis", "rediss", "delta")
_EVERYWHERE = {"0.0.0.0", "::"}


class Level(StrEnum):
    ERROR = "error"
    """The pipeline cannot start, or is almost certainly wrong."""
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """An error or a warning: the place, the problem, the fix."""

    level: Level
    place: str
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


def unconnected(description: Description) -> list[Finding]:
    """Find channels that nothing fills, and sources whose channel nothing reads.

    Each is a warning, because other programs may fill or read a channel. Both together are an error: a name is wrong.
    """
    filled = {source.into for source in description.sources} | {query.into for query in description.queries}
    readers = {name: f"query {query.name}" for query in reversed(description.queries) for name in query.inputs}
    readers |= {
        store.channel: f"store {redact_address(store.url)}"
        for store in description.stores
        if store.channel not in readers
    }
    unfilled = [name for name in description.channels if name not in filled]
    read = [name for name in unfilled if name in readers]
    unread = [source for source in description.sources if source.into not in readers]
    level = Level.ERROR if read and unread else Level.WARNING
    found = []
    for source in unread:
        fix = f'read it with a query (parameter "{source.into}"), or store it: app.store("{source.into}", …)'
        if read:
            fix = did_you_mean(source.into, read, fix, 'into="{}"', cutoff=0)
        problem = f'it fills the channel "{source.into}", which no query and no store reads'
        found.append(Finding(level, f"source {source.name}", problem, fix))
    for name in unfilled:
        severity = level
        if name not in readers:
            severity, problem = Level.WARNING, "it is declared, but nothing fills it and nothing reads it"
            fix = "remove it, or check how it is spelled elsewhere"
        elif unread:
            problem = f"{readers[name]} reads it, and no source fills it"
            fix = f'app.source(…, into="{name}")'
        else:
            problem = f"{readers[name]} reads it, and nothing in this pipeline fills it"
            fix = f'add app.source(…, into="{name}"), or fill it from outside: penstock produce --topic {name}'
        found.append(Finding(severity, f"channel {name}", problem, fix))
    return found


_UNKNOWN_COLUMNS = {"pivot", "flatten", "fold", "lookup", "regression", "loess", "density", "quantile", "impute"}
"""Transforms whose output columns are not in the specification."""


def unknown_fields(spec: Mapping[str, Any], columns: Collection[str]) -> set[str]:
    """The fields of a Vega-Lite specification that are not columns of its rows."""
    named: set[str] = set()
    computed: set[str] = set()

    def visit(part: object) -> bool:
        """False if the fields are unknown."""
        if isinstance(part, list):
            return all(map(visit, part))
        if not isinstance(part, Mapping):
            return True
        if "data" in part and part["data"] != {"name": ROWS}:
            return True
        if isinstance(field := part.get("field"), str):
            named.add(field)
        output = part.get("as")
        computed.update([output] if isinstance(output, str) else output if isinstance(output, list) else ())
        return not _UNKNOWN_COLUMNS & part.keys() and all(map(visit, part.values()))

    return named - computed - {*columns} if visit(spec) else set()


def check(description: Description, config: Config, environ: Mapping[str, str] | None = None) -> None:
    """Raise Misconfigured if an address or a setting is wrong.

    With `environ`, also if a secret of a source is missing.
    """
    names = [source.name for source in description.sources]
    for name in config.sources.model_extra or {}:
        if name.lower() not in {one.lower() for one in names}:
            fix = did_you_mean(name, names, f"its sources are {', '.join(names) or 'none'}")
            raise Misconfigured("[sources]", f'{description.name} has no source "{name}"', fix)
    sources = [make_source(source, config, description.delivery, environ) for source in description.sources]
    _check_ports(sources)
    for source in description.sources:
        url = config.source_address(source)
        if (simulation := parse_simulation(url)) is not None:
            name, options = simulation
            kind_of(name, f"source {source.name}")
            check_options(options, f"source {source.name}")
    if config.channels.address.startswith("memory://"):
        raise Misconfigured(
            "[channels] address = memory://",
            "the tiers of a pipeline are processes, which do not share memory",
            "use kafka://, redis:// or file://",
        )
    channels = config.with_services("local", "redis://local").bind()
    _check_replay(description, channels)
    if config.audit.engine == "spark" and not isinstance(channels, Kafka):
        raise Misconfigured(
            "[audit] engine", f"Spark audits only Kafka, and the channels are at {channels.where}", "use auto or python"
        )
    for static in description.statics:
        if isinstance(static.rows, str) and not (path := static.folder / static.rows).is_file():
            fix = f"put it beside the pipeline: {path.absolute()}"
            raise Misconfigured(f"table {static.name}", f"there is no file {static.rows}", fix)
    for store in description.stores:
        scheme, separator, _ = store.url.partition("://")
        if not separator or scheme not in STORES:
            examples = ", ".join(f'"{one}://…"' for one in STORES)
            raise Misconfigured(f"store {store.url}", f"{store.url} is not an address of a store", f"write {examples}")
        if store.url.startswith("delta:") and store.ttl is not None:
            raise Misconfigured(f"store {store.url}", "a lake has no ttl, because it keeps all records", "remove ttl=")


def _check_ports(sources: Iterable[Source]) -> None:
    """Each listening source needs its own port."""
    urls = {source.name: str(getattr(source, "url", "")) for source in sources}
    listeners = [(name, endpoint(url, name)) for name, url in urls.items() if url.startswith("listen+")]
    for (other, there), (name, at) in combinations(listeners, 2):
        if at.port == there.port and (at.host == there.host or not {at.host, there.host}.isdisjoint(_EVERYWHERE)):
            problem = f"it listens on {at.authority}, as source {other} does"
            raise Misconfigured(f"source {name}", problem, "give each source its own port")


def _check_replay(description: Description, channels: Channels) -> None:
    """After a crash every part reads again from its last offsets, so channels have to keep their records."""
    if not channels.promise.replay:
        reader = f"query {description.queries[0].name}" if description.queries else "the audit"
        raise Misconfigured(
            f"[channels] address = {channels.where}",
            f"{reader} has to read records again after a crash, which is not possible: {channels.promise.description}",
            "use kafka://, redis:// or file://",
        )
