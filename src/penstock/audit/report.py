"""The balance as a balance sheet for the terminal."""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from rich import box
from rich.table import Table
from rich.text import Text

from penstock.audit.account import Outcome
from penstock.audit.balance import Balance, SenderBalance
from penstock.audit.findings import Kind
from penstock.audit.hops import ARROW, Gap, Hop
from penstock.audit.judge import Verdict
from penstock.core.clock import Micros
from penstock.core.text import counted, printable

NAMED = 20
"""Maximum missing ranges that are named; then follows how many more there are."""
_FRESH = 5_000_000
"""A younger time is printed without its date."""
_ALWAYS = (Outcome.PASSED,)
"""The other outcomes have a column only if they occur."""


def parts(balance: Balance, senders: bool = False) -> Iterator[Table | Text]:
    """Yield the balance sheet, the channels, the missing ranges, the doubts, and last the verdict.

    With `senders`, also all senders of the source channels: first those with missing or duplicate records.
    """
    if balance.hops:
        yield _sheet("stage", balance.hops)
    if balance.paths:
        yield _sheet("end to end", balance.paths)
    yield _channels(balance)
    if senders:
        yield _senders(balance)
    yield from _findings(balance)
    yield _verdict(balance)


def _table(names: Sequence[str], figures: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in names:
        table.add_column(title, overflow="fold")
    for title in figures:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _sheet(title: str, hops: Sequence[Hop]) -> Table:
    """Return a line for each hop: the due records and their outcomes. Each line adds up."""
    outcomes = [one for one in Outcome if one in _ALWAYS or any(hop.outcomes.get(one) for hop in hops)]
    table = _table([title], ["due", *outcomes, "in flight", "missing"])
    lines = Counter(hop.stage for hop in hops)
    for hop in hops:
        table.add_row(
            _hop(hop, lines[hop.stage] > 1),
            _number(hop.due),
            *(_number(hop.outcomes.get(outcome, 0)) for outcome in outcomes),
            _number(hop.in_flight),
            Text(_number(hop.missing), style="bold red" if hop.missing else ""),
        )
    return table


def _hop(hop: Hop, several: bool = False) -> Text:
    """Return the name of the stage; with its channel if the stage reads several."""
    name = hop.stage.replace("source:", "").replace("query:", "").replace("store:", "").replace("feed:", "clients of ")
    kind = hop.stage.partition(":")[0]
    if ARROW in hop.stage or kind not in ("source", "query", "store"):
        return Text(printable(name))
    return Text(printable(f"{kind} {name}{f' of {hop.reads}' if several else ''}"))


def _channels(balance: Balance) -> Table:
    figures = ["senders", "records", "doubled", "disorder", "min ms", "mean", "p50", "p99", "max"]
    table = _table(["channel"], figures)
    for channel in balance.channels:
        if channel.kind is Kind.DEAD and not channel.records:
            continue
        table.add_row(
            Text(printable(channel.channel)),
            _number(channel.senders) if channel.senders else "",
            _number(channel.records),
            _number(channel.duplicates),
            _number(sum(one.reordered for one in channel.by_sender)) if channel.by_sender else "",
            *(
                _lapse(channel.latency[name]) if channel.latency else ""
                for name in ("min", "mean", "p50", "p99", "max")
            ),
        )
    return table


def _senders(balance: Balance) -> Table:
    figures = ["epoch", "first", "last", "records", "missing", "doubled", "disorder", "min ms", "mean", "max"]
    table = _table(["channel", "sender"], figures)
    all_ = [(channel.channel, one) for channel in balance.channels for one in channel.by_sender]
    for name, one in sorted(all_, key=lambda item: not (item[1].missing or item[1].duplicates)):
        table.add_row(*_sender(name, one))
    return table


def _sender(channel: str, one: SenderBalance) -> Iterator[Text | str]:
    yield Text(printable(channel))
    yield Text(printable(one.sender))
    yield str(one.epoch)
    # Numbers that name a record are written as the sender writes them.
    yield "" if one.first is None else str(one.first)
    yield "" if one.last is None else str(one.last)
    yield _number(one.records)
    yield Text(_number(one.missing), style="bold red" if one.missing else "")
    yield _number(one.duplicates)
    yield _number(one.reordered)
    # A negative latency: the clock of the sender is ahead.
    for name in ("min", "mean", "max"):
        yield _lapse(one.latency[name]) if one.latency else ""


def _findings(balance: Balance) -> Iterator[Text]:
    gaps = [(hop, gap) for hop in balance.hops for gap in hop.gaps]
    for hop, gap in gaps[:NAMED]:
        seen = "not seen in any channel" if not hop.reads else f"last seen in {hop.reads}"
        yield Text(f"{_hop(hop)} misses {_range(gap)}: {printable(seen)}", style="red")
    if len(gaps) > NAMED:
        yield Text(f"and {_number(len(gaps) - NAMED)} more ranges", style="red")
    for hop in balance.hops:
        if unnamed := hop.missing - sum(gap.size for gap in hop.gaps):
            query = hop.stage.removeprefix("query:")
            way = f"; penstock audit --recompute {query} names them" if hop.stage.startswith("query:") else ""
            yield Text(
                f"{_hop(hop)}: {_number(unnamed)} records of {printable(hop.reads)} are in none of its outcomes{way}",
                style="red",
            )
        if hop.late:
            some = ", ".join(_range(gap) for gap in hop.late[:3])
            more = f" and {len(hop.late) - 3} more ranges" if len(hop.late) > 3 else ""
            yield Text(f"{_hop(hop)}: late were {some}{more}", style="yellow")
        if hop.note:
            yield Text(f"{_hop(hop)}: {printable(hop.note)}", style="dim")
    for one in balance.discrepancies:
        some = f": {', '.join(one.examples)}" if one.examples else ""
        yield Text(printable(f"{one.kind}: {one.text}{some}"), style="red")
    for doubt in balance.doubts:
        yield Text(printable(f"not known: {doubt.text}"), style="yellow")
    for channel in balance.channels:
        spell = timedelta(seconds=round(channel.unknown_seconds, 3))
        notes = (
            (channel.unread, f"{_number(channel.unread)} records are not read yet; they count as in flight."),
            (
                channel.without_identity,
                f"{_number(channel.without_identity)} entries have no identity and can only be counted.",
            ),
            (
                channel.unknown_seconds,
                f"for {spell} (h:mm:ss) the source was not connected and cannot be read again; what it sent then is"
                " unknown.",
            ),
        )
        yield from (Text(f"{printable(channel.channel)}: {note}", style="yellow") for count, note in notes if count)


def _verdict(balance: Balance) -> Text:
    missing, age = balance.missing, _age(balance.as_of, balance.at)
    if balance.verdict is Verdict.MISSING:
        records = f"{_number(missing)} records are missing" if missing else ""
        others = f"{len(balance.discrepancies)} findings" if balance.discrepancies else ""
        return Text(f"Not whole: {'; '.join(filter(None, (records, others)))}{age}.", style="bold red")
    if balance.verdict is Verdict.NOT_KNOWN:
        more = f"; and {counted(len(balance.doubts) - 1, 'more reason')}" if len(balance.doubts) > 1 else ""
        text = f"Not known whether records are missing: {balance.doubts[0].text.rstrip('.')}{more}{age}."
        return Text(printable(text), style="bold yellow")
    if not any(channel.records or channel.claimed for channel in balance.channels):
        return Text(f"Whole: no record has come yet{age}.", style="bold green")
    in_flight = max((hop.in_flight for hop in balance.hops), default=0)
    summary = "Whole" if not balance.unknown_seconds else "Whole where it is known"
    flying = f"; up to {_number(in_flight)} records are in flight" if in_flight else ""
    return Text(f"{summary}: nothing is missing{flying}{age}.", style="bold green")


def _age(as_of: Micros | None, at: Micros) -> str:
    """Return the time of the verdict, if it is not now."""
    return "" if as_of is None or at - as_of <= _FRESH else f", as of {utc(as_of, at)}"


def utc(micros: Micros, now: Micros | None = None) -> str:
    """Return a time as text; without the date if that is the date of `now`."""
    then, today = (datetime.fromtimestamp(at // 1_000_000, UTC) for at in (micros, now or 0))
    return then.strftime(f"{'' if then.date() == today.date() else '%Y-%m-%d '}%H:%M:%S UTC")


def _range(gap: Gap) -> str:
    return f"{printable(gap.sender)}/{gap.epoch}: {gap.numbers}"


def _lapse(ms: float) -> str:
    """Return a duration in milliseconds; one from a wrong clock in hours, so that it fits."""
    return f"{ms:,.1f}" if abs(ms) < 1e7 else f"{ms / 3_600_000:,.0f} h"


def _number(value: int) -> str:
    return f"{value:,}"
