"""A server that says byte for byte what it is told to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
"""The head of an answer with server-sent events."""


@dataclass
class Server:
    """Answers each request with the bytes that come next, the last for ever, and then hangs up or stays."""

    answers: list[bytes]
    stays: bool = False
    heads: list[dict[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/events"

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.heads.append(await head(reader))
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            writer.write(answer)
            await writer.drain()
            if self.stays:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def head(reader: asyncio.StreamReader) -> dict[str, str]:
    """The headers of a request, and in "" its first line."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    return {"": first, **{name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}}


@asynccontextmanager
async def serving(*answers: bytes, stays: bool = False) -> AsyncIterator[Server]:
    server = Server(list(answers), stays)
    async with listening(server.attend) as server.port:
        yield server


@asynccontextmanager
async def listening(attend: Callable[..., Any]) -> AsyncIterator[int]:
    listener = await asyncio.start_server(attend, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()


class Events:
    """A server that keeps all events that it gives, and goes on behind an id.

    Every third one has one, from the first on: what comes before all ids would come again after each crash.
    """

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.writers: set[asyncio.StreamWriter] = set()
        self.sent = 0
        """How far the last connection is."""

    async def add_records(self, payloads: Sequence[bytes]) -> None:
        self.kept += payloads

    async def disconnect(self) -> None:
        for writer in self.writers:
            writer.transport.abort()

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        gone: asyncio.Future[bytes] | None = None
        try:
            sent = int((await head(reader)).get("last-event-id", "0"))
            writer.write(STREAM)
            gone = asyncio.ensure_future(reader.read())
            while not gone.done():
                for payload in self.kept[sent:]:
                    sent = self.sent = sent + 1
                    writer.write(b"id: %d\n" % sent if sent % 3 == 1 else b"")
                    writer.write(b"data: " + payload + b"\r\n\r\n")
                    await writer.drain()
                await asyncio.wait([gone], timeout=0.005)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()
            if gone is not None:
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
