"""Compares the guarantee of each hop with the delivery that the pipeline requires. No I/O.

Each hop reads a durable log, and its target recognizes a record by its number or version. So most hops guarantee at
least what is required. A weaker guarantee is reported with a fix.
"""

from dataclasses import dataclass

from penstock.core.contracts import Guarantee, Source

_SUFFICIENT = {
    Guarantee.EXACTLY_ONCE: {Guarantee.EXACTLY_ONCE},
    Guarantee.AT_LEAST_ONCE: {Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE},
    Guarantee.AT_MOST_ONCE: {Guarantee.EXACTLY_ONCE, Guarantee.AT_MOST_ONCE},
}


@dataclass(frozen=True)
class HopGuarantee:
    """The guarantee of a hop, with the reason; if it is weaker than required, with a fix."""

    required: Guarantee
    guarantee: str
    why: str
    fix: str = ""

    @property
    def weaker(self) -> bool:
        return self.guarantee not in _SUFFICIENT[self.required]


def of_source(source: Source, required: Guarantee) -> HopGuarantee:
    # A sender that repeats unacknowledged records cannot be kept from sending a record twice.
    if required is Guarantee.AT_MOST_ONCE and source.guarantee is not Guarantee.AT_LEAST_ONCE:
        why = "each connection starts with new records, and nothing is requested again"
        return HopGuarantee(required, Guarantee.AT_MOST_ONCE, why)
    return HopGuarantee(required, source.guarantee, source.description, _FIXES.get(source.guarantee, ""))


_FIXES = {
    Guarantee.AT_LEAST_ONCE: "number the records at the senders, or remove duplicates with unique=",
    Guarantee.BEST_EFFORT: "use a feed that can resume, or let senders wait for the acknowledgement",
}


def of_query(
    identified: bool, abandons: bool, required: Guarantee, *, keyed: bool = False, unnumbered: str | None = None
) -> HopGuarantee:
    """The guarantee of a query.

    `identified`: its rows have a version or an origin. `abandons`: a batch that a crash interrupts is not repeated.
    `keyed`: its rows have an origin and come from Python state. `unnumbered`: why some rows have no origin.
    """
    if unnumbered is not None:
        return HopGuarantee(
            required,
            Guarantee.AT_LEAST_ONCE,
            f"rows may be written again after a crash, and {unnumbered}",
            "store them in a table, such as redis://…, which keeps the last row of a key",
        )
    if identified:
        why = "rows may be written again after a crash; their version shows which is newer"
        if keyed:
            why = "the first row of a record has its number; further rows may be repeated after a crash"
        return HopGuarantee(required, Guarantee.EXACTLY_ONCE, why)
    if abandons:
        why = "a batch that a crash interrupts is not repeated; the audit counts its records as missing"
        return HopGuarantee(required, Guarantee.AT_MOST_ONCE, why)
    return HopGuarantee(
        required,
        Guarantee.AT_LEAST_ONCE,
        "rows may be written again after a crash, and nothing identifies them",
        "add seen() to its aggregation, or keep the column origin",
    )


def of_store(required: Guarantee) -> HopGuarantee:
    """A transaction neither drops a row nor applies it twice."""
    why = "rows and offsets are written in one transaction, older versions never win"
    return HopGuarantee(required, Guarantee.EXACTLY_ONCE, why)


def of_page(required: Guarantee) -> HopGuarantee:
    why = "a snapshot, then the changes; a client that reconnects gets the changes that it missed"
    return HopGuarantee(required, Guarantee.EXACTLY_ONCE, why)
