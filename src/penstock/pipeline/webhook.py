"""Alarms, posted to whoever wants to know: signed as Standard Webhooks are, in order, and never in the way.

Each beginning and each end of an alarm is one message. A message that does not arrive is sent again under the same id;
when too many wait, the oldest is dropped and counted.
"""

import http.client
import json
import logging
import threading
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

from penstock.audit.rules.base import Alarm
from penstock.audit.settings import AuditSettings
from penstock.core.clock import Clock, SystemClock
from penstock.core.errors import PenstockError, Unavailable
from penstock.core.retry import retrying
from penstock.core.signatures import signed

TIMEOUT = 10.0
DRAIN = 2.0
MOST = 1_000
SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""The pause that a server asks for is heard within these bounds, in seconds."""
LATER = (408, 429)

log = logging.getLogger(__name__)

Tell = Callable[[Sequence[Alarm]], None]
"""Takes the alarms that stand now. Returns at once."""


@contextmanager
def telling(settings: AuditSettings, pipeline: str) -> Iterator[Tell]:
    """Post to the webhook of the settings while the body runs; without one, nothing is told."""
    if not settings.webhook:
        yield lambda standing: None
        return
    webhook = Webhook(settings.webhook, pipeline, settings.key())
    try:
        yield webhook.tell
    finally:
        webhook.close()


class Webhook:
    """A thread that posts what changed. `delivered`, `refused` and `dropped` count messages."""

    def __init__(
        self,
        url: str,
        pipeline: str,
        key: bytes = b"",
        clock: Clock | None = None,
        timeout: float = TIMEOUT,
        most: int = MOST,
    ) -> None:
        self._url, self._pipeline, self._key = url, pipeline, key
        self._clock = clock or SystemClock()
        self._timeout, self._most = timeout, most
        # The path and the query may be secret.
        self._who = f"the webhook at {urlsplit(url).netloc}"
        self._opener = _opener()
        self._standing: dict[tuple[str, str], Alarm] = {}
        self._waiting: deque[_Message] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._enough = threading.Event()
        self._troubled = False
        self.delivered = self.refused = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def tell(self, standing: Sequence[Alarm]) -> None:
        """Take over which alarms stand; those that began or ended are posted soon. Returns at once."""
        before, self._standing = self._standing, {alarm.key: alarm for alarm in standing}
        messages = [
            *(self._message("alarm.ended", alarm) for key, alarm in before.items() if key not in self._standing),
            *(self._message("alarm.begun", alarm) for key, alarm in self._standing.items() if key not in before),
        ]
        if not messages:
            return
        with self._changed:
            self._waiting.extend(messages)
            if (over := len(self._waiting) - self._most) > 0:
                for _ in range(over):
                    self._waiting.popleft()
                if not self.dropped:
                    log.warning("%s is too slow: the oldest messages are dropped", self._who)
                self.dropped += over
            self._changed.notify()

    def close(self, drain: float = DRAIN) -> None:
        """Post what still waits, for so many seconds at most."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(drain)
        self._enough.set()
        if self._waiting:
            log.warning("%s did not take %d messages", self._who, len(self._waiting))

    def _message(self, kind: str, alarm: Alarm) -> "_Message":
        when = datetime.fromtimestamp(self._clock.now() / 1e6, UTC).isoformat().replace("+00:00", "Z")
        data = {"pipeline": self._pipeline, **alarm.to_json()}
        # In ASCII: whatever is in a name, the body is valid everywhere.
        body = json.dumps({"type": kind, "timestamp": when, "data": data}).encode("ascii")
        return _Message(f"msg_{uuid.uuid4().hex}", body)

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        retrying(self._deliver, self._enough, self._pause)

    def _pause(self, error: Unavailable) -> None:
        # Once for each outage: it may last for days.
        log.log(logging.DEBUG if self._troubled else logging.WARNING, "%s", error)
        self._troubled = True

    def _deliver(self, well: Callable[[], None]) -> None:
        """Post all that waits and will come, until closing; raises Unavailable when the first has to be sent again."""
        while message := self._next():
            try:
                self._post(message)
                self.delivered += 1
                if self._troubled:
                    log.info("%s takes messages again; %d were dropped so far", self._who, self.dropped)
            except _Final as error:
                self.refused += 1
                log.error("%s", error)
            self._troubled = False
            well()
            with self._changed:
                # It may have been dropped meanwhile.
                if self._waiting and self._waiting[0] is message:
                    self._waiting.popleft()

    def _next(self) -> "_Message | None":
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting and not self._enough.is_set() else None

    def _post(self, message: "_Message") -> None:
        headers = message.headers(self._key, self._clock.now() // 1_000_000)
        request = urllib.request.Request(self._url, message.body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout):
                return
        except urllib.error.HTTPError as error:
            with error:
                status, asked = error.code, error.headers.get("Retry-After")
        except urllib.error.URLError as error:
            raise Unavailable(self._who, str(error.reason)) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unavailable(self._who, f"{type(error).__name__} {error}".strip()) from error
        if status >= 500 or status in LATER:
            raise Unavailable(self._who, f"it answers {status}", self._asked(asked))
        raise _Final(self._who, status)

    def _asked(self, retry_after: str | None) -> float | None:
        """The pause that the server asks for, in seconds or as a date."""
        if retry_after is None:
            return None
        try:
            if retry_after.strip().isdecimal():
                seconds = float(retry_after)
            else:
                seconds = parsedate_to_datetime(retry_after).timestamp() - self._clock.now() / 1e6
        except (ValueError, OverflowError):
            return None
        return min(max(seconds, SHORTEST_PAUSE), LONGEST_PAUSE)


@dataclass(frozen=True, slots=True, eq=False)
class _Message:
    id: str
    body: bytes

    def headers(self, key: bytes, seconds: int) -> Mapping[str, str]:
        """The id stays, the time is that of each attempt: receivers refuse what was signed long ago."""
        about = {"Content-Type": "application/json", "User-Agent": "penstock"}
        return {**about, **signed(key, self.id, seconds, self.body)}


class _Final(PenstockError):
    """Raised when a message will never be taken."""

    def __init__(self, who: str, status: int) -> None:
        super().__init__(who, status)
        self.who, self.status = who, status

    def __str__(self) -> str:
        why = (
            "redirects are not followed, give the address itself"
            if self.status < 400
            else "the message is not sent again"
        )
        return f"{self.who} answers {self.status}: {why}"


def _opener() -> urllib.request.OpenerDirector:
    """Speaks HTTP, and follows nobody: a redirect would carry the alarms to an address that nobody has set."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener
