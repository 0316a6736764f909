"""Text for people."""

from penstock.core.text import did_you_mean, printable


def test_a_name_that_is_like_one_gets_that() -> None:
    assert did_you_mean("Updtes", ["updates", "walk"], "there are two") == 'did you mean "updates"?'
    assert did_you_mean("kafa", ["kafka", "redis"], "", '"{}://"') == 'did you mean "kafka://"?'


def test_a_name_that_is_like_none_gets_the_other_text() -> None:
    assert did_you_mean("zzz", ["a", "b"], "there are a, b") == "there are a, b"


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m\nb [bold]") == "a\\x1b[31m\\nb [bold]"
