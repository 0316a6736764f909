"""`penstock topics`: what Kafka's own tool of that name does, over any binder."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock.channels.kafka import Kafka
from penstock.channels.kafka.topics import Copies
from penstock.cli.channels import OURS, found
from penstock.cli.options import AsJson, Folder, Profile, Servers, parse_duration
from penstock.cli.standard import console
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.text import counted, did_you_mean, printable

FOREVER = "forever"
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_MILLISECOND = timedelta(milliseconds=1)


class Action(StrEnum):
    CREATE = "--create"
    LIST = "--list"
    DESCRIBE = "--describe"
    ALTER = "--alter"
    DELETE = "--delete"


@dataclass(frozen=True)
class Wish:
    """What is asked about topics; None and empty: not said."""

    topic: str | None = None
    partitions: int | None = None
    replication_factor: int | None = None
    config: Sequence[str] = ()
    keep: str | None = None
    compacted: bool = False
    if_not_exists: bool = False
    if_exists: bool = False
    force: bool = False


_FITTING = {
    Action.CREATE: {"topic", "partitions", "replication_factor", "config", "keep", "compacted", "if_not_exists"},
    Action.LIST: set[str](),
    Action.DESCRIBE: {"topic", "if_exists"},
    Action.ALTER: {"topic", "partitions", "config", "keep", "if_exists"},
    Action.DELETE: {"topic", "if_exists", "force"},
}


def topics(
    create: Annotated[bool, typer.Option("--create", help="Make a topic.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="The names of all topics, one to a line.")] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="A topic, or all: partitions, offsets, settings.")
    ] = False,
    alter: Annotated[bool, typer.Option("--alter", help="Give a topic more partitions, or other settings.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Destroy a topic and all that it holds.")] = False,
    topic: Annotated[str | None, typer.Option(metavar="NAME", help="Its name.", show_default=False)] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="How many partitions.", show_default="1")
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(min=1, max=1_000, help="How many brokers hold each record.", show_default="3, or all there are"),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting in the middleware's own words; may be repeated."),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="How long records stay, such as 7d; or forever.", show_default=FOREVER),
    ] = None,
    compacted: Annotated[
        bool, typer.Option("--compacted", help="Only the last record of each key has to stay.")
    ] = False,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Leave a topic that is there.")] = False,
    if_exists: Annotated[bool, typer.Option("--if-exists", help="Do nothing about a topic that is not there.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete even what a pipeline keeps for itself.")] = False,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Create, list, describe, alter and delete topics, with the flags of Kafka's own tool, on any middleware.

    Exits with 0 when it is done, 1 when a topic was made that is not all that was asked for, 2 when it could not be
    done or the question was wrong.
    """
    chosen = dict(zip(Action, (create, list_, describe, alter, delete), strict=True))
    wish = Wish(topic, partitions, replication_factor, config or (), keep, compacted, if_not_exists, if_exists, force)
    action = _action([name for name, asked in chosen.items() if asked])
    _check(action, wish)
    channels = found(folder, profile, servers)
    if not channels.promise.replay:
        raise Misconfigured(
            f"topics at {channels.where}",
            "nothing is kept there, so there are none",
            "use kafka://, redis:// or file://",
        )
    _ACTIONS[action](channels, wish, as_json)


# --- what is asked ----------------------------------------------------------------------------------------------------


def _action(asked: Sequence[Action]) -> Action:
    if len(asked) != 1:
        problem = f"{' and '.join(asked)} are asked for at once" if asked else "it is not said what to do"
        raise Misconfigured("topics", problem, f"give one of {', '.join(Action)}")
    return asked[0]


def _check(action: Action, wish: Wish) -> None:
    """Misconfigured where something is said that the action would pass over, or what it needs is not said."""
    for name, value in vars(wish).items():
        if value not in (None, False, (), []) and name not in _FITTING[action]:
            fitting = [one for one, names in _FITTING.items() if name in names]
            option = f"--{name.replace('_', '-')}"
            raise Misconfigured(option, f"it says nothing to {action}", f"it goes with {', '.join(fitting)}")
    if action in (Action.CREATE, Action.ALTER, Action.DELETE) and wish.topic is None:
        raise Misconfigured(f"topics {action}", "it is not said which topic", "name it: --topic NAME")
    if wish.topic is not None and not _NAME.fullmatch(wish.topic):
        fix = "use letters, digits, dots, hyphens and underscores, at most 249 of them"
        raise Misconfigured("--topic", f'"{printable(wish.topic)}" is not a name', fix)
    if action is Action.ALTER and not (wish.partitions or wish.config or wish.keep):
        raise Misconfigured("topics --alter", "it is not said what to change", "give --partitions, --config or --keep")


