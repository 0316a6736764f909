"""Chance that can be asked again: every draw is a function of a number, so nothing has to be kept. No I/O."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

_MASK = (1 << 64) - 1

SLOTS = 4096
"""Into so many the tables here are parted: twelve bits choose one."""


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
