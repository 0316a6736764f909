"""What can go wrong, in four families, by what the caller does about it.

PenstockError
├── Misconfigured   the user changes something and starts again
├── Unavailable     somebody else is away; the same call may work later
├── Refused         these records are not taken, for this reason; the rest goes on
└── Unaccounted     the balance does not close; a person has to look

Every error keeps its facts as fields, makes its sentence from them, and survives pickling between processes.
"""

from collections.abc import Mapping, Sequence

from penstock.core.addresses import redacted


class PenstockError(Exception):
    """The root of all errors that Penstock raises on purpose."""


class Misconfigured(PenstockError):
    """Raised when a setting, a pipeline or a machine is not as it has to be: `place`, what is wrong, the way out."""

    def __init__(self, place: str, problem: str, fix: str = "") -> None:
        place, problem, fix = redacted(place), redacted(problem), redacted(fix)
        super().__init__(place, problem, fix)
        self.place, self.problem, self.fix = place, problem, fix

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


class SeveralMisconfigured(Misconfigured):
    """Raised when several things are not as they have to be: each is one of `errors`."""

    def __init__(self, errors: tuple[Misconfigured, ...]) -> None:
        super().__init__("", "\n".join(map(str, errors)))
        self.args = (errors,)
        self.errors = errors

    def __str__(self) -> str:
        return "\n  ".join([f"{len(self.errors)} things are wrong:", *map(str, self.errors)])


def raise_all(errors: Sequence[Misconfigured]) -> None:
    """Raise what was found, if anything was: one as it is, several as one."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SeveralMisconfigured(tuple(errors))


def located(error: Misconfigured, lines: Mapping[str, str]) -> Misconfigured:
    """The same error, with the file and line at which its place is declared, as far as `lines` tells them."""
    if isinstance(error, SeveralMisconfigured):
        return SeveralMisconfigured(tuple(located(one, lines) for one in error.errors))
    for place, line in lines.items():
        if error.place == place or error.place.startswith((f"{place},", f"{place}.")):
            return Misconfigured(f"{line}, {error.place}", error.problem, error.fix)
    return error


class Unavailable(PenstockError):
    """Raised when a part that we depend on does not answer."""

    def __init__(self, service: str, reason: str, retry_after: float | None = None) -> None:
        service, reason = redacted(service), redacted(reason)
        super().__init__(service, reason, retry_after)
        self.service, self.reason, self.retry_after = service, reason, retry_after

    def __str__(self) -> str:
        later = f"; trying again in {self.retry_after:g} s" if self.retry_after is not None else ""
        return f"{self.service} is unavailable: {self.reason}{later}"


class Refused(PenstockError):
    """Raised when a record cannot be taken as it is. The record itself is kept by whoever catches this."""

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
