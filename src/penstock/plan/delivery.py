"""What delivery a pipeline asks for, and what each of its hops gives. No I/O.

Each hop reads a log that stays and writes where a record is known by its number or its version; so most give more than
is asked for. What gives less is told, with the way out.
"""

from dataclasses import dataclass

from penstock.core.contracts import Guarantee, Source
from penstock.pipeline.description import Delivery

_ENOUGH = {
    Delivery.EXACTLY_ONCE: {Delivery.EXACTLY_ONCE},
    Delivery.AT_LEAST_ONCE: {Delivery.EXACTLY_ONCE, Delivery.AT_LEAST_ONCE},
    Delivery.AT_MOST_ONCE: {Delivery.EXACTLY_ONCE, Delivery.AT_MOST_ONCE},
}


@dataclass(frozen=True)
class Given:
    """What a hop gives of what was wanted, and why; where that is weaker, how it would give more."""

    wanted: Delivery
    guarantee: str
    why: str
    fix: str = ""

    @property
    def weaker(self) -> bool:
        return self.guarantee not in _ENOUGH[self.wanted]


def of_source(source: Source, wanted: Delivery) -> Given:
    # Where those who send repeat what was not answered, nobody else can keep it from coming twice.
    if wanted is Delivery.AT_MOST_ONCE and source.guarantee is not Guarantee.AT_LEAST_ONCE:
        why = "it begins with what is new at each connection, and is asked for nothing again"
        return Given(wanted, Delivery.AT_MOST_ONCE, why)
    return Given(wanted, source.guarantee, source.description, _WAYS_OUT.get(source.guarantee, ""))


_WAYS_OUT = {
    Guarantee.AT_LEAST_ONCE: "let those who send number their records, or tell what came twice apart by unique=",
    Guarantee.BEST_EFFORT: "hear a feed that can resume, or let those who send wait for the acknowledgement",
}


def of_query(
    identified: bool, gives_up: bool, wanted: Delivery, *, keyed: bool = False, unnumbered: str | None = None
) -> Given:
    """`identified`: its rows carry a version or an origin. `gives_up`: what a crash leaves unfinished is not done.

    `keyed`: they carry an origin, and state in Python gives them; `unnumbered`: why some, or all, have none.
    """
    if unnumbered is not None:
        return Given(
            wanted,
            Delivery.AT_LEAST_ONCE,
            f"rows may be written again after a crash, and {unnumbered}",
            "keep them in a table, such as redis://…, where the last row of a key stands",
        )
    if identified:
        why = "rows may be written again after a crash; their version tells which is newer"
        if keyed:
            why = "the first row of a record has its number; further ones may be there again after a crash"
        return Given(wanted, Delivery.EXACTLY_ONCE, why)
    if gives_up:
        why = "a batch that a crash left unfinished is given up; the audit counts its records as missing"
        return Given(wanted, Delivery.AT_MOST_ONCE, why)
    return Given(
        wanted,
        Delivery.AT_LEAST_ONCE,
        "rows may be written again after a crash, and nothing tells them apart",
        "add seen() to its aggregation, or keep the column origin",
    )


def of_store(wanted: Delivery) -> Given:
    """The same whatever is wanted: one transaction neither drops a row nor applies it twice."""
    why = "rows and positions are written in one transaction, older versions never win"
    return Given(wanted, Delivery.EXACTLY_ONCE, why)


def of_page(wanted: Delivery) -> Given:
    why = "a snapshot, then the changes; whoever comes back gets what it missed"
    return Given(wanted, Delivery.EXACTLY_ONCE, why)
