"""What a lake lacks, by number: records that its channel holds and that it does not."""

from collections import defaultdict
from collections.abc import Iterable

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from penstock.audit.content import Content
from penstock.audit.findings import islands
from penstock.audit.hops import Gap
from penstock.audit.runs import Runs
from penstock.errors import Unavailable
from penstock.stores.lake import LakeStore

_IDENTITY = ["_sender", "_epoch", "_seq"]


def absent(store: LakeStore, content: Content, channel: str) -> tuple[Gap, ...]:
    """The numbers that the ledger has seen in the channel and that the lake does not hold.

    What is in the dead letters of the channel has no place in a lake. What the loader has not brought yet is absent,
    too: ask when nothing is in flight. Raises Unavailable when the lake cannot be read.
    """
    held, found = _numbers(store), list[Gap]()
    for (name, sender, epoch), runs in sorted(content.runs.items()):
        if name != channel:
            continue
        dead = content.runs.get((f"{channel}.dead", sender, epoch), ())
        there = Runs([*held.get((sender, epoch), ()), *((run.first, run.last) for run in dead)])
        due = ((run.first, run.last) for run in runs)
        found += (Gap(sender, epoch, first, last) for first, last in _without(due, there))
    return tuple(found)


def _numbers(store: LakeStore) -> dict[tuple[str, int], Runs]:
    """Which numbers of which senders a lake holds, streamed: memory grows with the gaps."""
    found: defaultdict[tuple[str, int], Runs] = defaultdict(Runs)
    try:
        if not DeltaTable.is_deltatable(store.path):
            return {}
        for batch in DeltaTable(store.path).to_pyarrow_dataset().scanner(columns=_IDENTITY).to_batches():
            some: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
            for sender, epoch, seq in zip(*(batch[name].to_pylist() for name in _IDENTITY), strict=True):
                if seq is not None:
                    some[sender, epoch].append(seq)
            for numbering, seqs in some.items():
                for first, last in islands(seqs):
                    found[numbering].add(first, last)
    except (DeltaError, OSError) as error:
        raise Unavailable(f"the lake {store.path}", str(error)) from error
    return dict(found)


def _without(some: Iterable[tuple[int, int]], others: Runs) -> Iterable[tuple[int, int]]:
    """The parts of some runs that are not in others."""
    for first, last in some:
        # Between two numbers that are put beside its ends, what is missing is what the others lack of the run.
        around = Runs([(first - 1, first - 1), (last + 1, last + 1)])
        for one, other in others:
            if one <= last and other >= first:
                around.add(max(one, first), min(other, last))
        yield from around.missing()
