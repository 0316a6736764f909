"""`penstock topics`: create, list, describe, alter and delete topics, on any binder."""

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
from penstock.cli.channels import INTERNAL, find_channels
from penstock.cli.options import AsJson, Folder, Profile, Servers, parse_duration
from penstock.cli.standard import console, inform, print_table
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
class Request:
    """The options of an action; None and empty: not given."""

    topic: str | None = None
    partitions: int | None = None
    replication_factor: int | None = None
    config: Sequence[str] = ()
    retention: str | None = None
    compacted: bool = False
    if_not_exists: bool = False
    if_exists: bool = False
    force: bool = False


_OPTIONS = {
    Action.CREATE: {"topic", "partitions", "replication_factor", "config", "retention", "compacted", "if_not_exists"},
    Action.LIST: set[str](),
    Action.DESCRIBE: {"topic", "if_exists"},
    Action.ALTER: {"topic", "partitions", "config", "retention", "if_exists"},
    Action.DELETE: {"topic", "if_exists", "force"},
}


def topics(
    create: Annotated[bool, typer.Option("--create", help="Create a topic.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the names of all topics.")] = False,
    describe: Annotated[
        bool, typer.Option("--describe", help="Show partitions, offsets and settings of a topic, or of all.")
    ] = False,
    alter: Annotated[bool, typer.Option("--alter", help="Add partitions to a topic, or change its settings.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Delete a topic and all its records.")] = False,
    topic: Annotated[str | None, typer.Option(metavar="NAME", help="The topic.", show_default=False)] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="The number of partitions.", show_default="1")
    ] = None,
    replication_factor: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000, help="The number of replicas.", show_default="3, or the number of brokers if fewer"
        ),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A setting of the middleware, such as of Kafka. May be repeated."),
    ] = None,
    retention: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="How long records are kept, such as 7d; or forever.", show_default=FOREVER
        ),
    ] = None,
    compacted: Annotated[
        bool, typer.Option("--compacted", help="Keep at least the last record of each key, and remove older ones.")
    ] = False,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="With --create: do nothing if the topic exists.")
    ] = False,
    if_exists: Annotated[bool, typer.Option("--if-exists", help="Do nothing if the topic does not exist.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also delete an internal topic of a pipeline.")] = False,
    servers: Servers = None,
    folder: Folder = Path(),
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Create, list, describe, alter and delete topics, with the options of Kafka's own tool.

    Exit code: 0 on success; 1 when a topic was created with other settings than requested; 2 on an error.
    """
    flags = dict(zip(Action, (create, list_, describe, alter, delete), strict=True))
    request = Request(
        topic, partitions, replication_factor, config or (), retention, compacted, if_not_exists, if_exists, force
    )
    action = _action([name for name, enabled in flags.items() if enabled])
    _check(action, request)
    channels = find_channels(folder, profile, servers)
    if not channels.promise.replay:
        problem = "records are not stored there, so there are no topics"
        raise Misconfigured(f"topics at {channels.where}", problem, "use kafka://, redis:// or file://")
    _ACTIONS[action](channels, request, as_json)


# --- options ----------------------------------------------------------------------------------------------------------


def _action(actions: Sequence[Action]) -> Action:
    if len(actions) != 1:
        problem = f"{' and '.join(actions)} exclude each other" if actions else "one action is required"
        raise Misconfigured("topics", problem, f"give one of {', '.join(Action)}")
    return actions[0]


def _check(action: Action, request: Request) -> None:
    """Misconfigured when an option does not apply to the action, or one that it needs is missing."""
    for name, value in vars(request).items():
        if value not in (None, False, (), []) and name not in _OPTIONS[action]:
            actions = [one for one, names in _OPTIONS.items() if name in names]
            option = f"--{name.replace('_', '-')}"
            raise Misconfigured(option, f"{action} does not use it", f"use it with {', '.join(actions)}")
    if action in (Action.CREATE, Action.ALTER, Action.DELETE) and request.topic is None:
        raise Misconfigured(f"topics {action}", "a topic is required", "give --topic NAME")
    if request.topic is not None and not _NAME.fullmatch(request.topic):
        fix = "use letters, digits, dots, hyphens and underscores, at most 249 characters"
        raise Misconfigured("--topic", f'"{printable(request.topic)}" is not a valid name', fix)
    if action is Action.ALTER and not (request.partitions or request.config or request.retention):
        raise Misconfigured("topics --alter", "a change is required", "give --partitions, --config or --retention")


def _config(request: Request) -> dict[str, str]:
    pairs = [text.partition("=") for text in request.config]
    for text, (key, equals, value) in zip(request.config, pairs, strict=True):
        if not (key.strip() and equals and value.strip()):
            raise Misconfigured("--config", f'"{printable(text)}" is not a setting', "write KEY=VALUE")
    return {key.strip(): value.strip() for key, _, value in pairs}


def _retention(request: Request) -> timedelta | None:
    if request.retention is None or request.retention == FOREVER:
        return None
    retention = parse_duration("--retention", request.retention, f"or {FOREVER}")
    if retention < _MILLISECOND:
        raise Misconfigured("--retention", f"{request.retention} is too short", f"give a time such as 7d, or {FOREVER}")
    return retention


def _existing(channels: Channels, request: Request, as_json: bool) -> str | None:
    """The name of the topic; None when it does not exist and --if-exists is given."""
    name, names = request.topic or "", channels.names()
    if name in names:
        return name
    if not request.if_exists:
        listed = f"existing topics: {', '.join(names)}" if names else f"create it: topics --create --topic {name}"
        raise Misconfigured(f"topic {name}", f"not found at {channels.where}", did_you_mean(name, names, listed))
    _print(as_json, {"topic": name, "exists": False}, f"{name} does not exist")
    return None


# --- actions ----------------------------------------------------------------------------------------------------------


def _create(channels: Channels, request: Request, as_json: bool) -> None:
    name = request.topic or ""
    topic = Topic(
        name,
        request.partitions or 1,
        request.replication_factor,
        request.compacted,
        _retention(request),
        _config(request),
    )
    if name in channels.names():
        if not request.if_not_exists:
            fix = "add --if-not-exists, change it with --alter, or choose another name"
            raise Misconfigured(f"topic {name}", f"it exists already at {channels.where}", fix)
        existing = TopicDescription.of(channels, name)
        _print(as_json, {"created": False, **existing.to_json()}, f"exists already: {existing.summary}")
        return
    differences = channels.ensure([topic]).differences
    created = TopicDescription.of(channels, name)
    facts = {"created": True, "differences": differences, **created.to_json()}
    _print(as_json, facts, f"created {created.summary}", *differences)
    if differences:
        raise typer.Exit(1)


def _list(channels: Channels, _: Request, as_json: bool) -> None:
    names = channels.names()
    _print(as_json, {"topics": names}, *names)
    if not names and not as_json:
        inform(f"there are no topics at {channels.where}; create one: penstock topics --create --topic NAME")


def _describe(channels: Channels, request: Request, as_json: bool) -> None:
    if request.topic is not None and _existing(channels, request, as_json) is None:
        return
    names = [request.topic] if request.topic else channels.names()
    descriptions = [TopicDescription.of(channels, name) for name in names]
    if as_json:
        typer.echo(json.dumps({"topics": [description.to_json() for description in descriptions]}))
        return
    screen = console()
    for description in descriptions:
        description.show(screen)


def _alter(channels: Channels, request: Request, as_json: bool) -> None:
    if (name := _existing(channels, request, as_json)) is None:
        return
    before = channels.topic(name)
    more, changes = _added_partitions(before, request), _changed_settings(channels, before, request)
    if changes and isinstance(channels, Kafka):
        channels.alter(name, changes)
    if more:
        channels.ensure([replace(before, partitions=before.partitions + more, replicas=None)])
    after = TopicDescription.of(channels, name)
    lines = [f"now {after.summary}"]
    if more:
        lines.append(f"{counted(more, 'partition')} added: new records of some keys go to another partition")
    _print(as_json, {"added": more, "changed": changes, **after.to_json()}, *lines)


def _added_partitions(before: Topic, request: Request) -> int:
    count = request.partitions or before.partitions
    if count < before.partitions:
        raise Misconfigured(
            "--partitions",
            f"{before.name} has {before.partitions}, and partitions cannot be removed",
            f"give more than {before.partitions}, or create another topic and copy this one with penstock replay",
        )
    if request.partitions == before.partitions and not (request.config or request.retention):
        raise Misconfigured("--partitions", f"{before.name} has {before.partitions} already", "give a larger number")
    return count - before.partitions


def _changed_settings(channels: Channels, before: Topic, request: Request) -> Mapping[str, str]:
    """The changed settings in Kafka's terms: only Kafka can change them."""
    if not (request.config or request.retention):
        return {}
    if not isinstance(channels, Kafka):
        raise Misconfigured(
            "topics --alter",
            f"{channels.where} cannot change the settings of an existing topic",
            "create another topic with them, and copy this one with penstock replay",
        )
    changes: dict[str, str] = {}
    if request.retention is not None:
        retention = _retention(request)
        changes["retention.ms"] = "-1" if retention is None else str(retention // _MILLISECOND)
        if before.compacted:
            changes["cleanup.policy"] = "compact" if retention is None else "compact,delete"
    return {**changes, **_config(request)}


def _delete(channels: Channels, request: Request, as_json: bool) -> None:
    if (name := _existing(channels, request, as_json)) is None:
        return
    if name.startswith(INTERNAL) and not request.force:
        problem = "it is an internal topic: without it, a pipeline loses its progress"
        raise Misconfigured(f"topic {name}", problem, "to delete it anyway, add --force")
    description = TopicDescription.of(channels, name)
    channels.remove(name)
    _print(as_json, {"deleted": True, **description.to_json()}, f"deleted {description.summary}")


def _print(as_json: bool, facts: Mapping[str, object], *lines: str) -> None:
    for line in [json.dumps(facts)] if as_json else lines:
        typer.echo(line)


_ACTIONS: dict[Action, Callable[[Channels, Request, bool], None]] = {
    Action.CREATE: _create,
    Action.LIST: _list,
    Action.DESCRIBE: _describe,
    Action.ALTER: _alter,
    Action.DELETE: _delete,
}


@dataclass(frozen=True)
class TopicDescription:
    topic: Topic
    bounds: Mapping[int, tuple[int, int]]
    copies: Mapping[int, Copies]
    """The brokers of each partition; empty unless on Kafka."""

    @classmethod
    def of(cls, channels: Channels, name: str) -> "TopicDescription":
        copies = channels.copies(name) if isinstance(channels, Kafka) else {}
        return cls(channels.topic(name), channels.bounds(name), copies)

    @property
    def offsets(self) -> int:
        """The number of offsets: an upper bound of the number of records."""
        return sum(end - first for first, end in self.bounds.values())

    @property
    def summary(self) -> str:
        topic = self.topic
        kept = FOREVER if topic.retention is None else f"for {_duration(topic.retention)}"
        compacted = ", compacted" if topic.compacted else ""
        return (
            f"{topic.name}: {counted(topic.partitions, 'partition')}, {counted(topic.replicas or 1, 'replica')}, "
            f"{counted(self.offsets, 'offset')}, kept {kept}{compacted}"
        )

    def to_json(self) -> dict[str, object]:
        topic = self.topic
        return {
            "topic": topic.name,
            "replicas": topic.replicas,
            "compacted": topic.compacted,
            "retention": topic.retention and topic.retention.total_seconds(),
            "config": dict(topic.config),
            "records": self.offsets,
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
        screen.print(self.summary)
        if self.topic.config:
            screen.print("  " + ", ".join(f"{key}={value}" for key, value in sorted(self.topic.config.items())))
        table = Table("partition", "first", "next", "offsets", *(("leader", "replicas", "in sync") * bool(self.copies)))
        for partition, (first, end) in self.bounds.items():
            row = [str(partition), str(first), str(end), str(end - first)]
            table.add_row(*row, *(_brokers(self.copies.get(partition)) if self.copies else ()))
        print_table(table, range(4), screen)


def _brokers(copies: Copies | None) -> tuple[str, str, str]:
    if copies is None:
        return "", "", ""
    leader = "none" if copies.leader is None else str(copies.leader)
    return leader, ", ".join(map(str, copies.replicas)), ", ".join(map(str, sorted(copies.in_sync)))


def _duration(time: timedelta) -> str:
    """A duration as people write it: 7 days, 36 hours, 90 seconds."""
    for unit, length in (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        if time and not time % length:
            return counted(time // length, unit)
    return f"{time.total_seconds():g} seconds"
