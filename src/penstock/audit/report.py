"""The balance as a bookkeeper would lay it out, for a terminal."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.audit.balance import Balance, ChannelBalance, SenderBalance
from penstock.audit.findings import Kind
from penstock.clock import Micros

NAMED = 20
"""So many missing ranges are named; then it is said how many more there are."""
_FRESH = 5_000_000
"""What is younger needs no date."""
_WIDE = 120
_COLUMNS = {
    "senders": "senders",
    "claimed": "claimed",
    "present": "distinct",
    "in flight": "in_flight",
    "missing": "missing",
    "doubled": "duplicates",
    "refused": "refused",
    "p50 ms": "",
    "p99 ms": "",
}


def show(balance: Balance, console: Console | None = None, senders: bool = False) -> None:
    """Print the table, the missing ranges, what is unknown, and the verdict last. Colours only on a terminal.

    With `senders`, a table of all senders of the source channels, too: first those that are not in order.
    """
    console = console or _console()
    console.print(_table(balance))
    if senders:
        console.print(_senders(balance))
    for line in _findings(balance):
        console.print(line)
    console.print(_verdict(balance))


def _console() -> Console:
    console = Console(highlight=False)
    # What is piped into a file or another program has no edge at which to wrap.
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


def _table(balance: Balance) -> Table:
    sources = [channel for channel in balance.channels if channel.kind is Kind.SOURCE]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=len(sources) > 1)
    table.add_column("channel", footer="all sources", overflow="fold")
    for title, name in _COLUMNS.items():
        total = _number(sum(getattr(channel, name) for channel in sources)) if name else ""
        table.add_column(title, footer=total, justify="right", no_wrap=True)
    for channel in balance.channels:
        table.add_row(*_row(channel))
    return table


def _row(channel: ChannelBalance) -> Iterator[Text | str]:
    source = channel.kind is Kind.SOURCE
    yield Text(printable(channel.channel))
    yield _number(channel.senders)
    yield _number(channel.claimed) if source else ""
    # A result row may have no number of its own; then the entries are what can be counted.
    yield _number(channel.distinct if source else channel.records - channel.duplicates)
    yield _number(channel.in_flight) if source else ""
    yield Text(_number(channel.missing), style="bold red" if channel.missing else "") if source else ""
    yield _number(channel.duplicates)
    yield _number(channel.refused) if source else ""
    for quantile in ("p50", "p99"):
        yield f"{channel.latency[quantile]:,.1f}" if channel.latency else ""


def _senders(balance: Balance) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("channel", overflow="fold")
    table.add_column("sender", overflow="fold")
    for title in ("epoch", "first", "last", "records", "present", "missing", "doubled"):
        table.add_column(title, justify="right", no_wrap=True)
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
    yield _number(one.distinct)
    yield Text(_number(one.missing), style="bold red" if one.missing else "")
    yield _number(one.duplicates)


def _findings(balance: Balance) -> Iterator[Text]:
    gaps = [(channel.channel, gap) for channel in balance.channels for gap in channel.gaps]
    for name, gap in gaps[:NAMED]:
        range_ = f"{gap.first}" if gap.size == 1 else f"{gap.first}–{gap.last} ({_number(gap.size)} records)"
        yield Text(f"{printable(name)} misses {printable(gap.sender)}/{gap.epoch}: {range_}", style="red")
    if len(gaps) > NAMED:
        yield Text(f"and {_number(len(gaps) - NAMED)} more ranges", style="red")
    for channel in balance.channels:
        if channel.unread:
            yield Text(
                f"{printable(channel.channel)}: {_number(channel.unread)} records are not read yet; they count as"
                " in flight.",
                style="yellow",
            )
        if channel.without_identity:
            yield Text(
                f"{printable(channel.channel)}: {_number(channel.without_identity)} entries carry no identity"
                " and can only be counted.",
                style="yellow",
            )
        if channel.unknown_seconds:
            spell = timedelta(seconds=round(channel.unknown_seconds, 3))
            yield Text(
                f"{printable(channel.channel)}: for {spell} (h:mm:ss) the source was not heard and cannot be asked"
                " again; what it sent then is unknown.",
                style="yellow",
            )


def _verdict(balance: Balance) -> Text:
    missing = sum(channel.missing for channel in balance.channels)
    age = _age(balance.as_of, balance.at)
    if missing:
        return Text(f"Not whole: {_number(missing)} records are missing{age}.", style="bold red")
    if not any(channel.records or channel.claimed for channel in balance.channels):
        return Text(f"Nothing was counted yet{age}.", style="bold")
    in_flight = sum(channel.in_flight for channel in balance.channels)
    known = "Whole" if not balance.unknown_seconds else "Whole where it is known"
    flying = f"; {_number(in_flight)} records are in flight" if in_flight else ""
    return Text(f"{known}: nothing is missing{flying}{age}.", style="bold green")


def _age(as_of: Micros | None, at: Micros) -> str:
    """When the verdict was true, unless that is now."""
    if as_of is None or at - as_of <= _FRESH:
        return ""
    then, now = (datetime.fromtimestamp(micros // 1_000_000, UTC) for micros in (as_of, at))
    return then.strftime(f", as of {'' if then.date() == now.date() else '%Y-%m-%d '}%H:%M:%S UTC")


def _number(value: int) -> str:
    return f"{value:,}"


def printable(name: str) -> str:
    """A name from outside, with what would move the cursor or colour the screen spelled out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)
