"""Publish the accounts of stages on the bookmarks channel, and read the last ones."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from penstock.audit.account import Account, is_account
from penstock.audit.writers import Writer, Writers
from penstock.core.contracts import Channels
from penstock.core.errors import Refused
from penstock.core.record import Record
from penstock.core.scan import scan
from penstock.run.status import repeat, run_in_background

EVERY = 2.0

log = logging.getLogger(__name__)


@contextmanager
def accounting(
    channels: Channels, bookmarks: str, accounts: Callable[[], Iterable[Account]], every: float = EVERY
) -> Iterator[None]:
    """Publish changed accounts while the body runs, and a last time after it."""
    published: dict[str, Account] = {}

    def publish(post: Callable[[str, bytes, bytes], None]) -> None:
        for account in accounts():
            before = published.get(account.stage)
            if before is None or replace(before, at=account.at) != account:
                post(bookmarks, account.key, account.dumps())
                published[account.stage] = account

    def keep(stop: threading.Event) -> None:
        with channels.poster() as post:
            # After an error the stage keeps its account. The audit notices accounts that do not change.
            failure = "an account cannot be published"
            repeat(stop, lambda: publish(post), every, failure, delay=every, last=True)

    with run_in_background("accounts", keep):
        yield


def last_accounts(channels: Channels, bookmarks: str) -> dict[str, Account]:
    """The last account of each stage."""
    found: dict[str, Account] = {}
    for entry in scan(channels, bookmarks):
        if is_account(entry.key) and entry.value is not None:
            try:
                account = Account.of(entry.key or b"", entry.value)
            except Refused as refused:
                log.warning("%s", refused)
            else:
                found[account.stage] = account
    return found


def announce(channels: Channels, bookmarks: str, query: str, into: str, token: str, generation: int) -> None:
    """Announce a query as the writer of its result, and return once the announcement is acknowledged.

    A token is announced once: the first announcement holds the offsets where its rows begin.
    """
    writers = Writers(channels, [bookmarks])
    writers.refresh()
    if token.encode() in writers.known.tokens(into):
        return
    ends = {partition: end for partition, (_, end) in channels.bounds(into).items()}
    writer = Writer(into, token, query, generation, channels.topic_id(into), ends)

    async def send() -> None:
        async with channels.sender() as sender:
            await sender.send(bookmarks, [Record(writer.dumps(), key=writer.key)])

    asyncio.run(send())
