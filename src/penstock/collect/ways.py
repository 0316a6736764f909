"""From an address to the source that hears it: every way in, by the scheme of its address."""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.metadata import entry_points

from penstock.core.clock import duration
from penstock.core.contracts import Source
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, redact_address

WAYS = {
    "ws": "penstock.collect.websocket:WebSocketSource",
    "wss": "penstock.collect.websocket:WebSocketSource",
    "listen+ws": "penstock.collect.websocket_server:WebSocketServer",
    "sse+http": "penstock.collect.sse:SseSource",
    "sse+https": "penstock.collect.sse:SseSource",
    "poll+http": "penstock.collect.polling:PollingSource",
    "poll+https": "penstock.collect.polling:PollingSource",
    "listen+http": "penstock.collect.http:HttpSource",
    "listen+webhook": "penstock.collect.webhook:WebhookSource",
    "listen+tcp": "penstock.collect.tcp:TcpSource",
    "file": "penstock.collect.files:FilesSource",
    "stdin": "penstock.collect.stdin:StdinSource",
    # A run serves what it simulates over a WebSocket.
    "simulate": "penstock.collect.websocket:WebSocketSource",
}
"""Per scheme, what makes the source: `maker(address, name, **options)`. Imported when it is asked for."""

OUTSIDE = "penstock.sources"
"""The entry points by which other packages bring their own."""
_OF_ALL = ("into", "key", "name", "overlap", "overlap_by", "shed")
"""What a pipeline says of any source."""
_INNER = {"clock", "home", "shared"}
"""What nobody has to say."""


def source_at(address: str, name: str, options: Mapping[str, object] | None = None) -> Source:
    """The source at an address; Misconfigured when nobody knows its kind, or one of the options."""
    scheme, mark, _ = address.partition("://")
    maker = _maker(name, address, scheme.lower() if mark else "")
    return maker(address, name, **_fitting(name, maker, options or {}))


def takes(address: str, option: str) -> bool:
    """Whether a source at this address has such an option."""
    maker = _maker("", address, address.partition("://")[0].lower())
    return option in inspect.signature(maker).parameters


def kind_of(source: Source) -> str:
    """What people call it: the file in which it is written."""
    return type(source).__module__.rpartition(".")[2].replace("_", " ")


def _maker(name: str, address: str, scheme: str) -> Callable[..., Source]:
    if scheme in WAYS:
        module, _, attribute = WAYS[scheme].partition(":")
        made: Callable[..., Source] = getattr(importlib.import_module(module), attribute)
        return made
    for point in entry_points(group=OUTSIDE, name=scheme):
        loaded: Callable[..., Source] = point.load()
        return loaded
    known = sorted({*WAYS, *(point.name for point in entry_points(group=OUTSIDE))})
    others = f"an address begins with {', '.join(f'{one}://' for one in known)}"
    begins = re.match(r"[a-z+-]*", address.lower())
    said = begins[0] if begins else ""
    # Of a protocol alone it is not known in which of its ways it is meant.
    alike = " or ".join(f'"{one}://"' for one in known if one.endswith(f"+{said}"))
    fix = f"did you mean {alike}?" if alike else did_you_mean(said, known, others, '"{}://"')
    raise Misconfigured(f"source {name}", f"{redact_address(address)} is no address that is known here", fix)


def _fitting(name: str, maker: Callable[..., Source], options: Mapping[str, object]) -> dict[str, object]:
    parameters = dict(list(inspect.signature(maker).parameters.items())[2:])
    given: dict[str, object] = {}
    for option, value in options.items():
        if option not in parameters:
            known = ", ".join(sorted({*parameters, *_OF_ALL} - _INNER))
            fix = did_you_mean(option, [*parameters, *_OF_ALL], f"it knows {known}")
            raise Misconfigured(f"source {name}", f'"{option}" is not among its options', fix)
        if isinstance(value, str) and parameters[option].annotation is timedelta:
            try:
                value = duration(value)
            except ValueError as error:
                raise Misconfigured(f"source {name}, {option}", str(error)) from error
        given[option] = value
    return given
