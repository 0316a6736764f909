"""Errors, in four families by what the caller does about them.

PenstockError
├── Misconfigured   the user changes something and starts again
├── Unavailable     a service does not answer; the same call may work later
├── Refused         a record is not accepted; the others are processed
└── Unaccounted     records are missing; a person has to look

Every error keeps its facts as fields, makes its text from them, and can be pickled. `backoff` gives the pauses between
attempts; `retry` is the retry loop of threads and processes.
"""

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event

from penstock.core.text import redact

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two attempts."""
_LOG_AGAIN_AFTER = 60.0


class PenstockError(Exception):
    """The base class of all errors that Penstock raises."""


class Misconfigured(PenstockError):
    """Raised when a setting, a pipeline or a machine has to be changed: the place, the problem and the fix."""

    def __init__(self, location: str, problem: str, fix: str = "") -> None:
        location, problem, fix = redact(location), redact(problem), redact(fix)
        super().__init__(location, problem, fix)
        self.location, self.problem, self.fix = location, problem, fix

    def __str__(self) -> str:
        return f"{self.location}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


class SeveralMisconfigured(Misconfigured):
    """Raised when several things have to be changed: `errors` has one Misconfigured for each."""

    def __init__(self, errors: tuple[Misconfigured, ...]) -> None:
        super().__init__("", "\n".join(map(str, errors)))
        self.args = (errors,)
        self.errors = errors

    def __str__(self) -> str:
        return "\n  ".join([f"{len(self.errors)} problems:", *map(str, self.errors)])


def raise_all(errors: Sequence[Misconfigured]) -> None:
    """Raise the errors, if there are any: a single one as it is, several as SeveralMisconfigured."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SeveralMisconfigured(tuple(errors))


def located(error: Misconfigured, lines: Mapping[str, str]) -> Misconfigured:
    """The same error with the file and line at which its place is declared, if `lines` has them."""
    if isinstance(error, SeveralMisconfigured):
        return SeveralMisconfigured(tuple(located(one, lines) for one in error.errors))
    for location, line in lines.items():
        if error.location == location or error.location.startswith((f"{location},", f"{location}.")):
            return Misconfigured(f"{line}, {error.location}", error.problem, error.fix)
    return error


class Unavailable(PenstockError):
    """Raised when a service does not answer."""

    def __init__(self, service: str, reason: str, retry_after: float | None = None) -> None:
        service, reason = redact(service), redact(reason)
        super().__init__(service, reason, retry_after)
        self.service, self.reason, self.retry_after = service, reason, retry_after

    def __str__(self) -> str:
        later = f"; trying again in {self.retry_after:g} s" if self.retry_after is not None else ""
        return f"{self.service} is unavailable: {self.reason}{later}"


class Refused(PenstockError):
    """Raised when a record cannot be accepted. The caller keeps the record."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason

    def __str__(self) -> str:
        return f"{self.what} is refused: {self.reason}"


class Unaccounted(PenstockError):
    """Raised when records are missing: which channel, and the (sender, epoch, first, last) ranges or the reason."""

    def __init__(self, channel: str, missing: tuple[tuple[str, int, int, int], ...], reason: str = "") -> None:
        super().__init__(channel, missing, reason)
        self.channel, self.missing, self.reason = channel, missing, reason

    def __str__(self) -> str:
        if self.reason:
            return f"{self.channel}: {self.reason}"
        ranges = ", ".join(f"{sender}/{epoch}: {first}–{last}" for sender, epoch, first, last in self.missing)
        return f"{self.channel} misses {ranges}"


def backoff() -> Iterator[float]:
    """Seconds to wait before each attempt. They double, with jitter so that many clients do not return together."""
    delay = FIRST_PAUSE
    while True:
        yield delay * random.uniform(0.5, 1)
        delay = min(2 * delay, LONGEST_PAUSE)


def retry(
    work: Callable[[Callable[[], None]], None],
    stop: Event,
    on_error: Callable[[Unavailable], None] = lambda _: None,
    log: logging.Logger | None = None,
) -> None:
    """Call `work` until it returns or `stop` is set. After each Unavailable, call `on_error`, wait, and call it again.

    The pause doubles up to five seconds, unless the error has its own `retry_after`. `work` gets a function to call
    when it succeeds: that resets the pause. The log gets the same error once, until a minute without errors.
    """
    pause, logged, failed = FIRST_PAUSE, "", 0.0

    def succeeded() -> None:
        nonlocal pause, logged
        pause = FIRST_PAUSE
        if time.monotonic() - failed > _LOG_AGAIN_AFTER:
            logged = ""

    while not stop.is_set():
        try:
            work(succeeded)
            return
        except Unavailable as error:
            delay = pause if error.retry_after is None else error.retry_after
            failed = time.monotonic()
            if log is not None and logged != str(error):
                logged = str(error)
                log.warning("%s; retrying until it answers", error)
            on_error(Unavailable(error.service, error.reason, delay))
            stop.wait(delay)
            pause = min(2 * pause, LONGEST_PAUSE)
