import orjson
import pytest

from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured, Refused
from penstock.simulate.feed import Cursor, Feed, parse_resume

EPOCH = 1_700_000_000
START = EPOCH * 1_000_000
FOREVER = START + 10**12


def numbered(sender: int, number: int, time: Micros) -> bytes:
    return b'{"n":[%d,%d]}' % (sender, number)


def feed(rate: float = 10, senders: int = 3, count: int | None = None, plain: bool = False) -> Feed:
    return Feed(numbered, rate, senders, EPOCH, count, numbered=not plain)


def numbers(following: Cursor, now: Micros, most: int = 10_000) -> list[tuple[str, int]]:
    messages = [orjson.loads(message)["feed"] for message in following.take(now, most)]
    return [(message["sender"], message["seq"]) for message in messages]


def test_nothing_is_due_before_the_start() -> None:
    assert feed().due(START - 1) == 0


@pytest.mark.parametrize("rate", [0.3, 3, 7, 200, 999.7, 33_333])
def test_a_record_is_due_exactly_from_its_time_on(rate: float) -> None:
    one = feed(rate)
    for n in (0, 1, 2, 17, 1_000, 123_457):
        assert one.due(one.time_of(n)) > n
        assert one.due(one.time_of(n) - 1) <= n


def test_no_more_is_due_than_the_count() -> None:
    one = feed(count=5)
    assert one.due(FOREVER) == 5
    assert Cursor(one, [], 5).ended
    assert not Cursor(one, [], 4).ended


def test_the_message_is_the_document_and_its_numbers() -> None:
    assert orjson.loads(feed(rate=10, senders=3).message(7)) == {
        "n": [1, 3],
        "feed": {"sender": "meetup-01", "epoch": EPOCH, "seq": 3, "time": START + 700_000},
    }


def test_senders_are_called_as_the_feed_says() -> None:
    one = Feed(numbered, 10, 3, EPOCH, 30, sender="turbine")
    assert orjson.loads(one.heartbeats(3, 99))["heartbeats"][2]["sender"] == "turbine-02"
    after = {"turbine-00": (EPOCH, 10), "turbine-01": (EPOCH, 9), "turbine-02": (EPOCH, 10), "meetup-01": (EPOCH, 10)}
    assert numbers(one.after(after, FOREVER), FOREVER) == [("turbine-01", 10)]


def test_an_empty_document_stays_json() -> None:
    assert set(orjson.loads(Feed(lambda *_: b"{}", 1, 1, EPOCH).message(0))) == {"feed"}


def test_without_numbers_the_message_is_the_document() -> None:
    assert feed(plain=True).message(7) == b'{"n":[1,3]}'


def test_each_sender_numbers_without_a_gap() -> None:
    found = numbers(feed(count=30).after({}, START), FOREVER)
    for sender in ("meetup-00", "meetup-01", "meetup-02"):
        assert [seq for name, seq in found if name == sender] == list(range(1, 11))


def test_a_client_without_a_past_gets_what_comes_from_now_on() -> None:
    following = feed().from_now(START + 1_000_000)
    assert numbers(following, START + 1_000_000) == []
    assert numbers(following, START + 1_200_000) == [("meetup-02", 4), ("meetup-00", 5)]


def test_a_client_gets_no_more_at_a_time_than_it_takes() -> None:
    following = feed(count=30).after({}, START)
    assert len(numbers(following, FOREVER, most=7)) == 7
    assert len(numbers(following, FOREVER)) == 23
    assert following.ended


def test_a_resume_goes_on_after_the_number_of_each_sender() -> None:
    after = {"meetup-00": (EPOCH, 9), "meetup-01": (EPOCH, 8), "meetup-02": (EPOCH, 10)}
    assert numbers(feed(count=30).after(after, FOREVER), FOREVER) == [
        ("meetup-01", 9),
        ("meetup-00", 10),
        ("meetup-01", 10),
    ]


def test_a_sender_that_is_not_listed_begins_with_its_first_number() -> None:
    after = {"meetup-00": (EPOCH, 10), "meetup-01": (EPOCH, 10)}
    found = numbers(feed(count=30).after(after, FOREVER), FOREVER)
    assert found == [("meetup-02", seq) for seq in range(1, 11)]


def test_a_number_of_another_epoch_counts_as_none() -> None:
    found = numbers(feed(count=30).after({"meetup-00": (EPOCH - 1, 10)}, FOREVER), FOREVER)
    assert len(found) == 30


def test_a_claim_to_hold_the_future_does_not_skip_it() -> None:
    claim = {f"meetup-{sender:02d}": (EPOCH, 10**15) for sender in range(3)}
    following = feed().after(claim, START + 1_000_000)
    assert numbers(following, START + 1_200_000) == [("meetup-02", 4), ("meetup-00", 5)]


def test_heartbeats_say_the_last_number_of_each_sender() -> None:
    beats = orjson.loads(feed().heartbeats(7, 99))["heartbeats"]
    assert [(beat["sender"], beat["epoch"], beat["seq"], beat["time"]) for beat in beats] == [
        ("meetup-00", EPOCH, 3, 99),
        ("meetup-01", EPOCH, 2, 99),
        ("meetup-02", EPOCH, 2, 99),
    ]


@pytest.mark.parametrize("wrong", [{"rate": 0}, {"rate": -1}, {"senders": 0}, {"count": -1}])
def test_an_impossible_feed_is_misconfigured(wrong: dict[str, int]) -> None:
    with pytest.raises(Misconfigured):
        Feed(**{"documents": numbered, "rate": 1, "senders": 1, "epoch": EPOCH, **wrong})  # type: ignore[arg-type]  # wrong on purpose


def test_a_resume_is_read() -> None:
    assert parse_resume(b'{"after":{"meetup-07":[5,6]}}') == {"meetup-07": (5, 6)}


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"hello",
        b"[]",
        b"{}",
        b'{"after":[]}',
        b'{"after":{"a":5}}',
        b'{"after":{"a":[1]}}',
        b'{"after":{"a":[1,-1]}}',
        b'{"after":{"a":[1,"2"]}}',
        b'{"after":{"a":[1,true]}}',
        b'{"after":{"a":[1,1e30]}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_bad_resume_is_refused(message: bytes) -> None:
    with pytest.raises(Refused):
        parse_resume(message)
