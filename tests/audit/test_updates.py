"""Updates are read as they come from outside: rarely as one would wish."""

import pytest

from penstock.audit.updates import Fields
from penstock.core.errors import Refused
from penstock.core.record import Origin


def reason(payload: bytes, fields: Fields | None = None) -> str:
    with pytest.raises(Refused) as refused:
        (fields or Fields()).read(payload)
    return refused.value.reason


def test_an_update_is_read_from_its_fields() -> None:
    assert Fields().read(b'{"seq": 1000, "sender": "sender1", "time": 0}\r') == Origin("sender1", 0, 1000, 0)
    assert Fields().read(b'{"seq": -1, "sender": "a", "epoch": 3}') == Origin("a", 3, -1, 0)


def test_fields_may_have_other_names_and_lie_deeper() -> None:
    fields = Fields("feed.seq", "feed.sender", "feed.epoch", "at")
    payload = b'{"feed": {"seq": 5, "sender": "a", "epoch": 7}, "at": 9, "seq": 1}'
    assert fields.read(payload) == Origin("a", 7, 5, 9)
    assert reason(b'{"feed": [5]}', fields) == 'there is no "feed.seq"'


def test_empty_names_mean_one_sender_without_lives_and_times() -> None:
    assert Fields("n", "", "", "").read(b'{"n": 1, "": 2, "epoch": 3}') == Origin("", 0, 1, 0)


def test_a_sender_may_be_a_number() -> None:
    assert Fields().read(b'{"seq": 1, "sender": 7}').sender == "7"


@pytest.mark.parametrize("time", [b'"2024-01-01"', b"1.5", b"null", b"true", b"{}"])
def test_a_time_that_is_none_does_no_harm(time: bytes) -> None:
    assert Fields().read(b'{"seq": 1, "sender": "a", "time": %s}' % time).time == 0


def test_the_limits_of_64_bits_are_numbers() -> None:
    for seq in (-(2**63), 2**63 - 1):
        assert Fields().read(b'{"seq": %d, "sender": "a"}' % seq).seq == seq


@pytest.mark.parametrize("seq", [2**63, -(2**63) - 1, 2**64, 10**30, -(10**30)])
def test_a_number_beyond_64_bits_is_refused(seq: int) -> None:
    assert reason(b'{"seq": %d, "sender": "a"}' % seq) == '"seq" lies beyond 64 bits'


@pytest.mark.parametrize(
    ("seq", "said"),
    [
        (b'"1000"', '"seq" is text, not a whole number'),
        (b"1.0", '"seq" is a fraction, not a whole number'),
        (b"true", '"seq" is true or false, not a whole number'),
        (b"null", 'there is no "seq"'),
        (b"[1]", '"seq" is a list, not a whole number'),
        (b"{}", '"seq" is an object, not a whole number'),
    ],
)
def test_what_is_no_number_is_refused_with_the_reason(seq: bytes, said: str) -> None:
    assert reason(b'{"seq": %s, "sender": "a"}' % seq) == said


def test_an_epoch_that_is_there_must_be_a_number() -> None:
    assert reason(b'{"seq": 1, "sender": "a", "epoch": "x"}') == '"epoch" is text, not a whole number'


def test_a_sender_must_have_a_name() -> None:
    assert reason(b'{"seq": 1}') == 'there is no "sender"'
    assert reason(b'{"seq": 1, "sender": true}') == '"sender" is true or false, not a name'


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"seq": NaN}',
        b'{"seq": 1e400}',
        b'{"seq": 1, "sender": "\xff"}',
        b'{"seq": 1, "sender": "\xc0\xaf"}',
        b'{"seq": 1, "sender": "\\ud800"}',
        b'{"seq": 1, "sender": "a\x00"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda payload: repr(payload[:12]),
)
def test_what_is_not_json_is_refused(payload: bytes) -> None:
    assert reason(payload).startswith("it is not JSON: ")


def test_json_that_is_no_object_is_refused() -> None:
    for payload in (b"1000", b"[]", b'"seq"', b"null"):
        assert reason(payload) == "it is JSON, but not an object"
