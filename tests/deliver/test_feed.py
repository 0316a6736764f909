"""The feed: a snapshot, then changes, and after any absence exactly what was missed or a snapshot."""

import json
import random
from datetime import timedelta

import pytest

from penstock.core.contracts import Entry
from penstock.deliver.feed import MAX_ABSENCE, Feed, Follower, Mark, Message, ResumeTokens

SECOND = 1_000_000
START = 1_700_000_000 * SECOND


class Log:
    """A channel as a list: makes entries with the offsets that come next."""

    def __init__(self) -> None:
        self.now = START
        self.entries: list[Entry] = []
        self._next: dict[int, int] = {}

    def add(
        self, key: str, value: object, version: int | None = None, partition: int = 0, time: int | None = None
    ) -> Entry:
        headers = [
            (name, b"%d" % number) for name, number in (("version", version), ("time", time)) if number is not None
        ]
        raw = None if value is None else json.dumps(value if isinstance(value, dict) else {"n": value}).encode()
        return self.raw(json.dumps([key]).encode(), raw, headers, partition)

    def raw(
        self, key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes]], partition: int = 0
    ) -> Entry:
        offset = self._next.get(partition, 0)
        self._next[partition] = offset + 1
        entry = Entry("c", partition, offset, self.now, key, value, headers)
        self.entries.append(entry)
        return entry


class Copy:
    """A client: holds a copy of the table."""

    def __init__(self) -> None:
        self.rows: dict[str, object] = {}
        self.token: str | None = None

    def take(self, message: Message) -> None:
        document = json.loads(message.text)
        if document["kind"] == "snapshot":
            self.rows.clear()
        for change in document["rows"]:
            if change["row"] is None:
                self.rows.pop(json.dumps(change["key"]), None)
            else:
                self.rows[json.dumps(change["key"])] = change["row"]
        self.token = document["position"]


def table(feed: Feed) -> dict[str, object]:
    copy = Copy()
    copy.take(feed.join())
    return copy.rows


def rows(message: Message | None) -> list[tuple[str, object]]:
    """(key, n) of each change of a message, and None for what is gone."""
    assert message is not None
    return [(change["key"][0], change["row"] and change["row"]["n"]) for change in json.loads(message.text)["rows"]]


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def feed() -> Feed:
    return Feed("by_country", "topic")


def test_the_first_message_is_a_snapshot_with_key_row_version_and_time(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 3, version=7, time=START)])
    message = json.loads(Follower(feed).take().text)  # type: ignore[union-attr] # the first is always there
    assert message == {
        "kind": "snapshot",
        "feed": "by_country",
        "position": feed.position(),
        "rows": [{"key": ["nl"], "row": {"n": 3}, "version": 7, "time": START}],
    }


def test_then_come_the_changes_only(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1), log.add("de", 1)])
    follower = Follower(feed)
    follower.take()
    assert follower.take() is None
    feed.push([log.add("nl", 2)])
    assert rows(follower.take()) == [("nl", 2)]
    assert follower.take() is None


def test_each_entry_is_counted_once_with_what_it_was(log: Log, feed: Feed) -> None:
    some = [
        log.add("nl", 2, version=2),
        log.add("nl", 1, version=1),
        log.add("nl", None, version=3),
        log.add("nl", None),
    ]
    some.append(log.raw(b"?", b"{}", []))
    for _ in range(3):
        feed.push(some)
    assert (feed.received, feed.passed, feed.duplicate, feed.refused) == (5, 2, 2, 1)


def test_a_slow_follower_gets_the_latest_of_each_row_in_one_message(log: Log, feed: Feed) -> None:
    follower = Follower(feed)
    follower.take()
    for n in range(1_000):
        feed.push([log.add("nl", n), log.add("de", -n)])
    assert rows(follower.take()) == [("nl", 999), ("de", -999)]


def test_an_older_version_changes_nothing(log: Log, feed: Feed) -> None:
    follower = Follower(feed)
    feed.push([log.add("nl", 5, version=5)])
    follower.take()
    feed.push([log.add("nl", 3, version=3), log.add("nl", 4, version=4), log.add("nl", 5, version=5)])
    assert follower.take() is None
    feed.push([log.add("nl", 6, version=6)])
    assert rows(follower.take()) == [("nl", 6)]


def test_entries_without_a_version_apply_in_order(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 5), log.add("nl", 3)])
    assert rows(feed.join()) == [("nl", 3)]


def test_a_null_value_deletes_the_row(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1, version=1)])
    follower = Follower(feed)
    follower.take()
    feed.push([log.add("nl", None)])
    assert rows(follower.take()) == [("nl", None)]
    assert len(feed) == 0
    assert rows(feed.join()) == []


