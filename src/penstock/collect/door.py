"""Where a source listens: the address of its door, and who may come through it."""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.core.errors import Misconfigured
from penstock.core.record import LONGEST_SENDER
from penstock.web.server import authority, listen

PATIENCE = 30.0
"""Seconds after which the kernel drops a peer that takes nothing of what is sent to it."""


@dataclass(frozen=True)
class Door:
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        return authority(self.host, self.port)

    @contextmanager
    def opened(self, name: str, shared: bool = False) -> Iterator[socket.socket]:
        """A socket that listens here; Misconfigured when the address is not to be had.

        `shared`: others that say so, too, may listen here at the same time; each connection goes to one of them.
        """
        with listen(f"source {name},", self.host, self.port, PATIENCE, shared) as listener:
            yield listener


def door(address: str, name: str, path: bool = True) -> Door:
    """Of `listen+tcp://host:port/path`; Misconfigured when it tells no host or no port.

    `path`: whether it may have one.
    """
    fix = f"write {address.partition('://')[0]}://host:port{'/path' if path else ''}, such as 127.0.0.1:8700"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise Misconfigured(f"source {name}", str(error), fix) from error
    if not host or not port:
        raise Misconfigured(f"source {name}", f"its address tells no {'port' if host else 'host'}", fix)
    if parts.username is not None or parts.query or parts.fragment or (parts.path.strip("/") and not path):
        raise Misconfigured(f"source {name}", "its address tells more than where to listen", fix)
    return Door(host, port, parts.path or "/")


def origins_of(given: Sequence[str] | str) -> tuple[str, ...]:
    """Sites whose pages may send: a list, or a text with commas or spaces between them."""
    return tuple(given.replace(",", " ").split() if isinstance(given, str) else given)


def why_no_sender(sender: str, source: str) -> str | None:
    """What is wrong with the name by which a sender calls itself; None if nothing is."""
    if not 0 < len(sender) <= LONGEST_SENDER:
        return f"a sender's name has 1 to {LONGEST_SENDER} characters"
    if not sender.isprintable():
        return "a sender's name has no line feeds, escape codes or the like"
    if sender == source:
        return f'"{source}" is the name of this source itself'
    return None
