"""The balance of each hop: the records that a stage read, and their outcomes. No I/O.

The account of a stage contains how far it has read a channel, the number of records, and their outcomes. The ledger
counts the same channel. The two must add up: due = the sum of the outcomes + in flight + missing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.audit.account import Account, Outcome, Share
from penstock.audit.content import ChannelCounts, Content, size
from penstock.audit.findings import Kind
from penstock.audit.judge import Discrepancy, Doubt
from penstock.core.contracts import Offsets
from penstock.core.record import generation_and_count

ARROW = " → "


@dataclass(frozen=True, slots=True)
class Gap:
    """Missing numbers: first–last of a sender in one of its epochs."""

    sender: str
    epoch: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def numbers(self) -> str:
        """As text: `7`, or `7–9 (3 records)`."""
        # Numbers that name a record are written as the sender writes them.
        return f"{self.first}" if self.size == 1 else f"{self.first}–{self.last} ({self.size:,} records)"


@dataclass(frozen=True, slots=True)
class Hop:
    """One stage and one channel that it reads: due = the sum of the outcomes + in flight + missing.

    `due` is the number of records to read. For a source: all that its senders are known to have sent.
    """

    stage: str
    """As in the graph: `source:rsvps`, `query:by_country`, `store:redis/by_country`, `feed:by_country`."""
    reads: str
    """The channel; empty for a source."""
    writes: str
    """The channel; empty for a stage that writes no channel."""
    due: int
    taken: int
    in_flight: int
    missing: int
    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    """The missing ranges, if numbers are known at this hop."""
    late: tuple[Gap, ...] = ()
    """The numbers of some late records."""
    note: str = ""
    """What could not be checked, and why."""
    latency: Mapping[str, float] | None = None
    """From the sender to the end of this hop, in ms: count, min, mean, p50, p95, p99, max."""
    step: Mapping[str, float] | None = None
    """The same from the start of this hop to its end, where both are known."""
    surplus: int = 0
    """Records that the stage reports beyond those in the channel."""


def hops(content: Content) -> tuple[Hop, ...]:
    """Return a hop for each stage but sources, and each channel that it reads, in the order in which a record flows."""
    order = {"query": 1, "store": 2, "feed": 3}
    found: list[Hop] = []
    for stage in sorted(
        content.accounts.keys() | content.stages.keys(),
        key=lambda stage: (order.get(stage.partition(":")[0], 4), stage),
    ):
        if stage.startswith("source:"):
            continue
        found += _stage(content, content.accounts[stage]) if stage in content.accounts else _silent(content, stage)
    return tuple(found)


def without_account(content: Content) -> Iterator[Doubt]:
    """Find stages that have records to read and have sent no account yet."""
    for stage, channels in content.stages.items():
        waiting = sum(content.counts.get(channel, ChannelCounts()).records for channel in channels)
        if stage not in content.accounts and waiting:
            yield Doubt("account", stage, f"{stage} has sent no account for its {waiting:,} records yet")


def begun_late(content: Content, first: Mapping[str, Offsets]) -> Iterator[Discrepancy]:
    """Find accounts that start after the beginning of their channel, although its first records were still there.

    `first` is the first offset that each partition still holds: no stage can read older ones. A query can be declared
    to start later.
    """
    for stage, account in content.accounts.items():
        for channel, share in account.shares.items():
            if account.start_declared or _compacted(content, channel) or channel not in first:
                continue
            counted = content.since.get(channel, {})
            begins = {at: max(offset, first[channel].get(at, 0)) for at, offset in counted.items()}
            if (skipped := _distance(begins, {at: share.since.get(at, 0) for at in begins})) > 0:
                text = f"the account of {stage} leaves out {skipped:,} offsets at the beginning of {channel}"
                yield Discrepancy("unexplained", stage, skipped, text)


def paths(found: Sequence[Hop]) -> tuple[Hop, ...]:
    """Join the hops end to end: from each source to each stage that reads its channel, with the sum of outcomes."""
    sources = {hop.writes: hop for hop in found if not hop.reads}
    return tuple(_joined(sources[hop.reads], hop) for hop in found if hop.reads in sources)


def _joined(source: Hop, hop: Hop) -> Hop:
    outcomes = {
        outcome: hop.outcomes.get(outcome, 0)
        + (source.outcomes.get(outcome, 0) if outcome is not Outcome.PASSED else 0)
        for outcome in Outcome
    }
    # Records of the channel that the account does not cover are in flight, too.
    ahead = max(0, source.outcomes.get(Outcome.PASSED, 0) - hop.due)
    in_flight = source.in_flight + hop.in_flight + ahead
    missing = source.missing + hop.missing
    return Hop(
        f"{source.stage}{ARROW}{hop.stage}",
        "",
        hop.writes,
        sum(outcomes.values()) + in_flight + missing,
        source.taken,
        in_flight,
        missing,
        outcomes,
        (*source.gaps, *hop.gaps),
        hop.late,
        hop.note,
        hop.latency,
    )


def _stage(content: Content, account: Account) -> Iterator[Hop]:
    into = _writes(content, account.stage)
    made = [_hop(content, account, channel, share, into) for channel, share in account.shares.items()]
    lost, note = _unfolded(content, account, into)
    if lost < 0 and len(made) == 1:
        # In real time a batch lasts a minute, and the account follows at its end. The rows are newer.
        made, note = [_with_rows(made[0], -lost)], ""
    lost = max(0, lost)
    if lost and len(made) > 1:
        note = f"{lost} records are in none of its rows: it is not known from which of its channels they are"
    for hop in made:
        # No more than have passed here can be lost.
        some = min(lost, hop.outcomes[Outcome.PASSED])
        lost -= some
        outcomes = {**hop.outcomes, Outcome.PASSED: hop.outcomes[Outcome.PASSED] - some}
        notes = " ".join(filter(None, (hop.note, note)))
        yield replace(hop, missing=hop.missing + some, outcomes=outcomes, note=notes)


def _silent(content: Content, stage: str) -> Iterator[Hop]:
    """Return the hops of a stage without an account: all records of its channels are in flight."""
    into = _writes(content, stage)
    for channel in content.stages[stage]:
        records = content.counts.get(channel, ChannelCounts()).records
        outcomes = dict.fromkeys(Outcome, 0)
        yield Hop(stage, channel, into, records, 0, records, 0, outcomes, note="it has sent no account yet")


def _writes(content: Content, stage: str) -> str:
    return next((name for name, one in content.channels.items() if stage in one.fed_by), "")


def _with_rows(hop: Hop, ahead: int) -> Hop:
    """Return the hop with `ahead` records as passed that counted as in flight: they are in its rows already."""
    some = min(ahead, hop.in_flight)
    outcomes = {**hop.outcomes, Outcome.PASSED: hop.outcomes[Outcome.PASSED] + some}
    return replace(hop, taken=hop.taken + some, in_flight=hop.in_flight - some, outcomes=outcomes)


def _hop(content: Content, account: Account, channel: str, share: Share, into: str) -> Hop:
    missing, surplus, note = _untaken(content, channel, share)
    in_flight = _distance(share.until, content.until.get(channel, {}))
    if share.since == content.since.get(channel, {}):
        # Both count from the same offsets: the number of unread records is known exactly.
        unread = content.counts.get(channel, ChannelCounts()).records - share.taken
        in_flight = min(in_flight, max(0, unread - missing))
    outcomes = {outcome: share.outcomes.get(outcome, 0) for outcome in Outcome}
    latency, step = content.latencies.get(into), content.steps.get(into)
    return Hop(
        account.stage,
        channel,
        into,
        share.taken + in_flight + missing,
        share.taken,
        in_flight,
        missing,
        outcomes,
        late=tuple(
            Gap(sender, int(epoch), first, last)
            for sender, epochs in share.late.items()
            for epoch, runs in epochs.items()
            for first, last in runs
        ),
        note=note,
        latency=latency.summary() if latency else account.latency,
        step=step.summary() if step else None,
        surplus=surplus,
    )


def _untaken(content: Content, channel: str, share: Share) -> tuple[int, int, str]:
    """Return how many records the stage skipped, how many it counted too many, and a note.

    Offsets are not counts: transaction markers use some. If the stage has read exactly what the ledger has read, the
    count of the ledger is exact; otherwise unused offsets can explain a difference. Offsets after those of the ledger
    may hold no record.
    """
    since, until = content.since.get(channel, {}), content.until.get(channel, {})
    records = content.counts.get(channel, ChannelCounts()).records
    same = share.since == since and not _distance(share.until, until)
    if _compacted(content, channel):
        # Rows that were compacted away before the stage read them are not missing.
        gone = records - share.taken if same else 0
        return 0, 0, f"{gone} rows were compacted away before it read them" if gone > 0 else ""
    if same:
        due = records
    else:
        unused = sum(until.values()) - sum(since.values()) - records
        both = {partition: min(offset, until.get(partition, 0)) for partition, offset in share.until.items()}
        due = _distance(share.since, both) - max(0, unused)
    if share.taken > (most := max(due, _distance(share.since, share.until))):
        return 0, share.taken - most, f"it reports {share.taken - most} records more than the channel holds"
    return max(0, due - share.taken), 0, ""


def _compacted(content: Content, channel: str) -> bool:
    watched = content.channels.get(channel)
    return watched is None or watched.kind is Kind.RESULT or watched.compacted


def _unfolded(content: Content, account: Account, into: str) -> tuple[int, str]:
    """Return how many records passed into a query and are in none of its rows; and why this is not known.

    Less than 0 if its rows are ahead of its account.
    """
    if not into or content.channels[into].kind is not Kind.RESULT:
        return 0, ""
    wrote, until = account.wrote.get(into, {}), content.until.get(into, {})
    if not (account.step or account.conserved) or any(
        until.get(partition, 0) < end for partition, end in wrote.items()
    ):
        return 0, ""
    folded = _folded(content, account, into)
    if isinstance(folded, str):
        return 0, f"{folded}: not checked"
    passed = sum(share.outcomes.get(Outcome.PASSED, 0) for share in account.shares.values())
    if folded > passed:
        return passed - folded, f"{folded - passed} of those in flight are in its rows already"
    return passed - folded, ""


def _folded(content: Content, account: Account, into: str) -> int | str:
    """Return how many records are in the rows of a result, or why it is not known."""
    if not account.conserved:
        return "its rows do not contain the number of their records"
    if account.stage in content.reborn and not (account.number and into in content.folded):
        return "its channel holds rows of an earlier generation"
    since, until = content.since.get(into, {}), content.until.get(into, {})
    counted = content.counts.get(into, ChannelCounts()).records + content.forged.get(into, 0)
    if any(since.values()) or _distance(since, until) > counted:
        return "rows were compacted away before the ledger counted them"
    if into in content.folded:
        if (folded := content.folded[into]) is None:
            return "rows that were forgotten have changed again"
        generation, records = generation_and_count(folded)
        if generation > account.number:
            return "its channel holds rows of a later generation"
        return records if generation == account.number else 0
    # The result keeps single records with their own numbers.
    for channel in account.shares:
        if _compacted(content, channel) or content.counts.get(channel, ChannelCounts()).without_identity:
            return "some of its records have no number"
        if any(
            one.records > size(content.runs.get(of, ())) for of, one in content.numbered.items() if of[0] == channel
        ):
            return "its channel holds some records twice"
    return sum(size(runs) for (name, _, _), runs in content.runs.items() if name == into)


def _distance(start: Offsets, end: Offsets) -> int:
    return sum(max(0, offset - start.get(partition, 0)) for partition, offset in end.items())
