"""A member of a group at a console: says what it is given and loses, and commits what is done."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from penstock.core.clock import Clock
from penstock.core.contracts import Channels, Entry, Member, Place
from penstock.core.errors import Unavailable
from penstock.core.text import printable

_EVERY = 1.0
"""Seconds between two commits; and one whenever a partition goes."""


class Membership:
    """Reads as a member. What one call of `read` gave is done when the next one comes, and may be committed then."""

    def __init__(self, say: Callable[[str], None], clock: Clock) -> None:
        self._say, self._clock = say, clock
        self._member: Member | None = None
        self._new: set[Place] = set()
        self._done = True
        self._open = False
        self._committed = clock.elapsed()

    @contextmanager
    def joined(
        self, channels: Channels, group: str, names: Sequence[str], *, beginning: bool
    ) -> Iterator["Membership"]:
        """A member for as long as the body runs. What was read last is done, and committed, only if that ends well."""
        with channels.join(group, names, self, beginning=beginning) as self._member:
            try:
                yield self
            except BaseException:
                self._say = _nothing  # What ended it is told by others.
                raise
            self._settle()

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        assert self._member is not None
        self._settle()
        if self._clock.elapsed() - self._committed >= _EVERY:
            self._commit()
        entries = self._member.read(most, wait)
        self._done = not entries
        if self._new:
            self._tell_given(entries)
        return entries

    # --- what the group says, from within `read`

    def given(self, places: Sequence[Place]) -> Mapping[Place, int]:
        self._new |= set(places)
        return {}

    def taken(self, places: Sequence[Place]) -> None:
        self._commit()
        self._gone("gave back", places)

    def lost(self, places: Sequence[Place]) -> None:
        self._gone("lost", places)

    # ---

    def _settle(self) -> None:
        """Whoever asks for more has dealt with what it got."""
        self._open = self._open or not self._done
        self._done = True

    def _commit(self) -> None:
        if self._member is None or not self._open or not self._done:
            return
        self._committed = self._clock.elapsed()
        try:
            self._member.commit()
            self._open = False
        except Unavailable as error:
            self._say(f"not committed, and so perhaps printed again by others: {error}")

    def _tell_given(self, entries: Sequence[Entry]) -> None:
        assert self._member is not None
        start = {place: offset for place, offset in self._member.held().items() if place in self._new}
        for entry in reversed(entries):
            if (place := (entry.channel, entry.partition)) in start:
                start[place] = entry.offset
        self._new.clear()
        if start:
            places = sorted(start)
            self._say(f"given {_listed(places)} from {', '.join(str(start[place]) for place in places)}")

    def _gone(self, what: str, places: Sequence[Place]) -> None:
        # What came and went within one call was never ours to tell.
        told = [place for place in places if place not in self._new]
        self._new -= set(places)
        if told:
            self._say(f"{what} {_listed(told)}")


def _nothing(_: str) -> None: ...


def _listed(places: Sequence[Place]) -> str:
    return ", ".join(f"{printable(channel)}/{partition}" for channel, partition in places)
