"""How much the tests of this folder do: a little in `make test`, all of it in `make soak`; and the figures of that."""

import os

FULL = os.environ.get("PENSTOCK_SOAK") == "1"

MUTATED = 1_000_000 if FULL else 20_000
"""Records of a run in which one of each kind is changed, and of the clean run beside it."""
KILLED, KILLS = (500_000, 40) if FULL else (20_000, 5)
"""Records that flow while the auditor is killed, and how often it is at least."""
MANY, SENDERS = (5_000_000, 1_000) if FULL else (20_000, 200)
"""Records of many senders, and the senders."""
AWAY, RATE = (60, 5_000) if FULL else (3, 2_000)
"""For how many seconds Kafka is away, and how many records come in each."""
FAULTS, HARMS = (60, 140) if FULL else (6, 14)
"""Faults of processes and files, and harms to stored rows: 200 cases in all, each of which the verdict has to name."""
RESTARTS = 30
"""How often the analysis is killed."""
POISONED = 10_000, 20
"""Records, and how many of them make a query fail."""
PATIENCE = 900.0 if FULL else 120.0

FIGURES: list[tuple[str, str]] = []


def figure(what: str, value: str) -> None:
    """Remember a figure for the table at the end."""
    FIGURES.append((what, value))
