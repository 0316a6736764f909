"""How far each sender is that comes to a door of ours, so that one who comes back is told where to go on. No I/O."""

from penstock.collect.numbers import SENDERS
from penstock.contracts import Guarantee, Places
from penstock.errors import Refused

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
        words = f"{_KEEPS}; one that comes back to another process behind this port gives some of it again, "
        return Guarantee.AT_LEAST_ONCE, words + "with the same number"
    return Guarantee.EXACTLY_ONCE, f"{_KEEPS}, and is told where to go on"


def counted(last: int, count: int) -> int:
    """The number of the last of so many records behind number `last`; Refused when it has no place in an origin."""
    if last + count > LARGEST:
        raise Refused("records", "the numbers of these records lie beyond 64 bits; begin another epoch")
    return last + count


class Senders:
    """Bounded: of too many, the one is forgotten that was quiet for longest. It knows by itself what it still has."""

    def __init__(self, places: Places) -> None:
        self._safe = dict(places)

    def after(self, sender: str, epoch: int, has: int) -> int:
        """The number behind which a sender goes on, whose first record that it still has is number `has`.

        It forgets what it was told is safe, perhaps by another collector, or by one that has forgotten it since: so
        its own word counts where it is higher.
        """
        life, seq = self._safe.get(sender, (0, 0))
        return max(seq if life == epoch else 0, has - 1)

    def safe(self, sender: str, epoch: int, last: int) -> None:
        """All of its records up to this one are safe."""
        if self._safe.get(sender, (0, 0)) < (epoch, last):
            self._safe.pop(sender, None)
            self._safe[sender] = epoch, last
            if len(self._safe) > SENDERS:
                del self._safe[next(iter(self._safe))]