def test_a_deleted_row_can_be_inserted_again(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 9, version=9), log.add("nl", None), log.add("nl", 1, version=1)])
    assert rows(feed.join()) == [("nl", 1)]


def test_an_older_row_does_not_come_back_after_its_deletion(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1, version=1), log.add("nl", None, version=2)])
    follower = Follower(feed)
    follower.take()
    feed.push([log.add("nl", 1, version=1), log.add("nl", 2, version=2)])
    assert follower.take() is None
    assert (feed.passed, feed.duplicate) == (2, 2)
    feed.push([log.add("nl", 3, version=3)])
    assert rows(follower.take()) == [("nl", 3)]


def test_any_entry_brings_back_an_evicted_row(log: Log) -> None:
    feed = Feed("f", "topic", retention=timedelta(seconds=60))
    feed.push([log.add("a", 5, version=5)])
    log.now += 61 * SECOND
    feed.push([log.add("b", 1)])
    feed.push([log.add("a", 4, version=4)])
    assert table(feed) == {'["a"]': {"n": 4}, '["b"]': {"n": 1}}


def test_an_evicted_row_that_is_then_deleted_stays_deleted(log: Log) -> None:
    feed = Feed("f", "topic", retention=timedelta(seconds=60))
    feed.push([log.add("a", 5, version=5)])
    log.now += 61 * SECOND
    feed.push([log.add("b", 1)])
    feed.push([log.add("a", None, version=6), log.add("a", 5, version=5)])
    assert table(feed) == {'["b"]': {"n": 1}}


def test_entries_that_were_applied_already_change_nothing(log: Log, feed: Feed) -> None:
    entries = [log.add("nl", 1), log.add("nl", 2), log.add("nl", None)]
    feed.push(entries)
    revision = feed.revision
    feed.push(entries)
    assert feed.revision == revision
    assert feed.offsets() == {0: 3}


def test_one_key_has_one_row_however_it_is_spelled(log: Log, feed: Feed) -> None:
    feed.push([log.raw(b'["nl", 1]', b'{"n": 1}', []), log.raw(b'[ "nl",1 ]', b'{\n"n":\n2}', [])])
    assert rows(feed.join()) == [("nl", 2)]
    assert "\n" not in feed.join().text


# --- coming back ------------------------------------------------------------------------------------------------------


def test_a_returning_client_gets_missed_changes(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1), log.add("de", 1), log.add("fr", 1)])
    token = feed.position()
    feed.push([log.add("nl", 2), log.add("nl", 3), log.add("de", None)])
    message = feed.join(token)
    assert message.kind == "changes"
    assert rows(message) == [("nl", 3), ("de", None)]


def test_a_client_without_missed_changes_gets_no_rows(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1)])
    message = feed.join(feed.position())
    assert (message.kind, rows(message)) == ("changes", [])


def test_a_token_survives_a_restart(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1), log.add("de", 1, partition=1)])
    token = feed.position()
    log.add("nl", 2)
    again = Feed("by_country", "topic")
    again.push(sorted(log.entries, key=lambda entry: -entry.partition))
    message = again.join(token)
    assert (message.kind, rows(message)) == ("changes", [("nl", 2)])


def test_positions_are_per_partition(log: Log, feed: Feed) -> None:
    feed.push([log.add("a", 1, partition=0), log.add("b", 1, partition=1)])
    token = feed.position()
    feed.push([log.add("b", 2, partition=1), log.add("c", 1, partition=1)])
    assert rows(feed.join(token)) == [("b", 2), ("c", 1)]


def test_a_partition_that_was_empty_at_the_token_is_sent_completely(log: Log, feed: Feed) -> None:
    feed.push([log.add("a", 1, partition=0)])
    token = feed.position()
    feed.push([log.add("b", 1, partition=1)])
    message = feed.join(token)
    assert (message.kind, rows(message)) == ("changes", [("b", 1)])


def test_a_partition_whose_beginning_is_gone_means_a_snapshot(log: Log, feed: Feed) -> None:
    feed.push([log.add("a", 1, partition=0)])
    token = feed.position()
    log.add("compacted away", None, partition=1)
    feed.push([log.add("b", 1, partition=1)])
    assert feed.join(token).kind == "snapshot"


def test_a_token_from_the_future_means_a_snapshot(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1), log.add("nl", 2)])
    token = feed.position()
    behind = Feed("by_country", "topic")
    behind.push(log.entries[:1])
    assert behind.join(token).kind == "snapshot"
    assert Feed("by_country", "topic").join(token).kind == "snapshot"


