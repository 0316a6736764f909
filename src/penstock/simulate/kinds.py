"""Everything that can be simulated, by its name."""

import importlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean
from penstock.simulate.feed import Documents


@dataclass(frozen=True)
class Kind:
    """Where its documents are made (imported when asked for), what its senders are called, and a line of help."""

    made: str
    sender: str
    words: str

    def documents(self, seed: int) -> Documents:
        """The same documents for the same seed."""
        module, _, name = self.made.partition(":")
        maker: Callable[[int], Documents] = getattr(importlib.import_module(f"penstock.simulate.{module}"), name)
        return maker(seed)


KINDS = {
    "rsvps": Kind("rsvps:Rsvps", "meetup", "answers to invitations, in fifty cities"),
    "updates": Kind("updates:Counters", "sender", "numbers 1, 2, 3, … and a value: a plain load"),
    "random-walk": Kind("walk:Walkers", "walker", "a random walk of each sender"),
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
