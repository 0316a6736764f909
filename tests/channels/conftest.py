"""What the tests of all binders share."""

from collections.abc import Iterator

import pytest
from tests.channels.binders import Bound, Case
from tests.channels.servers import KafkaServer

from penstock.channels.kafka import Kafka


@pytest.fixture
def bound(request: pytest.FixtureRequest) -> Iterator[Bound]:
    case: Case = request.param
    with case.opened(request) as opened:
        yield opened


@pytest.fixture(scope="session")
def kafka(kafka_server: KafkaServer) -> Kafka:
    return Kafka(kafka_server.servers)
