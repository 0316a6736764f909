"""What stands behind the question mark of an address, read strictly: a word that is not known is an error."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

from starlette.requests import Request

from penstock.collect.door import why_no_sender
from penstock.core.clock import duration
from penstock.core.text import did_you_mean
from penstock.web.problems import Problem

LARGEST = 2**63 - 1
_IDENTITY = ("sender", "epoch", "seq")
_KEY = "the header idempotency-key"


@dataclass(frozen=True)
class Whose:
    """A sender that numbers by itself: its name, its life, and the number of the first record of a body."""

    sender: str
    epoch: int
    seq: int


@dataclass(frozen=True)
class Asked:
    """How a body is to be taken."""

    lines: bool = False
    oneway: bool = False
    answer: float | None = None
    whose: Whose | None = None

    @classmethod
    def of(cls, request: Request, source: str, own: str, longest: timedelta) -> "Asked":
        given = parameters(request, ("lines", "oneway", "answer", *_IDENTITY))
        for flag in ("lines", "oneway"):
            if given.get(flag, "") != "":
                raise Problem(400, f"?{flag}", "it takes no value", f"write ?{flag} alone")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        answer = seconds(given, "answer", longest)
        if answer is not None and "oneway" in given:
            raise Problem(400, "?answer", "who sends one way gets no answer", "leave out ?oneway")
        lines = "lines" in given or kind in ("application/x-ndjson", "application/jsonl")
        return cls(lines, "oneway" in given, answer, _whose(request, given, source, own))


def parameters(request: Request, known: Collection[str]) -> Mapping[str, str]:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in known:
            way_out = did_you_mean(name, known, f"the parameters are {', '.join(known)}")
            raise Problem(400, f"?{name[:100]}", "this is not a parameter", way_out)
        if name in given:
            raise Problem(400, f"?{name}", "it is there twice", "give it once")
        given[name] = value
    return given


def seconds(given: Mapping[str, str], name: str, longest: timedelta) -> float | None:
    if name not in given:
        return None
    try:
        found = duration(given[name])
    except ValueError:
        raise Problem(400, f"?{name}", "this is not a duration", f"write ?{name}=10s") from None
    if found > longest:
        way_out = f"at most {longest.total_seconds():g}s, and ask again"
        raise Problem(400, f"?{name}", "this is too long", way_out)
    return found.total_seconds()


def _whose(request: Request, given: Mapping[str, str], source: str, own: str) -> Whose | None:
    key = request.headers.getlist("idempotency-key")
    said = {name: given[name] for name in _IDENTITY if name in given}
    if key:
        # Keys without an order would have to be kept for ever. A number says the same, and is kept as a run.
        found = re.fullmatch(r'"?(.+)/([0-9]+)/([0-9]+)"?', key[0]) if len(key) == 1 else None
        if found is None:
            way_out = "write SENDER/EPOCH/SEQ: your name, a number that grows with each of your lives, one that counts"
            raise Problem(400, _KEY, "it tells no sender, epoch and number", way_out)
        named = dict(zip(_IDENTITY, found.groups(), strict=True))
        if said and said != named:
            raise Problem(400, _KEY, "the address tells another identity", "give it once")
        said = named
    if not said:
        return None
    place = _KEY if key else "?sender, ?epoch, ?seq"
    if missing := [name for name in _IDENTITY if name not in said]:
        raise Problem(400, place, f"{' and '.join(missing)} is missing", "give all three, or none")
    why = why_no_sender(said["sender"], source) or why_no_sender(said["sender"], own)
    if why is not None:
        raise Problem(400, place, why, "choose another name")
    return Whose(said["sender"], _whole(place, "epoch", said["epoch"]), _whole(place, "seq", said["seq"]))


def _whole(place: str, what: str, text: str) -> int:
    # Twenty digits are beyond all bounds already: longer ones are not even read.
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) > LARGEST:
        raise Problem(400, place, f"{what} is no number that is good here", f"write one from 0 to {LARGEST}")
    return int(text)
