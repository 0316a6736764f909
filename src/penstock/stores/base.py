"""What all stores share."""

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
        """How long entries may gather before they are written together."""

    def open(self) -> Store: ...


def ahead_of(stands: Offsets, entries: Sequence[Entry]) -> list[Entry]:
    """The entries that a store standing there has not applied."""
    return [entry for entry in entries if entry.offset >= stands.get(entry.partition, 0)]


def furthest(stands: Offsets, positions: Offsets) -> dict[int, int]:
    """Positions never go back."""
    return {**stands, **{partition: max(offset, stands.get(partition, 0)) for partition, offset in positions.items()}}


def version_of(headers: Headers) -> int | None:
    """The version of a result row; None when it has none, or none of 64 bits."""
    told = next((value for name, value in headers if name == "version"), None)
    try:
        version = None if told is None else int(told)
    except ValueError:
        return None
    return version if version is not None and -(2**63) <= version < 2**63 else None


def require_kept(who: str, known: Offsets, stands: Offsets) -> None:
    """Raise Unavailable when a store forgot what it had acknowledged: it must be filled again from where it stands."""
    for partition, offset in known.items():
        if stands.get(partition, 0) < offset:
            raise Unavailable(who, f"it went back from {offset} to {stands.get(partition, 0)} in partition {partition}")


def require_topic(who: str, channel: str, remembered: str | None, topic_id: str, fix: str) -> None:
    """Raise Misconfigured when a store was filled from another topic that had the same name."""
    if topic_id and remembered and remembered != topic_id:
        raise Misconfigured(
            who, f"it was filled from another topic named {channel} ({remembered}, now {topic_id})", fix
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A row as a store holds it; None when it is deleted. Key and version are None where the store keeps none."""

    row: bytes | None
    key: bytes | None = None
    version: int | None = None


class Contents(Protocol):
    """A store that can be read back, by its description: one that is not there is not made by looking."""

    def stands(self) -> Offsets:
        """How far it was filled; nowhere when it is not there."""

    def rows(self) -> Iterator[Stored]:
        """Every row that it holds: of a live table the newest of each key, of a lake all, in the channel's order."""
