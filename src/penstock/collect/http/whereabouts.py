"""Where records are now: in the channel, in its dead letters, and which stages have read them."""

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.audit.account import Account, is_account
from penstock.audit.findings import IN_CHANNEL
from penstock.collect.http.receipts import Receipt
from penstock.core.contracts import Entry, SourceContext
from penstock.core.errors import Refused, Unavailable
from penstock.core.record import Origin
from penstock.core.scan import scan_batches

BEFORE = 5_000_000
"""Microseconds: so far may the clock of a channel be behind ours."""
LOOK_AT, LOOK_FOR = 200_000, 3.0
"""Entries and seconds, after which a search is given up."""
NAMED = 100
"""Of so many records together the places are told one by one."""
_AT_A_TIME, _MORE = 2, 16
"""Searches at a time, and those that may wait for their turn."""
_STAGES = 1_000


@dataclass
class Whereabouts:
    """What was found of the records of a receipt."""

    into: list[Entry] = field(default_factory=list)
    dead: list[Entry] = field(default_factory=list)
    stages: list[tuple[str, bool]] = field(default_factory=list)
    whole: bool = True
    """Whether the search came to its end."""

    def document(self, home: SourceContext) -> dict[str, object]:
        told: dict[str, object] = {
            "channel": home.into,
            "found": len(self.into),
            "places": [_place(entry) for entry in self.into[:NAMED]],
            "refused": len(self.dead),
            "stages": [{"stage": stage, "read": read} for stage, read in self.stages],
        }
        if self.dead:
            told["dead"] = [
                {"channel": home.dead, **_place(one), "reason": reason_of(one)} for one in self.dead[:NAMED]
            ]
        if not self.whole:
            told["searched"] = "in part"
        return told


class Searching:
    """Finds what is asked for, some at a time, each within bounds."""

    def __init__(self, home: SourceContext) -> None:
        self._home = home
        self._accounts: dict[str, Account] = {}
        self._read: dict[int, int] = {}
        self._reading = threading.Lock()
        self._stop = threading.Event()
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        self._waiting = 0

    async def find(self, receipt: Receipt) -> Whereabouts:
        """Unavailable when the channels do not answer, or too many ask."""
        if self._waiting >= _MORE:
            raise Unavailable("the search for records", "too many ask at a time", 1.0)
        self._waiting += 1
        try:
            async with self._turns:
                return await asyncio.to_thread(self._find, receipt)
        finally:
            self._waiting -= 1

    def stop(self) -> None:
        self._stop.set()

    def _find(self, receipt: Receipt) -> Whereabouts:
        found, until = Whereabouts(), time.monotonic() + LOOK_FOR
        found.into = self._seek(self._home.into, receipt, receipt.count, until, found)
        # What does not fit lies in its channel all the same, and its letter beside it; what was redriven has one, too.
        letters = self._seek(self._home.dead, receipt, receipt.count, until, found)
        redriven = {_seq(entry) for entry in found.into if _header(entry, "redriven") is not None}
        found.dead = [letter for letter in letters if _seq(letter) not in redriven]
        if found.into:
            found.stages = self._stages(found, until)
        return found

    def _seek(self, channel: str, receipt: Receipt, count: int, until: float, all_: Whereabouts) -> list[Entry]:
        channels, home = self._home.channels, self._home.into
        bounds = channels.bounds(channel)
        looked, found = 0, dict[int, Entry]()
        for entries in scan_batches(channels, channel, channels.since(channel, receipt.time - BEFORE), bounds):
            for entry in entries:
                origin = Origin.read(entry.headers)
                if origin is not None and receipt.holds(origin) and (channel == home or reason_of(entry) is not None):
                    # The first of two with the same number is the one that counts.
                    found.setdefault(origin.seq, entry)
            looked += len(entries)
            if len(found) >= count:
                break
            if self._enough(looked, until):
                all_.whole = False
                break
        return [found[seq] for seq in sorted(found)]

    def _stages(self, found: Whereabouts, until: float) -> list[tuple[str, bool]]:
        with self._reading:
            self._catch_up(found, until)
            return [
                (stage, all(_is_behind(entry, account.shares[self._home.into].until) for entry in found.into))
                for stage, account in sorted(self._accounts.items())
            ]

    def _catch_up(self, found: Whereabouts, until: float) -> None:
        """Read what stages have said since the last time."""
        channels, channel = self._home.channels, self._home.bookmarks
        bounds = channels.bounds(channel)
        looked = 0
        for entries in scan_batches(channels, channel, self._read, bounds):
            for entry in entries:
                self._note(entry)
                self._read[entry.partition] = entry.offset + 1
            looked += len(entries)
            if self._enough(looked, until):
                found.whole = False
                return
        self._read = {partition: end for partition, (_, end) in bounds.items()}

    def _note(self, entry: Entry) -> None:
        if not is_account(entry.key):
            return
        assert entry.key is not None
        self._accounts.pop(entry.key.decode(errors="replace"), None)
        try:
            account = Account.of(entry.key, entry.value or b"")
        except Refused:
            return
        # A source tells what it has dropped before the channel; it reads nothing there.
        reads = self._home.into in account.shares and not account.stage.startswith("source:")
        if reads and len(self._accounts) < _STAGES:
            self._accounts[account.stage] = account

    def _enough(self, looked: int, until: float) -> bool:
        return looked >= LOOK_AT or time.monotonic() > until or self._stop.is_set()


def _is_behind(entry: Entry, until: Mapping[int, int]) -> bool:
    return entry.offset < until.get(entry.partition, 0)


def _place(entry: Entry) -> dict[str, object]:
    return {"seq": _seq(entry), "partition": entry.partition, "offset": entry.offset}


def _seq(entry: Entry) -> int | None:
    origin = Origin.read(entry.headers)
    return origin.seq if origin else None


def reason_of(letter: Entry) -> str | None:
    """Why a dead letter was refused; None of one that was not: its record is in the channel, without one query."""
    reason = _header(letter, "reason") or ""
    return None if reason.startswith(IN_CHANNEL) else reason


def _header(entry: Entry, name: str) -> str | None:
    """The last of that name: a record may have had such a header before."""
    found = (told.decode(errors="replace") for known, told in reversed(entry.headers) if known == name)
    return next(found, None)
