"""Finds the source of an address by its scheme, and the base class of sources that wrap another source."""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

from penstock.core.clock import duration
from penstock.core.contracts import Guarantee, Source
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, redact_address

SCHEMES = {
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
    # `penstock run` serves simulated records over a WebSocket.
    "simulate": "penstock.collect.websocket:WebSocketSource",
}
"""By scheme: the factory, called with `(address, name, **options)`. Imported when it is needed."""

ENTRY_POINTS = "penstock.sources"
"""The group of entry points with which other packages add schemes."""
_COMMON = ("into", "key", "name", "overlap", "overlap_by", "shed")
"""Options of every source, handled by the pipeline."""
_INTERNAL = {"clock", "context", "shared"}
"""Parameters that users do not set."""
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")
_VALUE = re.compile(r"[!-~]([\t -~]{0,8190}[!-~])?|")
"""Of HTTP headers."""


@dataclass(frozen=True)
class SourceWrapper:
    """Base class: has the name, the guarantee and the description of the source that it wraps."""

    source: Source

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def guarantee(self) -> Guarantee:
        return self.source.guarantee

    @property
    def description(self) -> str:
        return self.source.description

    @property
    def numbered(self) -> object:
        return getattr(self.source, "numbered", None)


def source_at(address: str, name: str, options: Mapping[str, object] | None = None) -> Source:
    """The source at an address. Raises Misconfigured for an unknown scheme or option."""
    scheme, separator, _ = address.partition("://")
    factory = _factory(name, address, scheme.lower() if separator else "")
    return factory(address, name, **_options(name, factory, options or {}))


def has_option(address: str, option: str) -> bool:
    """Whether the source at this address has an option."""
    factory = _factory("", address, address.partition("://")[0].lower())
    return option in inspect.signature(factory).parameters


def check_positive(source: Any, *options: str) -> None:
    """Raise Misconfigured if one of these options, integers or durations, is not more than 0."""
    types = {field.name: field.type for field in fields(source)}
    for option in options:
        value = getattr(source, option)
        if types[option] in (timedelta, "timedelta"):
            valid, fix = isinstance(value, timedelta) and value > timedelta(0), 'write it like "1 s"'
        else:
            valid, fix = type(value) is int and value > 0, "set it to 1 or more"
        if not valid:
            problem = f"{str(value) if isinstance(value, timedelta) else repr(value)} is not a positive number"
            raise Misconfigured(f"source {source.name}, {option}", problem, fix)


def check_headers(name: str, headers: Mapping[str, str]) -> None:
    """Raise Misconfigured if an HTTP header of a source is invalid."""
    for header, value in headers.items():
        if not _NAME.fullmatch(header) or not isinstance(value, str) or not _VALUE.fullmatch(value):
            # Do not show the value: it may be a secret.
            fix = "use a name without spaces and colons, and an ASCII value without line feeds"
            raise Misconfigured(f"source {name}, headers", f"{header!r} is invalid", fix)


def kind_of(source: Source) -> str:
    """The kind of a source for people: the name of its module."""
    return type(source).__module__.rpartition(".")[2].replace("_", " ")


def _factory(name: str, address: str, scheme: str) -> Callable[..., Source]:
    if scheme in SCHEMES:
        module, _, attribute = SCHEMES[scheme].partition(":")
        built_in: Callable[..., Source] = getattr(importlib.import_module(module), attribute)
        return built_in
    for point in entry_points(group=ENTRY_POINTS, name=scheme):
        loaded: Callable[..., Source] = point.load()
        return loaded
    names = sorted({*SCHEMES, *(point.name for point in entry_points(group=ENTRY_POINTS))})
    default = f"use one of {', '.join(f'{one}://' for one in names)}"
    match = re.match(r"[a-z+-]*", address.lower())
    start = match[0] if match else ""
    # "http" alone can mean several schemes: "listen+http", "poll+http".
    similar = " or ".join(f'"{one}://"' for one in names if one.endswith(f"+{start}"))
    fix = f"did you mean {similar}?" if similar else did_you_mean(start, names, default, '"{}://"')
    raise Misconfigured(f"source {name}", f"the scheme of {redact_address(address)} is unknown", fix)


def _options(name: str, factory: Callable[..., Source], options: Mapping[str, object]) -> dict[str, object]:
    parameters = dict(list(inspect.signature(factory).parameters.items())[2:])
    parsed: dict[str, object] = {}
    for option, value in options.items():
        if option not in parameters:
            names = ", ".join(sorted({*parameters, *_COMMON} - _INTERNAL))
            fix = did_you_mean(option, [*parameters, *_COMMON], f"use one of {names}")
            raise Misconfigured(f"source {name}", f'unknown option "{option}"', fix)
        if isinstance(value, str) and parameters[option].annotation is timedelta:
            try:
                value = duration(value)
            except ValueError as error:
                raise Misconfigured(f"source {name}, {option}", str(error)) from error
        parsed[option] = value
    return parsed
