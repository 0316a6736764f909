"""Text for people."""

import logging
import pickle

import pytest

from penstock.core.errors import Misconfigured, Unavailable
from penstock.core.text import RedactingFormatter, did_you_mean, is_secret, printable, redact, redact_address


def test_a_name_that_is_like_one_gets_that() -> None:
    assert did_you_mean("Updtes", ["updates", "walk"], "there are two") == 'did you mean "updates"?'
    assert did_you_mean("kafa", ["kafka", "redis"], "", '"{}://"') == 'did you mean "kafka://"?'


def test_a_name_that_is_like_none_gets_the_other_text() -> None:
    assert did_you_mean("zzz", ["a", "b"], "there are a, b") == "there are a, b"


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[31m\nb [bold]") == "a\\x1b[31m\\nb [bold]"


@pytest.mark.parametrize(
    ("url", "eyes"),
    [
        ("redis://", "redis://"),
        ("redis://ada:se@cret@host:6379/2", "redis://host:6379/2"),
        ("wss://host/feed?token=abc", "wss://host/feed"),
        ("simulate://rsvps?rate=200", "simulate://rsvps?rate=200"),
        ("delta://lake/a@b", "delta://lake/a@b"),
    ],
)
def test_what_is_secret_in_an_address_is_not_shown(url: str, eyes: str) -> None:
    assert redact_address(url) == eyes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("no address at all: a = b", "no address at all: a = b"),
        ("ws://ada:se@cret@host:1/x is away", "ws://host:1/x is away"),
        ("rediss://:hush@a,redis://b", "rediss://a,redis://b"),
        ("GET https://h/p?a=1&access_token=x.y-z&b=2#c", "GET https://h/p?a=1&access_token=***&b=2#c"),
        ("https://h/p?X-Amz-Signature=ab%2Fc&api_key=k", "https://h/p?X-Amz-Signature=***&api_key=***"),
        ("'https://h/?password=p' refused", "'https://h/?password=***' refused"),
        ("write ?sender=NAME&epoch=N", "write ?sender=NAME&epoch=N"),
        ("mail a@b about http://host/", "mail a@b about http://host/"),
    ],
)
def test_a_text_keeps_all_but_the_secrets_of_its_addresses(text: str, told: str) -> None:
    assert redact(text) == told


def test_no_error_tells_the_secret_of_an_address() -> None:
    url = "wss://ada:hush@host/feed?token=hush"
    for error in (Misconfigured(url, url, url), Unavailable(url, f"{url} says no", 1.0)):
        again = pickle.loads(pickle.dumps(error))
        assert "hush" not in f"{error} {error!r} {vars(error)} {again} {again!r}"


def test_no_log_tells_the_secret_of_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(message)s"))
    try:
        raise ValueError("ws://ada:hush@host/")
    except ValueError as error:
        record = logging.LogRecord("x", logging.INFO, "x", 1, "to %s", ("redis://:hush@h",), None)
        record.exc_info = (type(error), error, error.__traceback__)
        handler.emit(record)
    said = capsys.readouterr().err
    assert "to redis://h" in said
    assert "ValueError: ws://host/" in said
    assert "hush" not in said


@pytest.mark.parametrize(("name", "so"), [("secret", True), ("sasl.password", True), ("key", False), ("port", False)])
def test_settings_that_are_secrets_are_known_by_name(name: str, so: bool) -> None:
    assert is_secret(name) is so
