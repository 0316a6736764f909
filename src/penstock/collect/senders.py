"""How far each sender is that comes to a door of ours, so that one who comes back is told where to go on. No I/O."""

from typing import NamedTuple, TypeVar

from penstock.collect.numbers import SENDERS
from penstock.core.contracts import Guarantee, ResumeState
from penstock.core.errors import Refused
from penstock.core.record import LARGEST_JUMP

T = TypeVar("T")

LARGEST = 2**63 - 1
"""Of epochs and of numbers: what lies beyond has no place in an origin, nor in a bookmark."""
_KEEPS = "a sender keeps what it was not told is safe"


def promise(named: bool, shared: bool) -> tuple[Guarantee, str]:
    """What a door promises that tells senders what is safe, and why; `shared`: by several processes.

    None of those knows what the others have just taken.
    """
    if not named:
        return Guarantee.AT_LEAST_ONCE, f"{_KEEPS}; one without a name sends some of it again"
    if shared:
        description = f"{_KEEPS}; one that comes back to another process behind this port gives some of it again, "
        return Guarantee.AT_LEAST_ONCE, description + "with the same number"
    return Guarantee.EXACTLY_ONCE, f"{_KEEPS}, and is told where to go on"


def counted(last: int, count: int) -> int:
    """The number of the last of so many records behind number `last`; Refused when it has no place in an origin."""
    if last + count > LARGEST:
        raise Refused("records", "the numbers of these records lie beyond 64 bits; begin another epoch")
    return last + count


def same_name(sender: str, epoch: int) -> str:
    """What is logged when a sender connects that is connected already."""
    return (
        f"the sender {sender}, epoch {epoch}, has connected twice: the first connection was closed. If it was lost, "
        "all is well; if these are two senders, give each a name of its own: otherwise records of one are taken for "
        "repeated records of the other"
    )


class Senders:
    """Bounded: of too many, the one is forgotten that was quiet for longest. It knows by itself what it still has.

    `largest_jump`: a sender whose numbers go on further than this behind the last that is known of it is refused;
    0: it is not.
    """

    def __init__(self, taken: ResumeState, largest_jump: int = LARGEST_JUMP) -> None:
        self._largest_jump = largest_jump
        self._safe = {sender: _Run(epoch, 1, last) for sender, (epoch, last) in taken.numbers.items()}
        self._highest = dict(taken.highest)

    def admit(self, sender: str, epoch: int, first: int, last: int) -> None:
        """A sender has these numbers to give; Refused when they jump. The first number of an epoch may be any."""
        known = self._highest.get(sender)
        if known is not None and known[0] == epoch and 0 < self._largest_jump < first - known[1] - 1:
            why = (
                f"number {first} of the sender {sender} is more than {self._largest_jump:,} beyond {known[1]}, its "
                f"last one in epoch {epoch}; begin another epoch, or set largest_jump of the source"
            )
            raise Refused("records", why)
        self._note(sender, epoch, last)

    def after(self, sender: str, epoch: int, has: int) -> int:
        """The number behind which a sender goes on, whose first record that it still has is number `has`.

        Refused when that jumps. It forgets what it was told is safe, perhaps by another collector, or by one that has
        forgotten it since: so what it has need not be the first that is not safe here. It goes on behind those from
        there on that are safe without a gap. A number that somebody else gave in its name makes nothing else safe.
        """
        self.admit(sender, epoch, has, has - 1)
        run = self._safe.get(sender)
        return run.last if run is not None and run.epoch == epoch and run.first <= has <= run.last + 1 else has - 1

    def safe(self, sender: str, epoch: int, first: int, last: int) -> None:
        """All of its records from the one to the other are safe."""
        run, now = self._safe.get(sender), _Run(epoch, first, last)
        if run is not None and run.epoch > epoch:
            return
        if run is not None and run.epoch == epoch and first <= run.last + 1 and run.first <= last + 1:
            now = _Run(epoch, min(first, run.first), max(last, run.last))
        _put(self._safe, sender, now)
        self._note(sender, epoch, last)

    def _note(self, sender: str, epoch: int, last: int) -> None:
        if self._highest.get(sender, (epoch, last)) <= (epoch, last):
            _put(self._highest, sender, (epoch, last))


class _Run(NamedTuple):
    """Numbers of an epoch that are safe, without a gap."""

    epoch: int
    first: int
    last: int


def _put(known: dict[str, T], sender: str, value: T) -> None:
    known.pop(sender, None)
    known[sender] = value
    if len(known) > SENDERS:
        del known[next(iter(known))]
