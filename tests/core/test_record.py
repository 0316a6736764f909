import pytest

from penstock.core.errors import Refused
from penstock.core.record import GENERATIONS, Origin, Record, generation_and_count

ORIGIN = Origin("kiosk 7", 2, 1000, 1_700_000_000_000_000)


def told(**changes: bytes | str | None) -> list[tuple[str, bytes | str | None]]:
    headers: dict[str, bytes | str | None] = dict(ORIGIN.headers())
    return list((headers | changes).items())


@pytest.mark.parametrize(
    "origin",
    [ORIGIN, Origin("größe/東京", 0, 0, 0), Origin("a\nb\x00", -1, -5, -1), Origin("", 2**63 - 1, -(2**63), 1)],
)
def test_an_origin_survives_its_headers(origin: Origin) -> None:
    assert Origin.of(origin.headers()) == origin


def test_headers_may_be_text_and_others_may_stand_between_them() -> None:
    assert Origin.of([("trace", None), *told(sender="kiosk 7"), ("trace", b"\xff")]) == ORIGIN


@pytest.mark.parametrize("headers", [None, [], [("version", b"3")]])
def test_headers_that_tell_nothing_are_no_origin(headers: list[tuple[str, bytes]] | None) -> None:
    assert Origin.of(headers) is None


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        (told()[1:], "the header sender is missing"),
        (told(seq=None), "the header seq is missing"),
        (told()[:1], "the header epoch and seq and time is missing"),
        ([*told(), ("seq", b"7")], 'the header "seq" is there twice'),
        (told(seq=b""), "invalid literal"),
        (told(seq=b"1.5"), "invalid literal"),
        (told(seq=b"9" * 5000), "digits"),
        (told(seq=b"%d" % 2**63), "64 bits"),
        (told(epoch=b"%d" % (-(2**63) - 1)), "64 bits"),
        (told(sender=b"\xff"), "utf-8"),
    ],
)
def test_headers_that_contradict_themselves_are_refused(
    headers: list[tuple[str, bytes | str | None]], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        Origin.of(headers)


def test_a_record_carries_its_origin_and_what_else_it_was_given() -> None:
    assert Record(b"{}", ORIGIN, extra=[("version", b"3")]).headers() == [*ORIGIN.headers(), ("version", b"3")]
    assert Record(None).headers() == []


def test_a_version_tells_the_life_and_the_count() -> None:
    assert generation_and_count(7) == (0, 7)
    assert generation_and_count(3 * GENERATIONS + 7) == (3, 7)
