"""The identity of an update in a JSON object. No I/O."""

from dataclasses import dataclass, field

import orjson

from penstock.core.errors import Refused
from penstock.core.record import Origin


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object that hold its identity: dotted paths into nested objects.

    An empty `sender` means a single sender, an empty `epoch` or `time` means none. Epoch and time may be absent; an
    absent or invalid time is 0, because it is not needed to detect a loss.
    """

    seq: str = "seq"
    sender: str = "sender"
    epoch: str = "epoch"
    time: str = "time"
    _paths: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        paths = tuple(tuple(path.split(".")) if path else () for path in (self.seq, self.sender, self.epoch, self.time))
        object.__setattr__(self, "_paths", paths)

    def read(self, payload: bytes) -> Origin:
        """Return the identity in the payload; raise Refused if there is none."""
        try:
            document = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise Refused("an update", f"it is not JSON: {error.msg}") from error
        if type(document) is not dict:
            raise Refused("an update", "it is JSON, but not an object")
        seq_at, sender_at, epoch_at, time_at = self._paths
        seq = _number(self.seq, _at(document, seq_at))
        sender = _at(document, sender_at) if sender_at else ""
        epoch = _at(document, epoch_at) if epoch_at else None
        time = _at(document, time_at) if time_at else None
        return Origin(
            sender if type(sender) is str else _name(self.sender, sender),
            0 if epoch is None else _number(self.epoch, epoch),
            seq,
            time if type(time) is int else 0,
        )


_BEYOND = 2**63


def _at(document: object, path: tuple[str, ...]) -> object:
    for name in path:
        if type(document) is not dict:
            return None
        document = document.get(name)
    return document


def _number(field_name: str, value: object) -> int:
    if type(value) is int and -_BEYOND <= value < _BEYOND:
        return value
    # Whole numbers beyond 64 bits come out of the parser as floats.
    if isinstance(value, int | float) and abs(value) >= _BEYOND:
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
