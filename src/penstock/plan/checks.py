"""Whether a pipeline and the wiring of its environment fit together, found before anything starts."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from typing import Any

from penstock.channels.kafka import Kafka
from penstock.collect.listen import endpoint
from penstock.core.contracts import Channels, Source
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, redact_address
from penstock.pipeline.config import Config, simulated
from penstock.pipeline.description import ROWS, Description, SourceSpec
from penstock.pipeline.sources import made
from penstock.simulate.documents import check_options, kind_of

STORES = ("redis", "rediss", "delta")
_EVERYWHERE = {"0.0.0.0", "::"}


class Level(StrEnum):
    ERROR = "error"
    """It cannot start so, or is almost certainly not what is meant."""
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """What is wrong with a pipeline, or may be: the place, the problem, the fix."""

    level: Level
    place: str
    problem: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


def unconnected(description: Description) -> list[Finding]:
    """Channels that nothing fills, and sources whose channel nothing reads.

    Each alone is a warning: others may fill a channel, or read it. Both at once are an error: a name is wrong.
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
    return [*_unread(unread, read, level), *_unfilled(unfilled, readers, unread, level)]


def _unread(unread: Iterable[SourceSpec], unfilled: list[str], level: Level) -> Iterator[Finding]:
    for source in unread:
        fix = f'read it: name a parameter of a query "{source.into}", or store it: app.store("{source.into}", …)'
        if unfilled:
            fix = did_you_mean(source.into, unfilled, fix, 'into="{}"', cutoff=0)
        problem = f'it fills the channel "{source.into}", which no query and no store reads'
        yield Finding(level, f"source {source.name}", problem, fix)


def _unfilled(
    unfilled: Iterable[str], readers: Mapping[str, str], unread: list[SourceSpec], level: Level
) -> Iterator[Finding]:
    for name in unfilled:
        if name not in readers:
            problem = "it is declared, but nothing fills it and nothing reads it"
            yield Finding(Level.WARNING, f"channel {name}", problem, "remove it, or check how it is spelled elsewhere")
        elif unread:
            problem = f"{readers[name]} reads it, and no source fills it"
            yield Finding(level, f"channel {name}", problem, f'app.source(…, into="{name}")')
        else:
            problem = f"{readers[name]} reads it, and nothing in this pipeline fills it"
            fix = f'add app.source(…, into="{name}"), or fill it from outside: penstock produce --topic {name}'
            yield Finding(level, f"channel {name}", problem, fix)


_UNFORESEEN = {"pivot", "flatten", "fold", "lookup", "regression", "loess", "density", "quantile", "impute"}
"""Transforms whose columns cannot be read from the specification."""


def unknown_fields(spec: Mapping[str, Any], columns: Collection[str]) -> set[str]:
    """The fields that a Vega-Lite specification draws from the rows of its page, and that are not among the columns."""
    named: set[str] = set()
    made: set[str] = set()

    def visit(part: object) -> bool:
        """False when it cannot be known."""
        if isinstance(part, list):
            return all(map(visit, part))
        if not isinstance(part, Mapping):
            return True
        if "data" in part and part["data"] != {"name": ROWS}:
            return True
        if isinstance(field := part.get("field"), str):
            named.add(field)
        given = part.get("as")
        made.update([given] if isinstance(given, str) else given if isinstance(given, list) else ())
        return not _UNFORESEEN & part.keys() and all(map(visit, part.values()))

    return named - made - {*columns} if visit(spec) else set()


def check(description: Description, config: Config, environ: Mapping[str, str] | None = None) -> None:
    """Misconfigured when an address is none of ours or not for a pipeline, or a setting is about nobody.

    With `environ`, also when a secret is not there that a source needs.
    """
    names = [source.name for source in description.sources]
    for name in config.sources.model_extra or {}:
        if name.lower() not in {known.lower() for known in names}:
            fix = did_you_mean(name, names, f"its sources are {', '.join(names) or 'none'}")
            raise Misconfigured("[sources]", f'{description.name} has no source "{name}"', fix)
    sources = [made(source, config, description.delivery, environ) for source in description.sources]
    _apart(sources)
    for source in description.sources:
        url = config.address(source)
        if (simulation := simulated(url)) is not None:
            name, options = simulation
            kind_of(name, f"source {source.name}")
            check_options(options, f"source {source.name}")
    if config.channels.address.startswith("memory://"):
        raise Misconfigured(
            "[channels] address = memory://",
            "each tier of a pipeline is a process of its own, and sees nothing of the memory of another",
            "use kafka://, redis:// or file://",
        )
    channels = config.at("local", "redis://local").bind()
    _replayable(description, channels)
    if config.audit.engine == "spark" and not isinstance(channels, Kafka):
        raise Misconfigured(
            "[audit] engine", f"Spark audits Kafka, and the channels are at {channels.where}", "use auto or python"
        )
    for static in description.statics:
        if isinstance(static.rows, str) and not (path := static.folder / static.rows).is_file():
            fix = f"put it beside the pipeline: {path.absolute()}"
            raise Misconfigured(f"table {static.name}", f"there is no file {static.rows}", fix)
    for store in description.stores:
        _known(f"store {store.url}", store.url, STORES)
        if store.url.startswith("delta:") and store.ttl is not None:
            raise Misconfigured(
                f"store {store.url}", "a lake keeps everything: it has no time to live", "leave ttl out"
            )


def _apart(sources: Iterable[Source]) -> None:
    """Each that listens has a port of its own."""
    urls = {source.name: str(getattr(source, "url", "")) for source in sources}
    doors = [(name, endpoint(url, name)) for name, url in urls.items() if url.startswith("listen+")]
    for (other, there), (name, at) in combinations(doors, 2):
        if at.port == there.port and (at.host == there.host or not {at.host, there.host}.isdisjoint(_EVERYWHERE)):
            why = f"it listens at {at.authority}, where source {other} listens, too"
            raise Misconfigured(f"source {name}", why, "give each source a port of its own")


def _replayable(description: Description, channels: Channels) -> None:
    """Every part of a pipeline goes on where it was by reading again: channels have to keep what they were given."""
    if not channels.promise.replay:
        reader = f"query {description.queries[0].name}" if description.queries else "the audit"
        raise Misconfigured(
            f"[channels] address = {channels.where}",
            f"{reader} has to read records again after a crash, and they cannot be: {channels.promise.description}",
            "use kafka://, redis:// or file://",
        )


def _known(place: str, url: str, schemes: tuple[str, ...]) -> None:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in schemes:
        ways = ", ".join(f'"{known}://…"' for known in schemes)
        raise Misconfigured(place, f"{url} is no address that is known here", f"write {ways}")
