"""The progress of a pipeline or of services on the terminal: start, run, stop."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from penstock.run.services import RunningPipeline
from penstock.supervise.process import file_limit_warning, raise_file_limit
from penstock.supervise.supervisor import Event, EventKind, last_line

_STYLES = {
    EventKind.READY: "green",
    EventKind.DIED: "bold red",
    EventKind.RESTARTING: "yellow",
    EventKind.KILLED: "yellow",
}
NOTHING_LOST = (
    "nothing is lost: acknowledged records are in the channels and spools, and the next run continues from there"
)


class Screen:
    """Lines with the time since the start, or with the date and time in a log; a bar while jars are fetched."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._since = time.monotonic()
        self._reasons: dict[str, str] = {}
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        # Nothing is started yet: a signal ends the process at once.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        return self

    def __exit__(self, *_: object) -> None:
        self._end_bar()

    def say(self, text: str, style: str = "") -> None:
        self._end_bar()
        elapsed = f"{time.monotonic() - self._since:6.1f} s"
        when = elapsed if self._console.is_terminal else time.strftime("%Y-%m-%d %H:%M:%S")
        self._console.print(Text(f"{when}  ", style="dim"), Text(text, style=style), sep="")

    def event(self, event: Event) -> None:
        if event.kind is not EventKind.STARTED:
            self.say(str(event), _STYLES.get(event.kind, ""))
        if not event.lines or self._reasons.get(event.service) == (reason := last_line(event.lines)):
            # In a restart loop the reason is shown once.
            return
        self._reasons[event.service] = reason
        for line in event.lines[-8:]:
            self._console.print(Text(f"          | {line}", style="dim"))

    def jars(self, done: int, total: int) -> None:
        """Show the download of the jars from Maven Central, on the first run."""
        if self._bar is None:
            self.say("fetching the jars of Kafka and of Spark's connector (once)")
            columns = (TextColumn("          "), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def raise_file_limit(self) -> None:
        """Raise the limit of open files; a warning if that is not possible."""
        if few := file_limit_warning(raise_file_limit()):
            self.say(few, "bold yellow")

    def running(self, name: str, running: RunningPipeline, folder: Path) -> None:
        where = f"the page is at {running.page}" if running.page else f"its channels are at {running.channels}"
        self.say(f"{name} runs; {where}", "bold green")
        option = folder_option(folder)
        self.say(f"for details: penstock status{option}, penstock audit{option}; to stop: Ctrl-C")

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """A second Ctrl-C kills processes that have not stopped yet: say what that means for the records."""
        try:
            yield
        except KeyboardInterrupt:
            self.say(f"killed before everything had stopped; {NOTHING_LOST}", "yellow")
            raise


def folder_option(folder: Path) -> str:
    """The option with which a command finds this folder from the current one."""
    return "" if folder.resolve() == Path.cwd() else f" --folder {folder}"
