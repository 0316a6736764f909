import pytest

from penstock.collect.dedup import key_of

RSVP = (
    '{"group":{"group_id":42,"name":"Zürich"},"response":"yes","ratio":0.5,"open":true,"none":null,"list":[1]}'.encode()
)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("group.group_id", b"42"),
        ("group.name", "Zürich".encode()),
        ("response", b"yes"),
        ("ratio", b"0.5"),
        ("open", b"true"),
        (["group.group_id", "response"], b'[42,"yes"]'),
        (["response"], b'["yes"]'),
    ],
)
def test_a_key_is_the_text_of_what_lies_at_the_path(path: str | list[str], key: bytes) -> None:
    assert key_of(RSVP, path) == key


@pytest.mark.parametrize(
    "path",
    [None, "", [], "none", "list", "group", "nowhere", "group.group_id.deeper", "list.0", ["response", "nowhere"]],
)
def test_there_is_no_key_where_nothing_plain_lies(path: str | list[str] | None) -> None:
    assert key_of(RSVP, path) is None


@pytest.mark.parametrize("value", [b"", b"\xff", b"{", b"[" * 100_000, b"[1]", b"5", b'{"response":NaN}', b'"\x00"'])
def test_what_is_not_a_json_object_has_no_key(value: bytes) -> None:
    assert key_of(value, "response") is None
    assert key_of(value, ["response"]) is None
