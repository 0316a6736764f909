"""What the tests of all binders share."""

from collections.abc import Iterator

import pytest
from tests.channels.binders import Bound, Case
from tests.channels.servers import HURRIED, KafkaServer

from penstock.channels.kafka import Kafka
from penstock.pipeline.warm import kafka_archive
from penstock.supervise.folder import StateFolder
from penstock.supervise.jars import Jars
from penstock.supervise.java import Java
from penstock.supervise.kafka import kafka_services
from penstock.supervise.settings import LocalSettings


@pytest.fixture
def bound(request: pytest.FixtureRequest) -> Iterator[Bound]:
    case: Case = request.param
    with case.opened(request) as opened:
        yield opened


@pytest.fixture(scope="session")
def kafka_server(java: Java, jars: Jars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    with StateFolder(tmp_path_factory.mktemp("channels") / ".penstock").held() as folder:
        (service,), servers = kafka_services(java, jars, folder, LocalSettings(), kafka_archive(java, jars).used())
        assert service.folder is not None
        with (service.folder / "server.properties").open("a") as properties:
            properties.write(HURRIED)
        server = KafkaServer(service, servers)
        server.start()
        yield server
        server.kill()


@pytest.fixture(scope="session")
def kafka(kafka_server: KafkaServer) -> Kafka:
    return Kafka(kafka_server.servers)
