"""Where a source listens that others come to: the same for all of them."""

import socket

import pytest

from penstock.collect.registry import source_at
from penstock.core.contracts import ResumeState
from penstock.core.errors import Misconfigured

DOORS = {"tcp": {}, "ws": {}, "http": {}, "webhook": {"secret": "whsec_" + "c2VjcmV0" * 4}}
doors = pytest.mark.parametrize("kind", DOORS)


@doors
@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("127.0.0.1", "no port"),
        (":80", "no host"),
        ("127.0.0.1:99999", "Port out of range"),
        ("127.0.0.1:80/in?x=1", "more parts"),
        ("127.0.0.1:80/in#x", "more parts"),
        ("me:secret@127.0.0.1:80", "more parts"),
    ],
)
def test_an_address_that_is_no_place_is_misconfigured(kind: str, location: str, said: str) -> None:
    with pytest.raises(Misconfigured, match=rf"source door: .*{said}"):
        source_at(f"listen+{kind}://{location}", "door", DOORS[kind])


def test_lines_have_no_path() -> None:
    with pytest.raises(Misconfigured, match="more parts"):
        source_at("listen+tcp://127.0.0.1:80/path", "door")


@doors
async def test_a_port_that_is_taken_is_misconfigured(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        location = f"127.0.0.1:{other.getsockname()[1]}" + ("" if kind == "tcp" else "/in")
        source = source_at(f"listen+{kind}://{location}", "door", DOORS[kind])
        with pytest.raises(Misconfigured, match=r"source door, address .*choose another port"):
            async with source.open(ResumeState()):
                pass
