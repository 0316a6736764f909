"""From an address to its binder."""

from pathlib import Path

import pytest

from penstock.channels.binders import bind
from penstock.channels.memory import MemoryChannels
from penstock.channels.sqlite import SqliteChannels
from penstock.core.errors import Misconfigured


def test_a_scheme_is_the_same_in_capitals(tmp_path: Path) -> None:
    assert bind("KAFKA://h:9092").where == "kafka://h:9092"
    assert bind(f"File://{tmp_path}") == SqliteChannels(tmp_path)
    assert bind("Memory://Same") is bind("memory://Same")


def test_what_a_binder_says_of_itself_leads_back_to_it(tmp_path: Path) -> None:
    for address in ("memory://a", f"file://{tmp_path}?sync=no", "kafka://a:1,b:2"):
        binder = bind(address)
        assert bind(binder.where).where == binder.where
    assert isinstance(bind("memory://a"), MemoryChannels)
    assert bind(bind("memory://a").where) is bind("memory://a")
    files = bind(f"file://{tmp_path}?sync=no")
    assert bind(files.where) == files


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("kafak://h", r'kafak://h: no binder knows this address; did you mean "kafka://"\?'),
        ("h:9092", "an address begins with .*kafka://"),
        ("", "an address begins with .*kafka://"),
        ("amqp://user:secret@h/x", "amqp://h/x: no binder"),
        ("file://[x/y", r"channels at file://\[x/y: Invalid IPv6 URL"),
        ("kafka://user:secret@h:9092", "write sasl.username"),
        ("kafka://h:9092?x=y", '"h:9092.x=y" is not a broker; write kafka://host:port,host:port'),
        ("kafka://h:9092/path", "is not a broker"),
        ("kafka://a b", "is not a broker"),
        ("kafka://a,,b", "is not a broker"),
    ],
)
def test_a_wrong_address_is_told_and_no_password(address: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=said) as told:
        bind(address)
    assert "secret" not in str(told.value)
