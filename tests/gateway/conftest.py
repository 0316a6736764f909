"""A gateway over channels in memory, and a client in front of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta

import httpx
import pytest

from penstock.core.clock import Clock
from penstock.core.contracts import Channels, Topic
from penstock.gateway.app import build
from penstock.gateway.gateway import Gateway
from penstock.gateway.settings import GatewaySettings
from penstock.testing import MemoryChannels

Opened = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def channels() -> MemoryChannels:
    """`one` has a partition, `two` has two."""
    found = MemoryChannels(None, lease=timedelta(seconds=1.5))
    found.ensure([Topic("one"), Topic("two", partitions=2)])
    return found


@asynccontextmanager
async def _opened(
    channels: Channels, clock: Clock | None = None, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    gateway = Gateway(channels, GatewaySettings(**settings), clock)
    async with (
        gateway.running(),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(build(gateway)), base_url="http://gateway", timeout=30
        ) as client,
    ):
        yield client


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 # what is waited for happens in threads
            await asyncio.sleep(0.005)


@pytest.fixture
def opened() -> Opened:
    """`opened(channels, clock, **settings)`: a client, while the gateway runs."""
    return _opened


@pytest.fixture
async def client(channels: MemoryChannels) -> AsyncIterator[httpx.AsyncClient]:
    async with _opened(channels) as found:
        yield found
