"""The reports of `penstock verify`, for a terminal."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.audit.hops import Gap
from penstock.audit.verdict import Lapse, Report, SenderCount, Verdict
from penstock.core.text import printable

SHOWN = 20
"""So many senders have a line, so many gaps are named; then it is said how many more there are."""
_NAME, _WIDEST = 8, 10_000
"""The characters of a sender's name that are on a line at least; and those of a table at most."""
_STYLES = {Verdict.WHOLE: "bold green", Verdict.LOSS: "bold red"}


def show(report: Report, screen: Console) -> None:
    """Print a report: a line for a lapse of time and a few for its new gaps; at the end, all that was found."""
    if not report.final:
        _say(screen, _lapse(report))
        _gaps(report, screen)
        return
    if shown := _shown(report.by_sender):
        screen.print(_fitted(_table(shown), screen), crop=False)
    _others(report.by_sender, screen)
    _gaps(report, screen)
    for place, reason in report.refused:
        _say(screen, f"{place} cannot be read: {printable(reason)}", style="yellow")
    if (more := report.unreadable - len(report.refused)) > 0:
        _say(screen, f"and {more:,} more cannot be read", style="yellow")
    for said in (*report.notes, *report.doubts):
        _say(screen, printable(said), style="yellow")
    _say(screen, f"{_arrived(report.lapse)}.")
    _say(screen, _verdict(report), style=_STYLES.get(report.verdict, "bold yellow"))


def _say(screen: Console, text: str, style: str = "") -> None:
    # A line stays one: other programs may read it, and terminals wrap by themselves.
    screen.print(Text(text, style=style), soft_wrap=True)


def _lapse(report: Report) -> str:
    lapse, moment = report.lapse, datetime.fromtimestamp(report.at // 1_000_000, UTC)
    told = [f"{moment:%H:%M:%S} UTC: {_arrived(lapse)}"]
    if lapse.missing or lapse.healed or report.missing:
        told.append(f"{lapse.missing:,} newly missing, {lapse.healed:,} came late, {report.missing:,} missing now")
    if lapse.unreadable:
        told.append(f"{lapse.unreadable:,} cannot be read")
    return "; ".join(told)


def _arrived(lapse: Lapse) -> str:
    told = f"{_records(lapse.records)} in {lapse.seconds:,.1f} s"
    if lapse.rate:
        told += f", {lapse.rate:,.0f}/s"
    if (latency := lapse.latency) is not None:
        told += f"; latency {latency.min:,.1f} min, {latency.avg:,.1f} avg, {latency.max:,.1f} max ms"
    return told


def _table(senders: Sequence[SenderCount]) -> Table:
    lives = any(one.epoch for one in senders)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("sender", overflow="fold")
    for title in (*(["epoch"] if lives else ()), "records", "first", "last", "missing", "doubled", "out of\norder"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in senders:
        table.add_row(*_row(one, lives))
    return table


def _fitted(table: Table, screen: Console) -> Table:
    """Long names are folded where the screen is narrow; numbers never. Rather too wide than without the names."""
    wide = screen.options.update(width=_WIDEST)
    whole, names = (Measurement.get(screen, wide, one).maximum for one in (table, Group(*table.columns[0].cells)))
    if whole > screen.width:
        kept = max(names - (whole - screen.width), min(names, _NAME))
        table.columns[0].width, table.width = kept, whole - names + kept
    return table


def _shown(senders: Sequence[SenderCount]) -> Sequence[SenderCount]:
    """All where they are few; otherwise the worst of those that are not clean."""
    if len(senders) <= SHOWN:
        return senders
    found = [one for one in senders if not one.clean]
    return sorted(found, key=lambda one: (-one.missing, -one.doubled, -one.out_of_order))[:SHOWN]


def _row(one: SenderCount, lives: bool) -> Iterator[Text | str]:
    yield Text(printable(one.sender))
    if lives:
        yield str(one.epoch)
    yield f"{one.records:,}"
    # Numbers that name a record are written as the sender writes them.
    yield str(one.first)
    yield str(one.last)
    yield Text(f"{one.missing:,}", style="bold red" if one.missing else "")
    yield f"{one.doubled:,}"
    yield f"{one.out_of_order:,}"


def _others(senders: Sequence[SenderCount], screen: Console) -> None:
    if len(senders) <= SHOWN:
        return
    clean = sum(one.clean for one in senders)
    if (more := len(senders) - clean - SHOWN) > 0:
        _say(screen, f"and {more:,} more senders that miss, repeat or reorder")
    _say(screen, f"{clean:,} senders are whole and in order")


def _gaps(report: Report, screen: Console) -> None:
    for gap in report.gaps[:SHOWN]:
        _say(screen, _gap(gap), style="red")
    if (more := len(report.gaps) - SHOWN) > 0:
        _say(screen, f"and {more:,} more ranges; --json names them all", style="red")


def _gap(gap: Gap) -> str:
    life = f"/{gap.epoch}" if gap.epoch else ""
    return f"{printable(gap.sender)}{life} misses {gap.numbers}"


def _verdict(report: Report) -> str:
    of = f"{_records(report.records)} of {report.senders:,} sender{'' if report.senders == 1 else 's'}"
    match report.verdict:
        case Verdict.LOSS:
            perhaps = "; they may be among what cannot be read" if report.unreadable else ""
            are = "record is" if report.missing == 1 else "records are"
            return f"Not whole: {report.missing:,} {are} missing beside {of}{perhaps}."
        case Verdict.UNCERTAIN if not report.records:
            return "Uncertain: nothing could be read."
        case Verdict.UNCERTAIN:
            return f"Uncertain: nothing is missing among {of}, but not everything could be read."
        case Verdict.NOTHING:
            return "Nothing to verify: there was no record."
        case Verdict.WHOLE:
            return f"Whole: nothing is missing among {of}."


def _records(number: int) -> str:
    return f"{number:,} record{'' if number == 1 else 's'}"
