"""Sends alarms to a webhook, in order, without blocking the audit.

Each beginning and each end of an alarm is one message. A message that does not arrive is sent again under the same id;
when too many wait, the oldest is dropped and counted.
"""

import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import httpx

from penstock.audit.rules import Alarm
from penstock.audit.settings import AuditSettings
from penstock.core.errors import Unavailable, retry
from penstock.web.webhook import TIMEOUT, Message, Rejected, Webhook

DRAIN = 2.0
MOST = 1_000

log = logging.getLogger(__name__)

Update = Callable[[Sequence[Alarm]], None]
"""Takes the alarms that are on. Returns at once."""


@contextmanager
def sending_alarms(settings: AuditSettings, pipeline: str) -> Iterator[Update]:
    """Send to the webhook of the settings while the body runs; without one, nothing is sent."""
    if not settings.webhook:
        yield lambda active: None
        return
    sender = AlarmSender(settings.webhook, pipeline, settings.key())
    try:
        yield sender.update
    finally:
        sender.close()


class AlarmSender:
    """A thread that sends alarms that began or ended. `delivered`, `refused` and `dropped` count messages."""

    def __init__(self, url: str, pipeline: str, key: bytes = b"", timeout: float = TIMEOUT, most: int = MOST) -> None:
        self._webhook, self._pipeline, self._most = Webhook(url, key), pipeline, most
        self._client = _client(timeout)
        self._active: dict[tuple[str, str], Alarm] = {}
        self._waiting: deque[Message] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._enough = threading.Event()
        self._failing = False
        self.delivered = self.refused = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def update(self, active: Sequence[Alarm]) -> None:
        """Take the alarms that are on; those that began or ended are sent soon. Returns at once."""
        before, self._active = self._active, {alarm.key: alarm for alarm in active}
        changes = [("alarm.ended", alarm) for key, alarm in before.items() if key not in self._active]
        changes += [("alarm.begun", alarm) for key, alarm in self._active.items() if key not in before]
        with self._changed:
            for kind, alarm in changes:
                self._waiting.append(self._webhook.message(kind, {"pipeline": self._pipeline, **alarm.to_json()}))
            while len(self._waiting) > self._most:
                self._waiting.popleft()
                if not self.dropped:
                    log.warning("%s is too slow: the oldest messages are dropped", self._webhook.who)
                self.dropped += 1
            self._changed.notify()

    def close(self, drain: float = DRAIN) -> None:
        """Post the waiting messages, for at most `drain` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(drain)
        self._enough.set()
        if self._waiting:
            log.warning("%s did not take %d messages", self._webhook.who, len(self._waiting))

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._client:
            retry(self._deliver, self._enough, self._pause)

    def _pause(self, error: Unavailable) -> None:
        # Logged once for each outage: it may last for days.
        log.log(logging.DEBUG if self._failing else logging.WARNING, "%s", error)
        self._failing = True

    def _deliver(self, well: Callable[[], None]) -> None:
        """Post waiting messages until closing; raise Unavailable if the first must be sent again."""
        while message := self._next():
            try:
                self._webhook.post(self._client, message)
                self.delivered += 1
                if self._failing:
                    log.info("%s takes messages again; %d were dropped so far", self._webhook.who, self.dropped)
            except Rejected as error:
                self.refused += 1
                log.error("%s", error)
            self._failing = False
            well()
            with self._changed:
                # It may have been dropped in the meantime.
                if self._waiting and self._waiting[0] is message:
                    self._waiting.popleft()

    def _next(self) -> Message | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting and not self._enough.is_set() else None


def _client(timeout: float) -> httpx.Client:
    """Make a client with the proxy of the environment; without it, if that proxy is invalid."""
    verify = ssl.create_default_context()
    try:
        return httpx.Client(verify=verify, timeout=timeout)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        log.warning("alarms are sent without the proxy of the environment: %s", error)
        return httpx.Client(verify=verify, timeout=timeout, trust_env=False)
