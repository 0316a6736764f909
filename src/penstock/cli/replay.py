"""`penstock replay`: the history of a channel, sent into another one."""

import asyncio
import json
import re
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.channels import found, require_writable
from penstock.cli.options import AsJson, Folder, Profile, Servers, parse_time
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured
from penstock.operate.replay import Replay, Replayed, stretch
from penstock.supervise.signals import stop_on_signals


def replay(
    channel: Annotated[str, typer.Argument(help="The channel whose history is sent again.", show_default=False)],
    into: Annotated[str, typer.Option(help="The channel that gets it; made like the first if it is not there.")],
    since: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="From when on: 10m (ago), or 2026-11-15T10:00.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="MOMENT", help="Up to when; up to now if not said.")] = None,
    speed: Annotated[
        str, typer.Option(help="1x: as it came; 10x: ten times as fast; max: as fast as it goes.")
    ] = "max",
    to: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Other channels that get it.", show_default="the same")
    ] = None,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Send what a channel holds of a time into another one, in the order and at the pace in which it came.

    Records keep their key, payload, identity and event time; the headers replay and from tell that they are history.
    Exits with 0 when all was sent, 1 when it was stopped or broke off: then it tells with which --since to go on.
    """
    pace = _speed(speed)
    source = found(folder, profile, servers)
    target = source if to is None else found(folder, profile, to)
    starts = None if since is None else parse_time("--since", since)
    ends = None if until is None else parse_time("--until", until)
    if starts is not None and ends is not None and ends <= starts:
        raise Misconfigured("--until", "it is not after --since: no time lies between them", "give a later one")
    chosen = stretch(source, channel, starts, ends)
    if _same(source, channel, target, into):
        raise Misconfigured("--into", "every record would be in the channel twice", "name another channel")
    require_writable(target, into)
    _made(source, channel, target, into)
    tell = _Progress(as_json)
    with stop_on_signals() as stop:
        done = asyncio.run(Replay(source, channel, target, into, pace, SystemClock()).run(chosen, stop, tell))
    complete = done.failure is None and not stop.is_set()
    if as_json:
        failure = None if done.failure is None else str(done.failure)
        facts = {"due": done.due, "sent": done.sent, "last": done.last, "failure": failure}
        typer.echo(json.dumps({"channel": channel, "into": into, "complete": complete, **facts}))
    else:
        _tell(f"{channel}: {done.sent:,} records were sent into {into}", done, complete)
    raise typer.Exit(0 if complete else 1)


def _tell(sent: str, done: Replayed, complete: bool) -> None:
    if complete:
        typer.echo(sent)
        return
    typer.echo(f"{sent} before it {'was stopped' if done.failure is None else 'broke off'}")
    if done.failure is not None:
        typer.echo(f"penstock: {done.failure}", err=True)
    if done.last is not None:
        since = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=done.last)
        typer.echo(f"to go on: --since {since.isoformat()}; what came at that very moment is sent again", err=True)


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x?", text)
    if match is None or float(match[1]) == 0:
        raise Misconfigured("--speed", f'"{text}" is no speed', "write 1x, 10x, 0.5x or max")
    return float(match[1])


def _same(source: Channels, channel: str, target: Channels, into: str) -> bool:
    """Whether both are one channel, by whichever addresses they are reached."""
    return into == channel and into in target.names() and target.topic_id(into) == source.topic_id(channel)


def _made(source: Channels, channel: str, target: Channels, into: str) -> None:
    if into not in target.names():
        like = source.topic(channel)
        config = like.config if type(target) is type(source) else {}
        target.ensure([replace(like, name=into, replicas=like.replicas if target is source else None, config=config)])


class _Progress:
    """Tells once a second how far it is, where a person looks."""

    def __init__(self, as_json: bool) -> None:
        self._shown = not as_json and sys.stderr.isatty()
        self._told = 0.0

    def __call__(self, done: Replayed) -> None:
        if self._shown and time.monotonic() - self._told >= 1:
            self._told = time.monotonic()
            typer.echo(f"{done.sent:,} of at most {done.due:,}", err=True)
