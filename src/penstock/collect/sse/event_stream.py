"""Server-sent events, without I/O: bytes in, events out.

As the HTML standard reads them, but for two things. Data stay the bytes that they are. And an id that a header could
not carry back is passed over, as one with NUL is: the events that follow are counted behind the id before.
"""

import re
from dataclasses import dataclass

MESSAGE = "message"
"""The type of an event that tells none."""
LONGEST_ID = 1_024
LONGEST_RETRY = 1 << 31
"""Milliseconds."""
FIRST_BYTES = 64 << 10
"""So much is kept of data that are too large."""

_BOM = b"\xef\xbb\xbf"
_NAME = 16
"""Bytes of a line beside its value: no field that means something has a longer name."""
_CONTROL = re.compile(rb"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Event:
    """`id` is the last one that was set, None before any was; `index` is 0 for the event that set it, then it counts.

    `size` is that of the data. Where it is beyond the limit, `data` are only their first bytes.
    """

    data: bytes
    type: str
    id: bytes | None
    index: int
    size: int


class EventStream:
    """The events of one connection. `last_id` is the id after which the other side was asked to go on.

    Nothing that comes makes it hold more than about `max_size` bytes, beside what is fed at once.
    """

    def __init__(self, max_size: int, last_id: bytes | None = None) -> None:
        self.retry: int | None = None
        """Milliseconds that the other side wants us to wait before we connect again."""
        self._max = max_size
        self._id, self._index = last_id, 0
        self._told_id: bytes | None = None
        self._head: bytes | None = b""
        self._after_return = False
        self._line = bytearray()
        self._beyond = 0
        self._reset()

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that are whole now."""
        if self._head is not None:
            chunk = self._head + chunk
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._head = chunk
                return []
            chunk, self._head = chunk.removeprefix(_BOM), None
        if not chunk:
            return []
        if self._after_return and chunk[0] == 0x0A:
            chunk = chunk[1:]
        # A line ends at a carriage return; whether a line feed belongs to it is seen later, maybe in the next chunk.
        self._after_return = chunk[-1:] == b"\r"
        if b"\r" in chunk:
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *ended, rest = chunk.split(b"\n")
        found = []
        for part in ended:
            self._keep(part)
            line, beyond = bytes(self._line), self._beyond
            self._line.clear()
            self._beyond = 0
            if line:
                self._field(line, beyond)
            elif (event := self._dispatch()) is not None:
                found.append(event)
        self._keep(rest)
        return found

    def _keep(self, part: bytes) -> None:
        room = max(self._max, 2 * LONGEST_ID) + _NAME - len(self._line)
        self._line += part[:room]
        self._beyond += max(0, len(part) - room)

    def _field(self, line: bytes, beyond: int) -> None:
        """`beyond`: so many bytes of the line were not kept."""
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                room = self._max - self._size
                self._data += (value + b"\n")[: max(0, room + 1)]
                self._size += len(value) + beyond + 1
            case b"event":
                self._type = value
            case b"id" if beyond == 0:
                value = value.strip(b" \t")
                if len(value) <= LONGEST_ID and not _CONTROL.search(value):
                    self._told_id = value
            case b"retry" if beyond == 0 and value.isdigit():
                self.retry = min(int(value.lstrip(b"0")[:20] or b"0"), LONGEST_RETRY)

    def _dispatch(self) -> Event | None:
        said, self._told_id = self._told_id, None
        data, size, kind = self._data, self._size - 1, self._type
        self._reset()
        sets = said is not None and (said or None) != self._id
        if sets:
            self._id, self._index = said or None, 0
        if size < 0:
            return None
        if not sets:
            self._index += 1
        # The last line feed ends the data; it is none of them.
        del data[size if size <= self._max else FIRST_BYTES :]
        type_ = kind.decode(errors="replace") if kind else MESSAGE
        return Event(bytes(data), type_, self._id, self._index, size)

    def _reset(self) -> None:
        self._data, self._size, self._type = bytearray(), 0, b""
