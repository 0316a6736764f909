import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic

from penstock.core.errors import Misconfigured
from penstock.supervise.folder import LocalSettings, StateFolder
from penstock.supervise.java import Jars, Java, ensure_jars, find_java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.process import Service
from penstock.supervise.supervisor import Event, EventKind, Supervisor

Running = Callable[[Sequence[Service]], AbstractContextManager[Supervisor]]
Watch = Callable[[Supervisor, Callable[[], object]], None]


@pytest.fixture(scope="module")
def java() -> Java:
    return find_java()


@pytest.fixture(scope="module")
def jars(java: Java) -> Jars:
    return ensure_jars(java)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    """One whose name is not a plain one."""
    return StateFolder(tmp_path / "Événements, Jan's" / ".penstock")


def topics(servers: str) -> set[str]:
    return set(AdminClient({"bootstrap.servers": servers}).list_topics(timeout=10).topics)


def create(servers: str, name: str, copies: int) -> None:
    topic = NewTopic(name, num_partitions=3, replication_factor=copies)
    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([topic])[name].result(timeout=30)


def setting(servers: str, topic: str, name: str) -> str | None:
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient({"bootstrap.servers": servers})
    value: str | None = admin.describe_configs([resource])[resource].result(timeout=30)[name].value
    return value


def test_a_broker_keeps_its_topics_through_a_stop_and_through_kill_9(
    java: Java, jars: Jars, folder: StateFolder, running: Running, events: list[Event], watch_until: Watch
) -> None:
    services, servers = kafka_services(java, jars, folder, LocalSettings())
    assert [service.name for service in services] == ["kafka-1"]
    with running(services):
        create(servers, "stopped", copies=1)
    events.clear()
    services, again = kafka_services(java, jars, StateFolder(folder.path), LocalSettings())
    assert again == servers
    with running(services) as supervisor:
        create(servers, "killed", copies=1)
        os.kill(supervisor.processes()["kafka-1"].pid or 0, signal.SIGKILL)
        watch_until(supervisor, lambda: [event.kind for event in events].count(EventKind.READY) == 2)
        assert topics(servers) == {"stopped", "killed"}


def test_another_number_of_brokers_on_the_same_state_is_refused(java: Java, jars: Jars, folder: StateFolder) -> None:
    kafka_services(java, jars, folder, LocalSettings(brokers=3))
    with pytest.raises(Misconfigured, match=r"\[local\] brokers: .*; set brokers = 3"):
        kafka_services(java, jars, folder, LocalSettings(brokers=1))


def test_a_state_keeps_its_number_of_brokers_when_none_is_asked_for(
    java: Java, jars: Jars, folder: StateFolder
) -> None:
    kafka_services(java, jars, folder, LocalSettings(brokers=3))
    services, _ = kafka_services(java, jars, folder, LocalSettings())
    assert [service.name for service in services] == ["kafka-1", "kafka-2", "kafka-3"]


def test_a_cluster_that_lost_its_id_is_not_given_a_new_one(java: Java, jars: Jars, folder: StateFolder) -> None:
    kafka_services(java, jars, folder, LocalSettings())
    (folder.sub("kafka", "1") / "formatted").touch()
    (folder.sub("kafka") / "cluster.json").write_text("{}")
    with pytest.raises(Misconfigured, match=r"cluster\.json: the id of the cluster"):
        kafka_services(java, jars, folder, LocalSettings(brokers=1))


def test_brokers_sit_side_by_side_from_the_set_port_on(java: Java, jars: Jars, folder: StateFolder) -> None:
    port = folder.port("a free one")
    _, servers = kafka_services(java, jars, folder, LocalSettings(brokers=3, kafka_port=port + 1))
    assert servers == f"127.0.0.1:{port + 1},127.0.0.1:{port + 2},127.0.0.1:{port + 3}"


def test_nobody_at_the_port_is_not_ready(java: Java, jars: Jars, folder: StateFolder) -> None:
    services, _ = kafka_services(java, jars, folder, LocalSettings())
    assert not services[0].ready()
