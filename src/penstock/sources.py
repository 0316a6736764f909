"""The classes of the built-in sources, for `Pipeline.source`.

    app.source(sources.WebSocket("wss://example.org/rsvps", "rsvps", max_size=1 << 20), into="rsvps")

The arguments are an address, a name, and the options of the address form. Durations are `timedelta`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.collect.files import FilesSource as Files
    from penstock.collect.http import HttpSource as HTTP
    from penstock.collect.polling import PollingSource as Polling
    from penstock.collect.sse import SseSource as SSE
    from penstock.collect.stdin import StdinSource as Stdin
    from penstock.collect.tcp import TcpSource as TCP
    from penstock.collect.webhook import WebhookSource as Webhook
    from penstock.collect.websocket import WebSocketSource as WebSocket
    from penstock.collect.websocket_server import WebSocketServer as WebSocketServer

__all__ = ["HTTP", "SSE", "TCP", "Files", "Polling", "Stdin", "WebSocket", "WebSocketServer", "Webhook"]

_CLASSES = {
    "Files": "files:FilesSource",
    "HTTP": "http:HttpSource",
    "Polling": "polling:PollingSource",
    "SSE": "sse:SseSource",
    "Stdin": "stdin:StdinSource",
    "TCP": "tcp:TcpSource",
    "WebSocket": "websocket:WebSocketSource",
    "WebSocketServer": "websocket_server:WebSocketServer",
    "Webhook": "webhook:WebhookSource",
}
"""Imported on first use, because each has its own libraries."""


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module 'penstock.sources' has no attribute {name!r}")
    module, _, cls = _CLASSES[name].partition(":")
    return getattr(importlib.import_module(f"penstock.collect.{module}"), cls)


def __dir__() -> list[str]:
    return sorted(__all__)
