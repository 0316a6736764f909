"""Whether a pipeline and the wiring of its environment fit together, found before anything starts."""

import difflib
from collections.abc import Iterable, Mapping
from itertools import combinations

from penstock.channels.kafka import Kafka
from penstock.collect.door import door
from penstock.contracts import Channels, Source
from penstock.errors import Misconfigured
from penstock.pipeline.description import Description
from penstock.pipeline.sources import made
from penstock.pipeline.wiring import Wiring, simulated
from penstock.simulate.kinds import check_options, kind_of

STORES = ("redis", "rediss", "delta")
_EVERYWHERE = {"0.0.0.0", "::"}


def check(description: Description, wiring: Wiring, environ: Mapping[str, str] | None = None) -> None:
    """Misconfigured when an address is none of ours or not for a pipeline, or a setting is about nobody.

    With `environ`, also when a secret is not there that a source needs.
    """
    names = [source.name for source in description.sources]
    for name in wiring.sources.model_extra or {}:
        if name.lower() not in {known.lower() for known in names}:
            close = difflib.get_close_matches(name, names, n=1)
            way_out = f'did you mean "{close[0]}"?' if close else f"its sources are {', '.join(names) or 'none'}"
            raise Misconfigured("[sources]", f'{description.name} has no source "{name}"', way_out)
    sources = [made(source, wiring, description.delivery, environ) for source in description.sources]
    _apart(sources)
    for source in description.sources:
        url = wiring.address(source)
        if (simulation := simulated(url)) is not None:
            name, options = simulation
            kind_of(name, f"source {source.name}")
            check_options(options, f"source {source.name}")
    if wiring.channels.address.startswith("memory://"):
        raise Misconfigured(
            "[channels] address = memory://",
            "each tier of a pipeline is a process of its own, and sees nothing of the memory of another",
            "use kafka://, redis:// or file://",
        )
    channels = wiring.at("local", "redis://local").bind()
    _replayable(description, channels)
    if wiring.audit.engine == "spark" and not isinstance(channels, Kafka):
        raise Misconfigured(
            "[audit] engine", f"Spark audits Kafka, and the channels are at {channels.where}", "use auto or python"
        )
    for static in description.statics:
        if isinstance(static.rows, str) and not (path := static.folder / static.rows).is_file():
            way_out = f"put it beside the pipeline: {path.absolute()}"
            raise Misconfigured(f"table {static.name}", f"there is no file {static.rows}", way_out)
    for store in description.stores:
        _known(f"store {store.url}", store.url, STORES)
        if store.url.startswith("delta:") and store.ttl is not None:
            raise Misconfigured(
                f"store {store.url}", "a lake keeps everything: it has no time to live", "leave ttl out"
            )


def _apart(sources: Iterable[Source]) -> None:
    """Each that listens has a port of its own."""
    urls = {source.name: str(getattr(source, "url", "")) for source in sources}
    doors = [(name, door(url, name)) for name, url in urls.items() if url.startswith("listen+")]
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
            f"{reader} has to read records again after a crash, and they cannot be: {channels.promise.words}",
            "use kafka://, redis:// or file://",
        )


def _known(place: str, url: str, schemes: tuple[str, ...]) -> None:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in schemes:
        ways = ", ".join(f'"{known}://…"' for known in schemes)
        raise Misconfigured(place, f"{url} is no address that is known here", f"write {ways}")
