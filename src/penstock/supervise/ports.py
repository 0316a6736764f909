"""Ports by name: the set one, else the one of the last run, else a free one."""

import random
import socket
from pathlib import Path

from penstock.core.errors import Misconfigured
from penstock.supervise.notes import read_note, write_note

HOST = "127.0.0.1"
# Below the ports that systems hand out to outgoing connections: one of those could sit on ours when we come back.
_RANGE = range(20_000, 32_000)


class Ports:
    """The ports of one state folder. Two names never get the same one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._given: dict[str, int] = {}

    def port(self, name: str, wanted: int | None = None, setting: str = "") -> int:
        """`wanted` if it is set, Misconfigured if it is taken; else the last port of this name; else a free one."""
        known = {key: port for key, port in read_note(self._file).items() if isinstance(port, int)}
        others = {port for key, port in self._given.items() if key != name}
        if wanted is not None:
            if wanted in others:
                raise _taken(wanted, setting or name)
            require_free(wanted, setting or name)
            port = wanted
        elif (last := known.get(name)) is not None and last not in others and _free(last):
            port = last
        else:
            port = _any_free(others | set(known.values()))
        self._given[name] = port
        if known.get(name) != port:
            write_note(self._file, {**known, name: port})
        return port


def require_free(port: int, setting: str) -> None:
    """Misconfigured when something listens at a port that is set."""
    if not _free(port):
        raise _taken(port, setting)


def _taken(port: int, setting: str) -> Misconfigured:
    way_out = f"stop what listens there, set another, or leave {setting} out to get a free one"
    return Misconfigured(setting, f"port {port} is taken", way_out)


def _free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: connections of the last run that linger are no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
        return True


def _any_free(taken: set[int]) -> int:
    for port in random.sample(_RANGE, len(_RANGE)):
        if port not in taken and _free(port):
            return port
    raise Misconfigured("ports", f"none of {_RANGE.start}–{_RANGE.stop - 1} is free", "set the ports yourself")