@pytest.mark.parametrize("token", ["", "garbage", "0.0.0", "ffffffffffffffff.0-1-1", "\ud800"])
def test_a_forged_token_means_a_snapshot(log: Log, feed: Feed, token: str) -> None:
    feed.push([log.add("nl", 1)])
    assert feed.join(token).kind == "snapshot"


@pytest.mark.parametrize(
    "other",
    [
        Feed("by_city", "topic"),
        Feed("by_country", "topic made anew"),
        Feed("by_country", "topic", retention=timedelta(seconds=1)),
    ],
    ids=["another feed", "another topic", "another retention"],
)
def test_a_foreign_token_means_a_snapshot(log: Log, feed: Feed, other: Feed) -> None:
    entries = [log.add("nl", 1)]
    feed.push(entries)
    other.push(entries)
    assert feed.join(other.position()).kind == "snapshot"


def test_a_long_absence_means_a_snapshot(log: Log, feed: Feed) -> None:
    feed.push([log.add("nl", 1)])
    token = feed.position()
    log.now += (MAX_ABSENCE + timedelta(seconds=1)) // timedelta(microseconds=1)
    feed.push([log.add("nl", 2)])
    assert feed.join(token).kind == "snapshot"


# --- history ----------------------------------------------------------------------------------------------------------


def test_more_removals_than_are_remembered_mean_a_snapshot(log: Log) -> None:
    feed = Feed("f", "topic", history=3)
    feed.push([log.add(f"k{n}", n) for n in range(10)])
    token, follower = feed.position(), Follower(feed)
    follower.take()
    feed.push([log.add(f"k{n}", None) for n in range(3)])
    assert feed.join(token).kind == "changes"
    feed.push([log.add("k3", None)])
    assert feed.join(token).kind == "snapshot"
    message = follower.take()
    assert message is not None
    assert message.kind == "snapshot"
    assert len(message.rows) == len(feed) == 6


def test_a_client_that_saw_the_forgotten_removal_gets_changes(log: Log) -> None:
    feed = Feed("f", "topic", history=1)
    feed.push([log.add("a", 1), log.add("b", 1), log.add("a", None)])
    token = feed.position()
    feed.push([log.add("b", None)])
    assert rows(feed.join(token)) == [("b", None)]


def test_memory_is_bounded_by_the_table_and_the_history(log: Log) -> None:
    feed = Feed("f", "topic", history=100)
    for n in range(5_000):
        feed.push([log.add(f"k{n}", n), log.add(f"k{n}", None)])
    assert len(feed._rows) == 100


# --- eviction ---------------------------------------------------------------------------------------------------------


def test_an_expired_row_is_removed_and_followers_are_notified(log: Log) -> None:
    feed = Feed("f", "topic", retention=timedelta(seconds=60))
    feed.push([log.add("old", 1)])
    follower = Follower(feed)
    follower.take()
    log.now += 60 * SECOND
    feed.push([log.add("new", 1)])
    assert rows(follower.take()) == [("new", 1)]
    log.now += 1
    feed.push([log.add("new", 2)])
    assert rows(follower.take()) == [("new", 2), ("old", None)]


def test_an_entry_that_is_not_newer_still_keeps_its_row(log: Log) -> None:
    feed = Feed("f", "topic", retention=timedelta(seconds=60))
    feed.push([log.add("a", 5, version=5)])
    log.now += 50 * SECOND
    feed.push([log.add("a", 4, version=4)])
    log.now += 50 * SECOND
    feed.push([log.add("b", 1)])
    assert table(feed) == {'["a"]': {"n": 5}, '["b"]': {"n": 1}}


def test_a_returning_client_gets_evictions_also_from_another_process(log: Log) -> None:
    keep = timedelta(seconds=60)
    feed = Feed("f", "topic", retention=keep)
    feed.push([log.add("a", 1, partition=0), log.add("b", 1, partition=1)])
    copy = Copy()
    copy.take(feed.join())
    log.now += 61 * SECOND
    log.add("b", 2, partition=1)
    for order in (1, -1):
        again = Feed("f", "topic", retention=keep)
        again.push(sorted(log.entries, key=lambda entry: order * entry.partition))
        message = again.join(copy.token)
        assert message.kind == "changes"
        assert sorted(rows(message)) == [("a", None), ("b", 2)]


