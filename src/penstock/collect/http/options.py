"""Options of a POST: its query parameters and headers."""

import re
from dataclasses import dataclass
from datetime import timedelta

from starlette.requests import Request

from penstock.collect.door import why_no_sender
from penstock.web.query import Query, integer
from penstock.web.responses import Problem

_IDENTITY = ("sender", "epoch", "seq")
_KEY = "the header idempotency-key"


@dataclass(frozen=True)
class SenderIdentity:
    """A sender that numbers its records: its name, its epoch, and the number of the first record of a body."""

    sender: str
    epoch: int
    seq: int


@dataclass(frozen=True)
class PostOptions:
    """How a body is read and answered. `answer`: seconds to wait for the row of the record."""

    lines: bool = False
    oneway: bool = False
    answer: float | None = None
    identity: SenderIdentity | None = None

    @classmethod
    def of(cls, request: Request, source: str, own: str, longest: timedelta) -> "PostOptions":
        query = Query(request, ("lines", "oneway", "answer", *_IDENTITY))
        lines, oneway = query.flag("lines"), query.flag("oneway")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        answer = query.seconds("answer", longest)
        if answer is not None and oneway:
            raise Problem(400, "?answer", "who sends one way gets no answer", "leave out ?oneway")
        lines = lines or kind in ("application/x-ndjson", "application/jsonl")
        return cls(lines, oneway, answer, _identity(request, query, source, own))


def _identity(request: Request, query: Query, source: str, own: str) -> SenderIdentity | None:
    key = request.headers.getlist("idempotency-key")
    given = {name: text for name in _IDENTITY if (text := query.text(name)) is not None}
    if key:
        # Keys without an order would have to be kept for ever. Numbers are kept as runs.
        found = re.fullmatch(r'"?(.+)/([0-9]+)/([0-9]+)"?', key[0]) if len(key) == 1 else None
        if found is None:
            fix = "write SENDER/EPOCH/SEQ: your name, a number that grows with each of your lives, one that counts"
            raise Problem(400, _KEY, "it tells no sender, epoch and number", fix)
        named = dict(zip(_IDENTITY, found.groups(), strict=True))
        if given and given != named:
            raise Problem(400, _KEY, "the address tells another identity", "give it once")
        given = named
    if not given:
        return None
    place = _KEY if key else "?sender, ?epoch, ?seq"
    if missing := [name for name in _IDENTITY if name not in given]:
        raise Problem(400, place, f"{' and '.join(missing)} is missing", "give all three, or none")
    why = why_no_sender(given["sender"], source) or why_no_sender(given["sender"], own)
    if why is not None:
        raise Problem(400, place, why, "choose another name")
    epoch, seq = (integer(_KEY if key else f"?{name}", given[name]) for name in ("epoch", "seq"))
    return SenderIdentity(given["sender"], epoch, seq)
