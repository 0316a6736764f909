"""The documents of a feed: by the name of their kind, or from a file; and the draws of which they are made."""

import importlib
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

import orjson

from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean

Documents = Callable[[int, int, Micros], bytes]
"""The document of (sender, number, time): the JSON text of an object."""

_MASK = (1 << 64) - 1
SLOTS = 4096
"""Into so many the tables here are parted: twelve bits choose one."""


@dataclass(frozen=True)
class Kind:
    """Where its documents are made (imported when asked for), what its senders are called, and a line of help."""

    made: str
    sender: str
    description: str

    def documents(self, seed: int) -> Documents:
        """The same documents for the same seed."""
        module, _, name = self.made.partition(":")
        maker: Callable[[int], Documents] = getattr(importlib.import_module(f"penstock.simulate.{module}"), name)
        return maker(seed)


KINDS = {
    "rsvps": Kind("rsvps:Rsvps", "meetup", "answers to invitations, in fifty cities"),
    "updates": Kind("updates:Counters", "sender", "numbers 1, 2, 3, … and a value: a plain load"),
    "random-walk": Kind("updates:Walkers", "walker", "a random walk of each sender"),
}

OPTIONS = ("rate", "senders", "seed", "count", "epoch", "file", "no-resume")
"""What may stand behind the name in an address, `simulate://NAME?rate=200&seed=7`."""


def kind_of(name: str, place: str) -> Kind:
    """The kind of that name; Misconfigured, with what may have been meant, when there is none."""
    if name not in KINDS:
        raise Misconfigured(place, f'there is no simulation "{name}"', _meant(name, KINDS))
    return KINDS[name]


def check_options(options: Iterable[str], place: str) -> None:
    """Misconfigured when an option of an address is none."""
    for option in options:
        if option not in OPTIONS:
            raise Misconfigured(place, f'a simulation has no option "{option}"', _meant(option, OPTIONS))


def _meant(name: str, known: Collection[str]) -> str:
    # The names are short: several are alike below this cutoff.
    return did_you_mean(name, known, f"there is {', '.join(known)}", cutoff=0.7)


class Recording:
    """The lines of a file as the documents of a feed with so many senders, in the order of the file.

    Blank lines are passed over. Misconfigured names the first line that is not a JSON object.
    """

    def __init__(self, path: Path, senders: int) -> None:
        self._senders = senders
        self._starts, self._ends = array("Q"), array("Q")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise Misconfigured(str(path), f"it cannot be read: {error.strerror}") from error
        try:
            self._index(path)
        except BaseException:
            self._file.close()
            raise

    def _index(self, path: Path) -> None:
        end = 0
        for number, line in enumerate(self._file, 1):
            start, end = end, end + len(line)
            if not line.strip():
                continue
            try:
                document = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise Misconfigured(f"{path}, line {number}", f"it is not JSON: {error.msg}") from error
            if not isinstance(document, dict):
                raise Misconfigured(f"{path}, line {number}", "it is JSON, but not an object", "write {…} on each line")
            self._starts.append(start)
            self._ends.append(end)
        if not self._starts:
            raise Misconfigured(str(path), "it holds no documents", "write a JSON object on each line")

    def __len__(self) -> int:
        return len(self._starts)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        n = (number - 1) * self._senders + sender
        start, end = self._starts[n], self._ends[n]
        line = os.pread(self._file.fileno(), end - start, start).strip()
        if b'"feed"' in line:
            # Recorded from a feed: the numbers of that time would contradict the new ones.
            document = orjson.loads(line)
            document.pop("feed", None)
            line = orjson.dumps(document)
        return line

    def close(self) -> None:
        self._file.close()


# Each draw is a function of a number: nothing has to be kept.


def mixed(number: int) -> int:
    """64 bits that look random, always the same for the same number (the finalizer of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def drawn(seed: int, *which: int) -> int:
    """The 64 bits that decide one thing of a world."""
    for number in which:
        seed = mixed(seed ^ number)
    return seed


@cache
def slots(choices: int, exponent: float) -> Sequence[int]:
    """The slots shared out among the choices by Zipf's law: a draw is then one look-up."""
    weights = list(accumulate(1 / (rank + 1) ** exponent for rank in range(choices)))
    shared, choice = [], 0
    for slot in range(SLOTS):
        while (slot + 0.5) / SLOTS > weights[choice] / weights[-1]:
            choice += 1
        shared.append(choice)
    return shared
