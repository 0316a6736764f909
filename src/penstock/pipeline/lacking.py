"""What a lake lacks, by number: records that its channel holds and that it does not."""

from collections.abc import Iterable
from dataclasses import replace

from penstock.audit.balance import Balance
from penstock.audit.content import Content
from penstock.audit.hops import Gap, Hop
from penstock.core.runs import Runs
from penstock.pipeline.description import Description
from penstock.pipeline.graph import store_node
from penstock.pipeline.stores import store_of
from penstock.pipeline.wiring import Wiring
from penstock.stores.lake import LakeStore


def named(found: Balance, content: Content, description: Description, wiring: Wiring) -> Balance:
    """The balance, with the numbers of what lakes lack. What is still on its way to one is not accused."""
    stores = {store_node(spec.url, spec.channel): store_of(spec, description, wiring) for spec in description.stores}

    def hop(one: Hop) -> Hop:
        store = stores.get(one.stage)
        if not one.missing or one.in_flight or not isinstance(store, LakeStore):
            return one
        return replace(one, gaps=absent(store, content, store.channel))

    return replace(found, hops=tuple(hop(one) for one in found.hops))


def absent(store: LakeStore, content: Content, channel: str) -> tuple[Gap, ...]:
    """The numbers that the ledger has seen in the channel and that the lake does not hold.

    What is in the dead letters of the channel has no place in a lake. What the loader has not brought yet is absent,
    too: ask when nothing is in flight. Raises Unavailable when the lake cannot be read.
    """
    held, found = store.numbers(), list[Gap]()
    for (name, sender, epoch), runs in sorted(content.runs.items()):
        if name != channel:
            continue
        dead = content.runs.get((f"{channel}.dead", sender, epoch), ())
        there = Runs([*held.get((sender, epoch), ()), *((run.first, run.last) for run in dead)])
        due = ((run.first, run.last) for run in runs)
        found += (Gap(sender, epoch, first, last) for first, last in _without(due, there))
    return tuple(found)


def _without(some: Iterable[tuple[int, int]], others: Runs) -> Iterable[tuple[int, int]]:
    """The parts of some runs that are not in others."""
    for first, last in some:
        # Between two numbers that are put beside its ends, what is missing is what the others lack of the run.
        around = Runs([(first - 1, first - 1), (last + 1, last + 1)])
        for one, other in others:
            if one <= last and other >= first:
                around.add(max(one, first), min(other, last))
        yield from around.missing()
