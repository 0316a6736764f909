"""The web app: channels and groups over HTTP."""

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.gateway.channels import ChannelRoutes
from penstock.gateway.gateway import Gateway
from penstock.gateway.groups import GroupRoutes
from penstock.web.origin_check import OriginCheck, OriginCheckMiddleware
from penstock.web.responses import SecurityHeaders, handlers
from penstock.web.server import http_config, listen, run_server, url_of, wait_first

OVERVIEW = """\
Penstock's gateway: channels over HTTP. Errors are JSON: error, place, fix.

GET    /channels                          the channels
GET    /channels/NAME                     one: its partitions and settings
POST   /channels/NAME/records             append records; answered when they are acknowledged
GET    /channels/NAME/records             read, with ?partition=0&offset=10, ?since=10m, ?from=beginning|end
                                          or ?positions=0:10,1:7; and &max=100&max_bytes=1000000&wait=10s
GET    /groups                            the groups
GET    /groups/NAME                       one: its members, what it has committed, its lag
POST   /groups/NAME/members               join: {"channels": ["NAME"], "from": "beginning"}
GET    /groups/NAME/members/ID/records    read what is dealt to this member, with ?max=100&max_bytes=1000000&wait=10s
POST   /groups/NAME/members/ID/commit     with ?answer=N: all that it gave is done; until then, it is given again
DELETE /groups/NAME/members/ID            leave

A body of records is JSON, {"records": [{"key": "k", "value": 1, "headers": {"name": "text"}}]}, or a record on each
line (application/x-ndjson), or one raw value (application/octet-stream, with ?key=k). ?format=json|text|base64 tells
what keys and values are, both ways.
"""


def build(gateway: Gateway) -> Starlette:
    """The app. Whoever serves it lets the gateway run meanwhile."""
    channels, groups = ChannelRoutes(gateway), GroupRoutes(gateway)
    return Starlette(
        routes=[
            Route("/", _overview),
            Route("/channels", channels.all),
            Route("/channels/{name}", channels.one),
            Route("/channels/{name}/records", channels.records, methods=["GET", "POST"]),
            Route("/groups", groups.all),
            Route("/groups/{group}", groups.one),
            Route("/groups/{group}/members", groups.join, methods=["POST"]),
            Route("/groups/{group}/members/{member}", groups.leave, methods=["DELETE"]),
            Route("/groups/{group}/members/{member}/records", groups.poll),
            Route("/groups/{group}/members/{member}/commit", groups.commit, methods=["POST"]),
        ],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers=handlers("the gateway", "GET / tells what there is"),
    )


async def _overview(_: Request) -> Response:
    return PlainTextResponse(OVERVIEW)


async def serve(
    gateway: Gateway, host: str, port: int, stop: asyncio.Event, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until `stop`; `ready` is told the address once clients can come. Port 0 takes a free one.

    At the end long polls are answered with what there is, what is being sent is acknowledged, members leave.
    """
    settings, patience = gateway.settings, gateway.settings.patience.total_seconds()
    with listen("the gateway's", host, port, patience) as listener:
        app = OriginCheckMiddleware(build(gateway), OriginCheck(listener, host))
        farewell = round(settings.acknowledged.total_seconds()) + 2
        config = http_config(app, settings.connections, patience, farewell)
        async with gateway.running(), run_server(config, listener) as serving:
            try:
                if ready and not serving.done():
                    ready(url_of(host, listener))
                await wait_first(serving, stop.wait())
            finally:
                gateway.closing.set()
