"""Numbered updates as others write them: the identity in a JSON object. No I/O."""

from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from penstock.core.clock import Micros
from penstock.core.errors import Refused


class Update(NamedTuple):
    """A number of a sender, in one of its lives; `time` where it tells when it was sent."""

    seq: int
    sender: str
    epoch: int = 0
    time: Micros | None = None


@dataclass(frozen=True)
class Fields:
    """Where in a JSON object its identity lies: dotted paths into nested objects.

    An empty `sender` means that there is one sender, an empty `epoch` or `time` that there is none. Epoch and time may
    be absent; a time that cannot be one is no time, for it is not needed to tell a loss.
    """

    seq: str = "seq"
    sender: str = "sender"
    epoch: str = "epoch"
    time: str = "time"
    _paths: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        paths = tuple(tuple(path.split(".")) if path else () for path in (self.seq, self.sender, self.epoch, self.time))
        object.__setattr__(self, "_paths", paths)

    def read(self, payload: bytes) -> Update:
        """The update that the payload tells; Refused with the reason when it tells none."""
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise Refused("an update", f"it is not JSON: {error.msg}") from error
        if type(document) is not dict:
            raise Refused("an update", "it is JSON, but not an object")
        seq_at, sender_at, epoch_at, time_at = self._paths
        seq = _at(document, seq_at)
        sender = _at(document, sender_at) if sender_at else ""
        epoch = _at(document, epoch_at) if epoch_at else None
        time = _at(document, time_at) if time_at else None
        return Update(
            seq if type(seq) is int and -_BEYOND <= seq < _BEYOND else _number(self.seq, seq),
            sender if type(sender) is str else _name(self.sender, sender),
            0 if epoch is None else _number(self.epoch, epoch),
            time if type(time) is int else None,
        )


_BEYOND = 2**63


def _at(document: object, path: tuple[str, ...]) -> object:
    for name in path:
        if type(document) is not dict:
            return None
        document = document.get(name)
    return document


def _number(field_name: str, value: object) -> int:
    if type(value) is int:
        if -_BEYOND <= value < _BEYOND:
            return value
        raise Refused("an update", f'"{field_name}" lies beyond 64 bits')
    if type(value) is float and abs(value) >= _BEYOND:
        # Whole numbers beyond 64 bits come out of the parser as this.
        raise Refused("an update", f'"{field_name}" lies beyond 64 bits')
    raise Refused("an update", _instead(field_name, value, "a whole number"))


def _name(field_name: str, value: object) -> str:
    if type(value) is int:
        return str(value)
    raise Refused("an update", _instead(field_name, value, "a name"))


_KINDS: dict[type, str] = {
    str: "text",
    int: "a number",
    float: "a fraction",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _instead(field_name: str, value: object, wanted: str) -> str:
    if value is None:
        return f'there is no "{field_name}"'
    return f'"{field_name}" is {_KINDS[type(value)]}, not {wanted}'
