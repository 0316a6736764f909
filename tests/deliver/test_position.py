"""Tokens: what we wrote can be read, and nothing else."""

import pytest

from penstock.deliver.position import Mark, Tokens

POSITION = {0: Mark(12, 1_700_000_000_000_000), 3: Mark(40, 1_700_000_000_000_001)}


def test_a_token_is_read_back() -> None:
    tokens = Tokens("a", "topic")
    assert tokens.read(tokens.write(POSITION)) == POSITION


def test_the_position_before_any_entry_is_a_position() -> None:
    tokens = Tokens("a", "topic")
    assert tokens.read(tokens.write({})) == {}


def test_a_token_of_another_table_is_not_readable() -> None:
    assert Tokens("a", "topic").read(Tokens("a", "topic made anew").write(POSITION)) is None


@pytest.mark.parametrize(
    "forged",
    [None, "", ".", "0-1-1", "x" * 10_000, "é.0-1-1", "\ud800", "\0", "../..", "ffffffffffffffff.0-ff-ff", "a.b.c.d"],
)
def test_an_invention_is_not_readable(forged: str | None) -> None:
    assert Tokens("a", "topic").read(forged) is None


def test_a_token_with_one_letter_changed_is_not_readable() -> None:
    tokens = Tokens("a", "topic")
    token = tokens.write(POSITION)
    for at, letter in enumerate(token):
        assert tokens.read(token[:at] + ("1" if letter != "1" else "2") + token[at + 1 :]) is None
