"""The progress of a pipeline or of services on the terminal: start, run, stop."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from penstock.run.services import RunningPipeline
from penstock.supervise.supervisor import Event, EventKind, last_line

_STYLES = {
    EventKind.READY: "green",
    EventKind.DIED: "bold red",
    EventKind.RESTARTING: "yellow",
    EventKind.KILLED: "yellow",
}
_QUIET = {EventKind.STARTED}


NOTHING_LOST = (
    "nothing is lost: acknowledged records are in the channels and spools, and the next run continues from there"
)


class Screen:
    """Lines with the time since the start; a bar while jars are fetched. Colours only on a terminal.

    `dated`: lines have the date and time instead, for logs.
    """

    def __init__(self, dated: bool = False) -> None:
        self._dated = dated
        self._console = Console(highlight=False, soft_wrap=True)
        self._since = time.monotonic()
        self._reasons: dict[str, str] = {}
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_bar()

    def say(self, text: str, style: str = "") -> None:
        self._end_bar()
        elapsed = f"{time.monotonic() - self._since:6.1f} s"
        when = time.strftime("%Y-%m-%d %H:%M:%S") if self._dated else elapsed
        self._console.print(Text(f"{when}  ", style="dim"), Text(text, style=style), sep="")

    def event(self, event: Event) -> None:
        if event.kind not in _QUIET:
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
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        assert self._task is not None
        self._bar.update(self._task, completed=done)

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

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def folder_option(folder: Path) -> str:
    """The option with which a command finds this folder from the current one."""
    return "" if folder.resolve() == Path.cwd() else f" --folder {folder}"
