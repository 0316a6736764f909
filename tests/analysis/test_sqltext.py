import pytest

from penstock.analysis.sqltext import Spelled


def spelled(text: str) -> Spelled:
    return Spelled.out(text, lambda names: f"<{'+'.join(names)}>")


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ("SELECT a, seen() FROM t", "SELECT a, <> FROM t"),
        ("SELECT SEEN( ) as Seen FROM t", "SELECT <> FROM t"),
        ("SELECT seen(i), seen(i, c)", "SELECT <i>, <i+c>"),
        ("SELECT 'seen()', \"seen()\", `seen()` -- seen()\n/* seen() */", None),
        ("SELECT overseen(), f.seen(), seen FROM t", None),
    ],
)
def test_seen_is_spelled_out_where_it_is_a_word_of_its_own(own: str, text: str | None) -> None:
    assert spelled(own).text == (own if text is None else text)


@pytest.mark.parametrize(
    ("said", "location"),
    [
        ("Syntax error (line 1, pos 0)", (1, 1)),
        ("unresolved; line 2 pos 2;", (2, 3)),
        ("within what was put in; line 1 pos 11", (1, 11)),
        ("behind it on the same line; line 1 pos 15", (1, 20)),
        ("behind the second; line 2 pos 5", (2, 10)),
        ("nothing of a position", None),
    ],
)
def test_a_position_of_sparks_is_told_in_the_users_text(said: str, location: tuple[int, int] | None) -> None:
    # 1: SELECT a, seen(x), b     2: , seen() c
    assert spelled("SELECT a, seen(x), b\n, seen() c").location(said) == location
