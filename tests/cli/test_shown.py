import json

from penstock.cli.lines import Json as Lines
from penstock.cli.shown import Fields, Json
from penstock.core.contracts import Entry
from penstock.core.record import Headers, Origin


def entry(key: bytes | None = b"k", value: bytes | None = b"v", headers: Headers = ()) -> Entry:
    return Entry("c", 2, 7, 1_700_000_000_123_456, key, value, headers)


def test_only_the_value_is_shown_unless_more_is_asked_for() -> None:
    assert Fields().line(entry()) == b"v\n"


def test_the_key_is_shown_before_the_value() -> None:
    assert Fields(key=True).line(entry()) == b"k : v\n"
    assert Fields(key=True, key_separator=b":").line(entry()) == b"k:v\n"


def test_all_fields_stand_in_the_order_of_kafkas_tool() -> None:
    line = Fields(True, True, True, True, True).line(entry(headers=(("a", b"1"), ("b", b"2"))))
    assert line == b"CreateTime:1700000000123\tPartition:2\tOffset:7\ta:1,b:2\tk : v\n"


def test_a_record_without_headers_says_so() -> None:
    assert Fields(headers=True).line(entry()) == b"NO_HEADERS\tv\n"


def test_null_and_empty_are_told_apart() -> None:
    assert Fields(key=True).line(entry(None, None)) == b"null : null\n"
    assert Fields(key=True).line(entry(b"", b"")) == b" : \n"
    assert Fields(key=True, null=b"\\N").line(entry(None, None)) == b"\\N : \\N\n"


def test_the_value_can_be_left_out() -> None:
    assert Fields(key=True, value=False).line(entry()) == b"k\n"


def test_bytes_pass_as_they_are_and_are_spelled_out_where_that_is_safer() -> None:
    hostile = entry(value=b"\x1b[31m\xff\r")
    assert Fields().line(hostile) == b"\x1b[31m\xff\r\n"
    assert Fields(safe=True).line(hostile) == rb"\x1b[31m\xff\r" + b"\n"


def test_json_tells_everything() -> None:
    origin = Origin("s", 1, 2, 3)
    assert json.loads(Json().line(entry(None, b"\xff", (*origin.headers(), ("x", b"y"))))) == {
        "channel": "c",
        "partition": 2,
        "offset": 7,
        "appended": 1_700_000_000_123_456,
        "key": None,
        "value": {"base64": "/w=="},
        "headers": [
            {"name": "sender", "value": "s"},
            {"name": "epoch", "value": "1"},
            {"name": "seq", "value": "2"},
            {"name": "time", "value": "3"},
            {"name": "x", "value": "y"},
        ],
        "origin": {"sender": "s", "epoch": 1, "seq": 2, "time": 3},
    }


def test_an_origin_that_contradicts_itself_is_none() -> None:
    assert json.loads(Json().line(entry(headers=(("seq", b"1"),))))["origin"] is None


def test_json_stays_on_its_line_and_can_be_read_again() -> None:
    odd = entry(b"\x00", b"a\nb\xe2\x80\xa8", (("h", b"\xfe"), ("h", b"")))
    line = Json().line(odd)
    assert line.count(b"\n") == 1
    again = Lines().read(line)
    assert (again.key, again.value, again.headers()) == (odd.key, odd.value, list(odd.headers))
