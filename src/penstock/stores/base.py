"""The common parts of all stores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from penstock.core.contracts import Entry, Offsets, Store
from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.record import Headers


class Loadable(Protocol):
    """The description of a store that a loader can fill."""

    @property
    def every(self) -> timedelta:
        """How long entries are collected before they are written together."""

    def open(self) -> Store: ...


def ahead_of(stands: Offsets, entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries after the offsets of a store."""
    return [entry for entry in entries if entry.offset >= stands.get(entry.partition, 0)]


def furthest(stands: Offsets, positions: Offsets) -> dict[int, int]:
    """Return the higher of both offsets for each partition."""
    return {**stands, **{partition: max(offset, stands.get(partition, 0)) for partition, offset in positions.items()}}


def version_of(headers: Headers) -> int | None:
    """Return the version of a result row; None if there is none of 64 bits."""
    value = next((value for name, value in headers if name == "version"), None)
    try:
        version = None if value is None else int(value)
    except ValueError:
        return None
    return version if version is not None and -(2**63) <= version < 2**63 else None


def require_kept(who: str, acknowledged: Offsets, stands: Offsets) -> None:
    """Raise Unavailable if a store lost rows that it had acknowledged: it must be filled again from its offsets."""
    for partition, offset in acknowledged.items():
        if stands.get(partition, 0) < offset:
            raise Unavailable(who, f"it went back from {offset} to {stands.get(partition, 0)} in partition {partition}")


def require_topic(who: str, channel: str, remembered: str | None, topic_id: str, fix: str) -> None:
    """Raise Misconfigured if a store was filled from another topic with the same name."""
    if topic_id and remembered and remembered != topic_id:
        raise Misconfigured(
            who, f"it was filled from another topic named {channel} ({remembered}, now {topic_id})", fix
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A row of a store; None if it is deleted. Key and version are None if the store does not keep them."""

    row: bytes | None
    key: bytes | None = None
    version: int | None = None


class Contents(Protocol):
    """A store whose rows can be read. Reading does not create a store."""

    def stands(self) -> Offsets:
        """Return the offsets up to which it was filled; empty if it does not exist."""

    def rows(self) -> Iterator[Stored]:
        """Yield its rows: of a live table the newest of each key, of a lake all, in the order of the channel."""
