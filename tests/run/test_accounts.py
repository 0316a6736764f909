"""Accounts on the channel of bookmarks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.audit.account import Account
from penstock.core.errors import Unavailable
from penstock.run.accounts import accounting, last_accounts
from penstock.testing import MemoryChannels


class Posting(MemoryChannels):
    @contextmanager
    def poster(self) -> Iterator[Callable[[str, bytes, bytes], None]]:
        yield lambda channel, key, value: (self.append(channel, value, key), None)[1]


def account(step: int, at: int = 0) -> Account:
    return Account("query:a", "life", at, {}, step)


def test_an_account_is_told_when_it_says_something_new() -> None:
    channels, told, steps = Posting(), threading.Event(), iter([1, 1, 2, 2])

    def accounts() -> list[Account]:
        step = next(steps, None)
        if step is None:
            told.set()
            return []
        return [account(step, at=step)]

    with accounting(channels, "bookmarks", accounts, every=0.01):
        assert told.wait(5)
    assert [Account.of(entry.key or b"", entry.value or b"").step for entry in channels.entries("bookmarks")] == [1, 2]


def test_the_last_word_is_told_when_all_ends() -> None:
    channels = Posting()
    with accounting(channels, "bookmarks", lambda: [account(3)], every=60):
        pass
    assert last_accounts(channels, "bookmarks") == {"query:a": account(3)}


def test_a_stage_that_cannot_tell_is_asked_again() -> None:
    channels, asked = Posting(), threading.Event()
    answers = iter([False, True])

    def accounts() -> list[Account]:
        if not next(answers, True):
            raise Unavailable("the store", "it restarts")
        asked.set()
        return [account(1)]

    with accounting(channels, "bookmarks", accounts, every=0.01):
        assert asked.wait(5)
    assert last_accounts(channels, "bookmarks") == {"query:a": account(1)}


def test_among_bookmarks_the_last_account_of_each_stage_is_found() -> None:
    channels = MemoryChannels(partitions=2)
    channels.append("bookmarks", b'{"incarnation": 1}', b"rsvps")
    channels.append("bookmarks", b"not an account", b"query:b")
    for step in (1, 2, 3):
        channels.append("bookmarks", account(step).dumps(), b"query:a")
    channels.append("bookmarks", None, b"query:c")
    assert last_accounts(channels, "bookmarks") == {"query:a": account(3)}
