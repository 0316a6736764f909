import pytest

from penstock.cli.lines import Json, Separated, properties, separator, switched
from penstock.core.errors import Misconfigured, Refused
from penstock.core.record import Record


def test_a_line_is_all_value_where_no_separator_is_told() -> None:
    assert Separated().read(b"k:v\t") == Record(b"k:v\t")


def test_an_empty_line_is_an_empty_value() -> None:
    assert Separated().read(b"") == Record(b"")


def test_the_first_separator_parts_key_and_value() -> None:
    assert Separated(key=b":").read(b"a:b:c") == Record(b"b:c", None, b"a")
    assert Separated(key=b"::").read(b"a:::c") == Record(b":c", None, b"a")
    assert Separated(key=b":").read(b":") == Record(b"", None, b"")


def test_a_line_without_its_separator_is_refused_and_shown() -> None:
    with pytest.raises(Refused, match=r'it has no key: there is no ":" in "no\\x1bkey"$'):
        Separated(key=b":").read(b"no\x1bkey")
    with pytest.raises(Refused, match=r'in "x{60}…"$'):
        Separated(key=b":").read(b"x" * 100)


def test_a_line_without_its_separator_is_all_value_where_that_is_allowed() -> None:
    assert Separated(key=b":", headers=b"\t", lenient=True).read(b"plain") == Record(b"plain")


def test_headers_stand_before_the_key() -> None:
    found = Separated(key=b"\t", headers=b"\t").read(b"a:1,b:2:3\tk\tv")
    assert found == Record(b"v", None, b"k", (("a", b"1"), ("b", b"2:3")))


def test_a_line_may_have_no_headers() -> None:
    assert Separated(headers=b"\t").read(b"\tv") == Record(b"v")


def test_a_header_without_a_value_is_refused_unless_that_is_allowed() -> None:
    with pytest.raises(Refused, match='its header "b" has no ":"'):
        Separated(headers=b"\t").read(b"a:1,b\tv")
    assert Separated(headers=b"\t", lenient=True).read(b"a:1,b\tv").extra == (("a", b"1"), ("b", b""))


def test_the_name_of_a_header_is_text() -> None:
    with pytest.raises(Refused, match="is not UTF-8"):
        Separated(headers=b"\t").read(b"\xff:1\tv")


def test_a_marker_stands_for_null() -> None:
    nulls = Separated(key=b":", headers=b"\t", null=b"NULL")
    assert nulls.read(b"NULL\tk:NULL") == Record(None, None, b"k")
    assert nulls.read(b"h:NULL\tNULL:NULLS") == Record(b"NULLS", None, None, (("h", b""),))


def test_what_is_no_utf_8_passes_as_it_is() -> None:
    assert Separated(key=b":").read(b"\xff\x00:\xfe") == Record(b"\xfe", None, b"\xff\x00")


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_json_tells_key_value_and_headers() -> None:
    told = b'{"key": "k", "value": "v", "headers": {"a": "1"}}'
    assert Json().read(told) == Record(b"v", None, b"k", (("a", b"1"),))


def test_headers_of_one_name_are_a_list_in_json() -> None:
    told = b'{"value": null, "headers": [{"name": "a", "value": "1"}, {"name": "a", "value": {"base64": "/w=="}}]}'
    assert Json().read(told) == Record(None, None, None, (("a", b"1"), ("a", b"\xff")))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it is JSON, but not an object"),
        (b"{}", 'there is no "value"'),
        (b'{"vaule": "x"}', '"vaule" is not a field; did you mean "value"?'),
        (b'{"value": 1}', '"value" has to be a text, null, or {"base64": "…"}'),
        (b'{"value": {"base64": "!"}}', '"value" is not base64'),
        (b'{"value": {"base64": "AA==", "more": 1}}', '"value" has to be a text'),
        (b'{"value": "", "key": ["k"]}', '"key" has to be a text'),
        (b'{"value": "", "headers": "a:1"}', '"headers" has to be an object'),
        (b'{"value": "", "headers": [["a", "1"]]}', 'each of "headers" has to be'),
        (b'{"value": "", "headers": {"a": 1}}', '"headers.a" has to be a text'),
        (b'{"value": "\\ud800"}', "it is not JSON"),
    ],
)
def test_json_that_tells_no_record_is_refused_with_the_reason(line: bytes, reason: str) -> None:
    with pytest.raises(Refused) as found:
        Json().read(line)
    assert reason in found.value.reason


# --- options ----------------------------------------------------------------------------------------------------------


def test_a_property_that_nobody_knows_is_told_with_one_that_is_meant() -> None:
    with pytest.raises(Misconfigured, match=r'"parse\.kye" is not a property; did you mean "parse\.key"\?'):
        properties("--property", ["parse.kye=true"], ["parse.key", "null.marker"])
    with pytest.raises(Misconfigured, match=r'"parse\.key" is not NAME=VALUE'):
        properties("--property", ["parse.key"], ["parse.key"])
    assert properties("--property", ["key.separator=="], ["key.separator"]) == {"key.separator": "="}


def test_a_property_is_on_or_off_in_any_case() -> None:
    told = {"parse.key": "True", "parse.headers": "FALSE", "ignore.error": "yes"}
    assert switched("--property", told, "parse.key")
    assert not switched("--property", told, "parse.headers")
    assert not switched("--property", told, "print.key")
    with pytest.raises(Misconfigured, match=r'--property ignore\.error: "yes" is neither true nor false; write'):
        switched("--property", told, "ignore.error")


def test_a_separator_is_typed_as_it_looks() -> None:
    assert separator("--key-separator", "\\t") == b"\t"
    assert separator("--key-separator", " : ") == b" : "
    assert separator("--key-separator", "\udcff") == b"\xff"
    with pytest.raises(Misconfigured, match="it is empty"):
        separator("--key-separator", "")