def _config(wish: Wish) -> dict[str, str]:
    pairs = [text.partition("=") for text in wish.config]
    for text, (key, equals, value) in zip(wish.config, pairs, strict=True):
        if not (key.strip() and equals and value.strip()):
            raise Misconfigured("--config", f'"{printable(text)}" is no setting', "write KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _keep(wish: Wish) -> timedelta | None:
    if wish.keep is None or wish.keep == FOREVER:
        return None
    kept = parse_duration("--keep", wish.keep, f"or {FOREVER}")
    if kept < _MILLISECOND:
        raise Misconfigured("--keep", f"{wish.keep} is no time", f"give some time, or {FOREVER}")
    return kept


def _known(channels: Channels, wish: Wish, as_json: bool) -> str | None:
    """The name of the topic, which is there; None when it is not, and need not be."""
    name, names = wish.topic or "", channels.names()
    if name in names:
        return name
    if not wish.if_exists:
        fix = (
            did_you_mean(name, names, f"there are {', '.join(names)}")
            if names
            else f"there are none yet; make it: topics --create --topic {name}"
        )
        raise Misconfigured(f"topic {name}", f"there is none of that name at {channels.where}", fix)
    _tell(as_json, {"topic": name, "there": False}, f"{name} is not there; nothing was done")
    return None


# --- what is done -----------------------------------------------------------------------------------------------------


def _create(channels: Channels, wish: Wish, as_json: bool) -> None:
    name = wish.topic or ""
    wanted = Topic(name, wish.partitions or 1, wish.replication_factor, wish.compacted, _keep(wish), _config(wish))
    if name in channels.names():
        if not wish.if_not_exists:
            fix = "leave it as it is: --if-not-exists; change it: --alter; or choose another name"
            raise Misconfigured(f"topic {name}", f"it is there already, at {channels.where}", fix)
        described = Described.of(channels, name)
        _tell(as_json, {"made": False, **described.to_json()}, f"it is there already: {described.sentence}")
        return
    lacking = channels.ensure([wanted]).differences
    described = Described.of(channels, name)
    facts = {"made": True, "differences": lacking, **described.to_json()}
    _tell(as_json, facts, f"made {described.sentence}", *lacking)
    if lacking:
        raise typer.Exit(1)


def _list(channels: Channels, _: Wish, as_json: bool) -> None:
    names = channels.names()
    _tell(as_json, {"topics": names}, *names)
    if not names and not as_json:
        # Not among the names: a pipe gets only those.
        typer.echo(f"there are none yet at {channels.where}; make one: penstock topics --create --topic NAME", err=True)


def _describe(channels: Channels, wish: Wish, as_json: bool) -> None:
    if wish.topic is not None and _known(channels, wish, as_json) is None:
        return
    described = [Described.of(channels, name) for name in ([wish.topic] if wish.topic else channels.names())]
    if as_json:
        typer.echo(json.dumps({"topics": [one.to_json() for one in described]}))
        return
    screen = console()
    for one in described:
        one.show(screen)


def _alter(channels: Channels, wish: Wish, as_json: bool) -> None:
    if (name := _known(channels, wish, as_json)) is None:
        return
    there = channels.topic(name)
    more, changes = _more(there, wish), _changes(channels, there, wish)
    if changes and isinstance(channels, Kafka):
        channels.alter(name, changes)
    if more:
        channels.ensure([replace(there, partitions=there.partitions + more, replicas=None)])
    described = Described.of(channels, name)
    told = [f"now {described.sentence}"]
    if more:
        told.append(f"{counted(more, 'partition')} more: from now on, some keys lie in others than before")
    _tell(as_json, {"added": more, "changed": changes, **described.to_json()}, *told)


def _more(there: Topic, wish: Wish) -> int:
    wanted = wish.partitions or there.partitions
    if wanted < there.partitions:
        raise Misconfigured(
            "--partitions",
            f"{there.name} has {there.partitions}, and never gets fewer: what lies in them would be lost",
            f"give more than {there.partitions}, or make another topic and replay this one into it",
        )
    if wish.partitions == there.partitions and not (wish.config or wish.keep):
        raise Misconfigured("--partitions", f"{there.name} has {there.partitions} already", "give more, or nothing")
    return wanted - there.partitions


def _changes(channels: Channels, there: Topic, wish: Wish) -> Mapping[str, str]:
    """Settings in Kafka's words: the only middleware that changes those of a topic which is there."""
    if not (wish.config or wish.keep):
        return {}
    if not isinstance(channels, Kafka):
        raise Misconfigured(
            "topics --alter",
            f"{channels.where} cannot change the settings of a topic that is there",
            "make another topic with them, and replay this one into it",
        )
    kept: dict[str, str] = {}
    if wish.keep is not None:
        keep = _keep(wish)
        kept["retention.ms"] = "-1" if keep is None else str(keep // _MILLISECOND)
        if there.compacted:
            kept["cleanup.policy"] = "compact" if keep is None else "compact,delete"
    return {**kept, **_config(wish)}


def _delete(channels: Channels, wish: Wish, as_json: bool) -> None:
    if (name := _known(channels, wish, as_json)) is None:
        return
    if name.startswith(OURS) and not wish.force:
        raise Misconfigured(
            f"topic {name}",
            "a pipeline keeps its own books there: without them it forgets how far it was",
            "if that is meant: --force",
        )
    described = Described.of(channels, name)
    channels.remove(name)
    _tell(as_json, {"deleted": True, **described.to_json()}, f"deleted {described.sentence}")


def _tell(as_json: bool, facts: Mapping[str, object], *lines: str) -> None:
    for line in [json.dumps(facts)] if as_json else lines:
        typer.echo(line)


_ACTIONS: dict[Action, Callable[[Channels, Wish, bool], None]] = {
    Action.CREATE: _create,
    Action.LIST: _list,
    Action.DESCRIBE: _describe,
    Action.ALTER: _alter,
    Action.DELETE: _delete,
}


# --- describe ---------------------------------------------------------------------------------------------------------


_UNITS = {"days": timedelta(days=1), "hours": timedelta(hours=1), "minutes": timedelta(minutes=1)}


@dataclass(frozen=True)
class Described:
    topic: Topic
    bounds: Mapping[int, tuple[int, int]]
    copies: Mapping[int, Copies]
    """Where a middleware has several machines; empty otherwise."""

    @classmethod
    def of(cls, channels: Channels, name: str) -> "Described":
        copies = channels.copies(name) if isinstance(channels, Kafka) else {}
        return cls(channels.topic(name), channels.bounds(name), copies)

    @property
    def records(self) -> int:
        """By offsets: some of them may hold none, after compaction and behind transactions."""
        return sum(end - first for first, end in self.bounds.values())

    @property
    def sentence(self) -> str:
        topic = self.topic
        kept = "for ever" if topic.retention is None else f"for {_duration(topic.retention)}"
        compacted = ", of each key the last" if topic.compacted else ""
        return (
            f"{topic.name}: {counted(topic.partitions, 'partition')}, {counted(topic.replicas or 1, 'replica')}, "
            f"{counted(self.records, 'record')} by offsets, kept {kept}{compacted}"
        )

    def to_json(self) -> dict[str, object]:
        topic = self.topic
        return {
            "topic": topic.name,
            "replicas": topic.replicas,
            "compacted": topic.compacted,
            "keep": topic.retention and topic.retention.total_seconds(),
            "config": dict(topic.config),
            "records": self.records,
            "partitions": [
                {
                    "partition": partition,
                    "first": first,
                    "next": end,
                    "records": end - first,
                    **(asdict(self.copies[partition]) if partition in self.copies else {}),
                }
                for partition, (first, end) in self.bounds.items()
            ],
        }

    def show(self, screen: Console) -> None:
        screen.print(self.sentence)
        if self.topic.config:
            screen.print("  " + ", ".join(f"{key}={value}" for key, value in sorted(self.topic.config.items())))
        table = Table("partition", "first", "next", "records", *(("leader", "replicas", "in sync") * bool(self.copies)))
        for column in table.columns[:4]:
            column.justify = "right"
        for partition, (first, end) in self.bounds.items():
            row = [str(partition), str(first), str(end), str(end - first)]
            if self.copies:
                row += _brokers(self.copies.get(partition))
            table.add_row(*row)
        screen.print(table)


def _brokers(copies: Copies | None) -> list[str]:
    if copies is None:
        return ["", "", ""]
    leader = "none" if copies.leader is None else str(copies.leader)
    return [leader, ", ".join(map(str, copies.replicas)), ", ".join(map(str, sorted(copies.in_sync)))]


def _duration(time: timedelta) -> str:
    """A time as it would be written: 7 days, 36 hours, 90 seconds."""
    for unit, length in _UNITS.items():
        if time and not time % length:
            return counted(time // length, unit.removesuffix("s"))
    return f"{time.total_seconds():g} seconds"
