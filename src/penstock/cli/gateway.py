"""`penstock gateway`: channels over HTTP."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.channels import find_channels
from penstock.cli.options import Folder, Profile, Servers
from penstock.core.contracts import Channels
from penstock.gateway.app import serve
from penstock.gateway.gateway import Gateway
from penstock.gateway.settings import GatewaySettings
from penstock.pipeline.config import Config
from penstock.supervise.process import async_stop_event


def gateway(
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 takes a free one.")] = 8082,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
) -> None:
    """Serve channels over HTTP until Ctrl-C: append records, read by offsets, join consumer groups.

    GET / lists the addresses. There is no authentication: every client that reaches the port may read and write.
    Without --host, only this machine can reach it.
    """
    settings = Config.read(folder, profile).gateway
    asyncio.run(_serve(find_channels(folder, profile, servers), settings, host, port))


async def _serve(channels: Channels, settings: GatewaySettings, host: str, port: int) -> None:
    stop = async_stop_event()

    def ready(address: str) -> None:
        typer.echo(f"serving {channels.where} at {address}")
        sys.stdout.flush()

    await serve(Gateway(channels, settings), host, port, stop, ready)
