"""`penstock verify`: per sender, the numbers must have no gap; on a channel, a file or standard input."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import Annotated

import typer

from penstock.audit.updates import Fields
from penstock.audit.verdict import Report, Verdict
from penstock.audit.verify import Verifier
from penstock.cli.channels import found
from penstock.cli.feeding import Feeding, Log, Stream
from penstock.cli.options import AsJson, Folder, Profile, Servers, parse_duration
from penstock.cli.standard import console
from penstock.cli.verdict import show
from penstock.core.clock import Clock, SystemClock
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured, PenstockError, Unavailable
from penstock.supervise.signals import stop_on_signals

STDIN = "-"
_EXITS = {Verdict.WHOLE: 0, Verdict.LOSS: 1, Verdict.UNCERTAIN: 2, Verdict.NOTHING: 2}


def verify(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CHANNEL|FILE|-",
            help="- is standard input. What exists as a file, has a slash or ends in .json or .jsonl is a file."
            " Everything else is a channel.",
            show_default=False,
        ),
    ],
    seq: Annotated[str, typer.Option(help="The field of the number; a.b is the field b in the object a.")] = "seq",
    sender: Annotated[str, typer.Option(help="The field of the sender's name; '' for a single sender.")] = "sender",
    epoch: Annotated[str, typer.Option(help="The field of the sender's life, if there is one; '' for none.")] = "epoch",
    time: Annotated[
        str, typer.Option(help="The field of the microseconds at which it was sent; '' for none.")
    ] = "time",
    first: Annotated[
        int | None,
        typer.Option(help="The number that each sender must begin with.", show_default="the lowest that comes"),
    ] = None,
    every: Annotated[
        str, typer.Option(metavar="DURATION", help="How often to report what came since; 0s: only at the end.")
    ] = "10s",
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes to the channel, until Ctrl-C.")
    ] = False,
    grace: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long what is missing at the end of a channel may still come."),
    ] = "2s",
    longest: Annotated[int, typer.Option(min=1, max=1 << 30, help="The bytes that a line may have.")] = 1 << 20,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Verify that no number is missing: per sender, whatever the order of arrival.

    Reads JSON lines such as {"seq": 1000, "sender": "sender1", "time": 0} from a file or standard input; of a channel,
    the headers of its records, or such a payload where they tell nothing, from its beginning to its end of now.
    A channel over tcp:// is what comes from now on, until Ctrl-C.

    Exits with 0 when all is whole, 1 when a number is missing, 2 when something could not be read or nothing came.
    """
    clock, fields = SystemClock(), Fields(_path("--seq", seq), sender, epoch, time)
    lapse, patience = parse_duration("--every", every).total_seconds(), parse_duration("--grace", grace).total_seconds()

    def verified(feeding: Feeding) -> Report:
        return _verified(feeding, fields, Verifier(clock, first), clock, lapse, as_json)

    if what == STDIN:
        end = verified(Stream("standard input", 0, longest, clock, live=True))
    elif _is_file(what):
        if follow:
            raise Misconfigured("--follow", "a file has an end", f"pipe it: tail -n +1 -f {what} | penstock verify -")
        with _opened(what) as descriptor:
            end = verified(Stream(what, descriptor, longest, clock, live=False))
    else:
        channels = _channels(what, folder, profile, servers)
        # What keeps nothing has no end of now: all of it is still to come.
        end = verified(Log(channels, what, clock, follow or not channels.promise.replay, patience))
    raise typer.Exit(_EXITS[end.verdict])


def _verified(
    feeding: Feeding, fields: Fields, verifier: Verifier, clock: Clock, lapse: float, as_json: bool
) -> Report:
    """Feed the verifier, tell its reports as they are due, and the last one at the end, whatever ended it."""
    with stop_on_signals() as stop:
        due = clock.elapsed() + lapse
        try:
            for _ in feeding.feed(verifier, fields, stop):
                if lapse and clock.elapsed() >= due:
                    _tell(verifier.report(), as_json)
                    due += lapse * ((clock.elapsed() - due) // lapse + 1)
        except PenstockError as error:
            verifier.doubt(f"Reading broke off: {error}.")
        end = verifier.end()
        _tell(end, as_json)
    return end


def _tell(report: Report, as_json: bool) -> None:
    # A report that cannot be written must not end with the code of a verdict.
    try:
        typer.echo(json.dumps(report.to_json()) if as_json else _shown(report))
    except OSError as error:
        raise Unavailable("standard output", error.strerror or str(error)) from error


def _shown(report: Report) -> str:
    screen, text = console(), StringIO()
    # The screen knows its width and colours by now; what it would do about a broken pipe is not for us.
    screen.file = text
    show(report, screen)
    return text.getvalue().rstrip("\n")


def _is_file(what: str) -> bool:
    return "/" in what or what.endswith((".json", ".jsonl")) or Path(what).exists()


@contextmanager
def _opened(path: str) -> Iterator[int]:
    with ExitStack() as held:
        try:
            file = held.enter_context(Path(path).open("rb", buffering=0))
        except OSError as error:
            raise Misconfigured(path, f"it cannot be read: {error.strerror}") from error
        yield file.fileno()


def _channels(channel: str, folder: Path, profile: str | None, servers: str | None) -> Channels:
    """Where the channel lies; Misconfigured when nothing runs, or there is no such channel."""
    try:
        channels = found(folder, profile, servers)
        channels.bounds(channel)
    except Misconfigured as error:
        way_out = f"{error.way_out}, or tell where it is: --servers ADDRESS; {_FILES.format(channel)}"
        raise Misconfigured(f"channel {channel}", f"{error.place}: {error.problem}", way_out) from error
    except Unavailable as error:
        raise Misconfigured(f"channel {channel}", str(error), _FILES.format(channel)) from error
    return channels


_FILES = "a file is written ./{}, or ends in .json or .jsonl"


def _path(option: str, path: str) -> str:
    if not path:
        raise Misconfigured(option, "without a number there is nothing to verify", "name the field of the number")
    return path
