"""`penstock replay`: copy the records of a time range to another channel."""

import asyncio
import re
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import (
    AsJson,
    Folder,
    Profile,
    Servers,
    find_channels,
    require_channels,
    require_writable,
    time_option,
)
from penstock.cli.standard import inform, print_result
from penstock.core.clock import Micros, SystemClock
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured
from penstock.operate.replay import Replay, Replayed, stretch
from penstock.supervise.process import stop_on_signals


def replay(
    channel: Annotated[str, typer.Argument(help="The channel to read.", show_default=False)],
    into: Annotated[
        str, typer.Option(help="The channel to write to. It is created with the same settings if it does not exist.")
    ],
    since: Annotated[Micros | None, time_option("--since", "The start of the range", "the beginning")] = None,
    until: Annotated[Micros | None, time_option("--until", "The end of the range", "now")] = None,
    speed: Annotated[
        str, typer.Option(help="1x: the original speed; 10x: ten times as fast; max: as fast as possible.")
    ] = "max",
    to: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="The address of the channel to write to.", show_default="the same as --servers"
        ),
    ] = None,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Copy the records of a time range to another channel, in order, at the original speed or faster.

    Records keep their key, payload, identity and event time. The headers replay and from mark them as copies.

    Exit code: 0 when all records are copied; 1 when it was stopped or failed, then it prints the --since with which to
    continue; 2 on an error.
    """
    pace = _speed(speed)
    source = find_channels(folder, profile, servers)
    target = source if to is None else find_channels(folder, profile, to)
    if since is not None and until is not None and until <= since:
        raise Misconfigured("--until", "it is not after --since", "give a later time")
    require_channels(source, [channel])
    selection = stretch(source, channel, since, until)
    if _same(source, channel, target, into):
        problem = "it is the same channel: every record would be there twice"
        raise Misconfigured("--into", problem, "give another channel")
    require_writable(target, into)
    _create(source, channel, target, into)
    progress = _Progress(as_json)
    with stop_on_signals() as stop:
        done = asyncio.run(Replay(source, channel, target, into, pace, SystemClock()).run(selection, stop, progress))
    complete = done.failure is None and not stop.is_set()
    failure = None if done.failure is None else str(done.failure)
    facts = {"due": done.due, "sent": done.sent, "last": done.last, "failure": failure}
    text = f"{channel}: {done.sent:,} records copied to {into}"
    if not complete:
        text += f" before it {'was stopped' if failure is None else 'failed'}"
    print_result(as_json, {"channel": channel, "into": into, "complete": complete, **facts}, [text])
    if not (complete or as_json):
        _show_rest(done)
    raise typer.Exit(0 if complete else 1)


def _show_rest(done: Replayed) -> None:
    if done.failure is not None:
        inform(f"penstock: {done.failure}")
    if done.last is not None:
        since = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=done.last)
        inform(f"to continue: --since {since.isoformat()}; records of exactly that time are copied again")


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x?", text)
    if match is None or float(match[1]) == 0:
        raise Misconfigured("--speed", f'"{text}" is not a speed', "write 1x, 10x, 0.5x or max")
    return float(match[1])


def _same(source: Channels, channel: str, target: Channels, into: str) -> bool:
    """Whether both are the same channel, also when their addresses differ."""
    return into == channel and into in target.names() and target.topic_id(into) == source.topic_id(channel)


def _create(source: Channels, channel: str, target: Channels, into: str) -> None:
    if into not in target.names():
        like = source.topic(channel)
        config = like.config if type(target) is type(source) else {}
        target.ensure([replace(like, name=into, replicas=like.replicas if target is source else None, config=config)])


class _Progress:
    """Prints the progress once a second, on a terminal."""

    def __init__(self, as_json: bool) -> None:
        self._shown = not as_json and sys.stderr.isatty()
        self._printed = 0.0

    def __call__(self, done: Replayed) -> None:
        if self._shown and time.monotonic() - self._printed >= 1:
            self._printed = time.monotonic()
            inform(f"{done.sent:,} of at most {done.due:,} records")
