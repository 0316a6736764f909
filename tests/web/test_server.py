"""A port to listen on."""

import socket

import pytest

from penstock.core.errors import Misconfigured
from penstock.web.server import listen


@pytest.mark.parametrize("host", ["a..b", "a" * 64, "nosuch.invalid", "192.0.2.1", "2001:db8::1"])
def test_a_host_that_is_not_this_machine_is_told(host: str) -> None:
    with pytest.raises(Misconfigured, match="choose a host that is this machine"), listen("the page's", host, 0, 1):
        pass


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(Misconfigured, match=f"the page's address 127.0.0.1:{port}: .*; choose another port"),
            listen("the page's", "127.0.0.1", port, 1),
        ):
            pass
