"""Writes to Kafka: acknowledged by all in-sync replicas, in order, each record once per producer."""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.channels.common import settle
from penstock.core.errors import PenstockError, Refused, Unavailable
from penstock.core.record import Headers, Record

_NEW_WITHIN = 1.0
"""Seconds until all brokers know a new topic."""
_FLUSH = 5.0
"""Seconds to send what is in flight when a sender is closed."""


BATCH = 1_000_000
"""Bytes of a batch: a little less than topics accept by default."""


class KafkaSender:
    """`producer` makes a producer for batches of a size; `limit` is the largest batch of a topic."""

    def __init__(self, producer: Callable[[int], Producer], limit: Callable[[str], int | None]) -> None:
        self._producer, self._limit = producer, limit
        self._order = asyncio.Lock()
        self._usual = _Outlet(producer(BATCH))
        self._outlets: dict[str, _Outlet] = {}
        self._closing = threading.Event()

    async def send(self, channel: str, records: Sequence[Record]) -> None:
        if not records:
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        left = len(records)

        def delivered(error: KafkaError | None, _: Message) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                loop.call_soon_threadsafe(settle, done, _error_of(channel, error))
            elif left == 0:
                loop.call_soon_threadsafe(settle, done, None)

        try:
            await self._launch(channel, records, delivered)
            await done
        finally:
            done.cancel()  # Reports that come later are ignored.

    async def _launch(
        self, channel: str, records: Sequence[Record], delivered: Callable[[KafkaError | None, Message], None]
    ) -> None:
        # Otherwise, two calls that wait for room in the queue could overtake each other.
        async with self._order:
            if channel not in self._outlets:
                self._outlets[channel] = await asyncio.to_thread(self._find_outlet, channel)
            produce = self._outlets[channel].producer.produce
            # Inlined: the collector spends most of its time here.
            for record in records:
                headers: list[tuple[str, str | bytes | None]] = [*record.headers()]
                if record.extra:
                    _check_names(channel, record.extra)
                while True:
                    try:
                        produce(channel, record.value, record.key, on_delivery=delivered, headers=headers)
                        break
                    except BufferError:
                        await asyncio.sleep(0.01)
                    except KafkaException as error:
                        raise _error_of(channel, error.args[0]) from error

    def _find_outlet(self, channel: str) -> "_Outlet":
        """The producer for a channel; Unavailable if it does not exist. The client would notice after 30 s."""
        until = math.inf
        while not self._closing.is_set():
            try:
                error = self._usual.producer.list_topics(channel, timeout=5).topics[channel].error
                if error is None:
                    return self._outlet(self._limit(channel))
            except (KafkaException, Unavailable):
                self._closing.wait(0.05)
                continue
            if error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                return self._usual
            until = min(until, time.monotonic() + _NEW_WITHIN)
            if time.monotonic() > until:
                raise Unavailable(f"channel {channel}", error.str())
            time.sleep(0.05)
        raise Unavailable("Kafka", "no broker answered before this sender was closed")

    def _outlet(self, limit: int | None) -> "_Outlet":
        """The producer for topics with this limit: a broker refuses a batch as a whole."""
        if limit is None or limit > BATCH:
            return self._usual
        outlets = {outlet.limit: outlet for outlet in self._outlets.values()}
        return outlets.get(limit) or _Outlet(self._producer(max(1, limit * 9 // 10)), limit)

    def close(self) -> None:
        self._closing.set()
        until = time.monotonic() + _FLUSH
        for outlet in {self._usual, *self._outlets.values()}:
            outlet.close(until)


class _Outlet:
    """A producer, and a thread that polls its delivery reports."""

    def __init__(self, producer: Producer, limit: int | None = None) -> None:
        self.producer, self.limit = producer, limit
        self._closing = threading.Event()
        self._poll = threading.Thread(target=self._deliver, name="kafka-sender", daemon=True)
        self._poll.start()

    def _deliver(self) -> None:
        while not self._closing.is_set():
            self.producer.poll(0.05)

    def close(self, until: float) -> None:
        if self.producer.flush(max(0.0, until - time.monotonic())):
            # Otherwise they could still arrive after a retry, and be there twice.
            self.producer.purge()
            self.producer.flush(1)
        self._closing.set()
        self._poll.join()


def _check_names(channel: str, headers: Headers) -> None:
    """Raise Refused for a name that is not valid text: the client would end the process."""
    try:
        for name, _ in headers:
            name.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"a record for {channel}", f"the name of a header is not valid text: {error.reason}") from error


def _error_of(channel: str, error: KafkaError) -> PenstockError:
    """The error for a record that was not delivered: Refused if a retry cannot help."""
    if error.code() in _NEVER:
        return Refused(f"a record for {channel}", error.str())
    return Unavailable("Kafka", error.str())


_NEVER = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD}