# --- bad entries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "headers"),
    [
        (None, b"{}", []),
        (b"", b"{}", []),
        (b"nl", b"{}", []),
        (b'{"a": 1}', b"{}", []),
        (b'["\xff"]', b"{}", []),
        (b'["nl"]', b"", []),
        (b'["nl"]', b"[1]", []),
        (b'["nl"]', b"NaN", []),
        (b'["nl"]', b"[" * 100_000, []),
        (b'["nl"]', b'{"a": "\\ud800"}', []),
        (b'["nl"]', b"{}", [("version", b"-1")]),
        (b'["nl"]', b"{}", [("version", b"1e3")]),
        (b'["nl"]', b"{}", [("time", b"9" * 40)]),
    ],
)
def test_an_invalid_entry_is_refused_and_the_rest_applied(
    log: Log, feed: Feed, key: bytes | None, value: bytes, headers: list[tuple[str, bytes]]
) -> None:
    feed.push([log.add("de", 1), log.raw(key, value, headers), log.add("fr", 1)])
    assert rows(feed.join()) == [("de", 1), ("fr", 1)]
    assert feed.refused == 1
    assert feed.refusal is not None
    assert feed.refusal.startswith("partition 0, offset 1: ")
    assert feed.offsets() == {0: 3}


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_a_client_that_drops_and_resumes_at_random_ends_with_the_servers_table(seed: int) -> None:
    """Three partitions, replays of old versions, deletions, evictions, restarts with another order of reading."""
    dice = random.Random(seed)
    log, keep = Log(), timedelta(seconds=20) if seed % 3 else None
    history = dice.choice([5, 10_000])

    def fresh() -> Feed:
        return Feed("f", "topic", retention=keep, history=history)

    feed, read, versions = fresh(), [0, 0, 0], dict.fromkeys(range(40), 0)
    deleted: set[tuple[int, int]] = set()
    clients = [Copy() for _ in range(4)]
    followers: list[Follower | None] = [None] * len(clients)
    for _ in range(400):
        log.now += dice.randrange(SECOND)
        number = dice.randrange(40)
        if dice.random() < 0.1:
            log.add(f"k{number}", None, partition=number % 3)
            versions[number] = 0
            deleted = {(key, version) for key, version in deleted if key != number}
        else:
            versions[number] += 1
            # A deletion that is forgotten takes its version along: until it is repeated, an older row is there again.
            if dice.random() < 0.1 and history > len(versions):
                deleted.add((number, versions[number]))
            first = max(1, versions[number] - dice.choice([0, 0, 0, 3]))
            for version in range(first, versions[number] + 1):
                value = None if (number, version) in deleted else version
                log.add(f"k{number}", value, version, partition=number % 3)
        if dice.random() < 0.02:
            feed, read, followers = fresh(), [0, 0, 0], [None] * len(clients)
        for partition in dice.sample(range(3), dice.randrange(4)):
            some = [entry for entry in log.entries if entry.partition == partition][read[partition] :]
            some = some[: dice.randrange(1, 30)]
            read[partition] += len(some)
            feed.push(some)
        for at, client in enumerate(clients):
            if dice.random() < 0.1:
                followers[at] = None
            if dice.random() < 0.5:
                follower = followers[at] = followers[at] or Follower(feed, client.token)
                if message := follower.take():
                    client.take(message)
                assert client.rows == table(feed)
    feed.push(entry for entry in log.entries if entry.offset >= read[entry.partition])
    for client in clients:
        client.take(feed.join(client.token))
        assert client.rows == table(feed)


# --- resume tokens ---

POSITION = {0: Mark(12, 1_700_000_000_000_000), 3: Mark(40, 1_700_000_000_000_001)}


def test_a_token_is_read_back() -> None:
    tokens = ResumeTokens("a", "topic")
    assert tokens.read(tokens.write(POSITION)) == POSITION


def test_the_position_before_any_entry_has_a_token() -> None:
    tokens = ResumeTokens("a", "topic")
    assert tokens.read(tokens.write({})) == {}


def test_a_token_of_another_table_is_not_readable() -> None:
    assert ResumeTokens("a", "topic").read(ResumeTokens("a", "another topic").write(POSITION)) is None


@pytest.mark.parametrize(
    "forged",
    [None, "", ".", "0-1-1", "x" * 10_000, "é.0-1-1", "\ud800", "\0", "../..", "ffffffffffffffff.0-ff-ff", "a.b.c.d"],
)
def test_a_forged_token_is_not_readable(forged: str | None) -> None:
    assert ResumeTokens("a", "topic").read(forged) is None


def test_a_token_with_one_letter_changed_is_not_readable() -> None:
    tokens = ResumeTokens("a", "topic")
    token = tokens.write(POSITION)
    for at, letter in enumerate(token):
        assert tokens.read(token[:at] + ("1" if letter != "1" else "2") + token[at + 1 :]) is None
