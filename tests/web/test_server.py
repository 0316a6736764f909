"""Listening on an address."""

import socket

import pytest

from penstock.core.errors import Misconfigured
from penstock.web.server import listen


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "nosuch.invalid", "192.0.2.1", "2001:db8::1"])
def test_listening_on_an_address_of_another_machine_fails(host: str) -> None:
    with pytest.raises(Misconfigured) as caught, listen("the page's", host, 0, 1):
        pass
    assert host in caught.value.location
    assert "choose an address" in caught.value.fix


def test_listening_on_a_used_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(Misconfigured) as caught, listen("the page's", "127.0.0.1", port, 1):
            pass
    assert caught.value.location == f"the page's address 127.0.0.1:{port}"
    assert caught.value.fix == "choose another port"
