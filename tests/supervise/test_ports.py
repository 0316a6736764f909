import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured
from penstock.supervise.ports import HOST, Ports


@contextmanager
def listening(port: int = 0) -> Iterator[int]:
    with socket.create_server((HOST, port)) as server:
        yield server.getsockname()[1]


def test_a_name_keeps_its_port_in_the_next_run(tmp_path: Path) -> None:
    port = Ports(tmp_path / "ports.json").port("redis")
    assert Ports(tmp_path / "ports.json").port("redis") == port


def test_a_port_that_somebody_took_meanwhile_is_replaced(tmp_path: Path) -> None:
    port = Ports(tmp_path / "ports.json").port("redis")
    with listening(port):
        other = Ports(tmp_path / "ports.json").port("redis")
    assert other != port
    assert Ports(tmp_path / "ports.json").port("redis") == other


def test_two_names_never_share_a_port(tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports.json")
    given = [ports.port(f"service-{number}") for number in range(50)]
    assert len(set(given)) == 50


def test_a_set_port_is_given_and_another_name_yields_it(tmp_path: Path) -> None:
    port = Ports(tmp_path / "ports.json").port("redis")
    ports = Ports(tmp_path / "ports.json")
    assert ports.port("kafka", port) == port
    assert ports.port("redis") != port


def test_a_set_port_that_is_taken_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    with listening() as port, pytest.raises(Misconfigured, match=rf"\[local\] redis_port: port {port} is taken"):
        Ports(tmp_path / "ports.json").port("redis", port, "[local] redis_port")


def test_a_set_port_that_another_name_has_is_refused(tmp_path: Path) -> None:
    ports = Ports(tmp_path / "ports.json")
    port = ports.port("kafka")
    with pytest.raises(Misconfigured, match="is taken"):
        ports.port("redis", port)


@pytest.mark.parametrize(
    "text", ['{"redis": "x"}', '{"redis": 99999999}', '{"redis": -1}', '{"redis": null}', "nonsense"]
)
def test_a_spoilt_file_of_ports_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / "ports.json").write_text(text)
    assert 0 < Ports(tmp_path / "ports.json").port("redis") < 65536
