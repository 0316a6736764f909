"""`penstock topics`: create, list, describe, alter and delete topics, on any binder."""

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from penstock.audit.writers import INTERNAL
from penstock.channels.kafka import Kafka
from penstock.channels.kafka.topics import Copies
from penstock.cli.options import (
    AsJson,
    Folder,
    Profile,
    Servers,
    find_channels,
    given_options,
    parse_duration,
    require_existing,
)
from penstock.cli.standard import inform, print_result, table
from penstock.core.contracts import Channels, Topic
from penstock.core.errors import Misconfigured
from penstock.core.text import counted, printable

FOREVER = "forever"
_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
_MILLISECOND = timedelta(milliseconds=1)
_CHANGES = {"--partitions", "--config", "--retention"}
_OPTIONS = {
    "--create": {"--topic", "--replication-factor", "--compacted", "--if-not-exists", *_CHANGES},
    "--list": set[str](),
    "--describe": {"--topic", "--if-exists"},
    "--alter": {"--topic", "--if-exists", *_CHANGES},
    "--delete": {"--topic", "--if-exists", "--force"},
}
"""The options of each action."""


def topics(
    context: typer.Context,
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
    given = given_options(context)
    action = _action(given)
    if topic is not None and not _NAME.fullmatch(topic):
        fix = "use letters, digits, dots, hyphens and underscores, at most 249 characters"
        raise Misconfigured("--topic", f'"{printable(topic)}" is not a valid name', fix)
    wanted = Topic(
        topic or "", partitions or 1, replication_factor, compacted, _retention(retention), _settings(config or ())
    )
    channels = find_channels(folder, profile, servers)
    if not channels.promise.replay:
        problem = "records are not stored there, so there are no topics"
        raise Misconfigured(f"topics at {channels.where}", problem, "use kafka://, redis:// or file://")
    names = channels.names()
    if topic is not None and action != "--create":
        if topic not in names and if_exists:
            print_result(as_json, {"topic": topic, "exists": False}, [f"{topic} does not exist"])
            return
        require_existing("topic", topic, names, f" at {channels.where}")
    if action == "--create":
        _create(channels, wanted, if_not_exists, as_json)
    elif action == "--list":
        print_result(as_json, {"topics": names}, names)
        if not names and not as_json:
            inform(f"there are no topics at {channels.where}; create one: penstock topics --create --topic NAME")
    elif action == "--describe":
        found = [TopicDescription.of(channels, name) for name in ([topic] if topic else names)]
        parts = (part for one in found for part in one.parts())
        print_result(as_json, {"topics": [one.to_json() for one in found]}, parts)
    elif action == "--alter":
        _alter(channels, wanted, given, as_json)
    else:
        _delete(channels, wanted.name, force, as_json)


# --- options ----------------------------------------------------------------------------------------------------------


def _action(given: Set[str]) -> str:
    """The action; Misconfigured when an option does not apply to it, or one that it needs is missing."""
    actions = [name for name in _OPTIONS if name in given]
    if len(actions) != 1:
        problem = f"{' and '.join(actions)} exclude each other" if actions else "one action is required"
        raise Misconfigured("topics", problem, f"give one of {', '.join(_OPTIONS)}")
    (action,) = actions
    for name in sorted(given - _OPTIONS[action]):
        if users := [other for other, names in _OPTIONS.items() if name in names]:
            raise Misconfigured(name, f"{action} does not use it", f"use it with {', '.join(users)}")
    if action in ("--create", "--alter", "--delete") and "--topic" not in given:
        raise Misconfigured(f"topics {action}", "a topic is required", "give --topic NAME")
    if action == "--alter" and not _CHANGES & given:
        raise Misconfigured("topics --alter", "a change is required", "give --partitions, --config or --retention")
    return action


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, _, value = (part.strip() for part in pair.partition("="))
        if not (key and value):
            raise Misconfigured("--config", f'"{printable(pair)}" is not a setting', "write KEY=VALUE")
        found[key] = value
    return found


def _retention(text: str | None) -> timedelta | None:
    if text is None or text == FOREVER:
        return None
    retention = parse_duration("--retention", text, f"or {FOREVER}")
    if retention < _MILLISECOND:
        raise Misconfigured("--retention", f"{text} is too short", f"give a time such as 7d, or {FOREVER}")
    return retention


# --- actions ----------------------------------------------------------------------------------------------------------


def _create(channels: Channels, topic: Topic, if_not_exists: bool, as_json: bool) -> None:
    if topic.name in channels.names():
        if not if_not_exists:
            fix = "add --if-not-exists, change it with --alter, or choose another name"
            raise Misconfigured(f"topic {topic.name}", f"it exists already at {channels.where}", fix)
        existing = TopicDescription.of(channels, topic.name)
        print_result(as_json, {"created": False, **existing.to_json()}, [f"exists already: {existing.summary}"])
        return
    differences = channels.ensure([topic]).differences
    created = TopicDescription.of(channels, topic.name)
    facts = {"created": True, "differences": differences, **created.to_json()}
    print_result(as_json, facts, [f"created {created.summary}", *differences])
    if differences:
        raise typer.Exit(1)


def _alter(channels: Channels, wanted: Topic, given: Set[str], as_json: bool) -> None:
    name, before, changes = wanted.name, channels.topic(wanted.name), dict[str, str]()
    more = wanted.partitions - before.partitions if "--partitions" in given else 0
    if more < 0:
        problem = f"{name} has {before.partitions}, and partitions cannot be removed"
        fix = f"give more than {before.partitions}, or create another topic and copy this one with penstock replay"
        raise Misconfigured("--partitions", problem, fix)
    if not more and given.isdisjoint({"--config", "--retention"}):
        raise Misconfigured("--partitions", f"{name} has {before.partitions} already", "give a larger number")
    if "--retention" in given:
        kept = wanted.retention
        changes["retention.ms"] = "-1" if kept is None else str(kept // _MILLISECOND)
        if before.compacted:
            changes["cleanup.policy"] = "compact" if kept is None else "compact,delete"
    changes |= wanted.config
    if changes:
        if not isinstance(channels, Kafka):
            problem = f"{channels.where} cannot change the settings of an existing topic"
            fix = "create another topic with them, and copy this one with penstock replay"
            raise Misconfigured("topics --alter", problem, fix)
        channels.alter(name, changes)
    if more:
        channels.ensure([replace(before, partitions=wanted.partitions, replicas=None)])
    after = TopicDescription.of(channels, name)
    lines = [f"now {after.summary}"]
    if more:
        lines.append(f"{counted(more, 'partition')} added: new records of some keys go to another partition")
    print_result(as_json, {"added": more, "changed": changes, **after.to_json()}, lines)


def _delete(channels: Channels, name: str, force: bool, as_json: bool) -> None:
    if name.startswith(INTERNAL) and not force:
        problem = "it is an internal topic: without it, a pipeline loses its progress"
        raise Misconfigured(f"topic {name}", problem, "to delete it anyway, add --force")
    found = TopicDescription.of(channels, name)
    channels.remove(name)
    print_result(as_json, {"deleted": True, **found.to_json()}, [f"deleted {found.summary}"])


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

    def parts(self) -> Iterator[str | Table]:
        yield self.summary
        if self.topic.config:
            yield "  " + ", ".join(f"{key}={value}" for key, value in sorted(self.topic.config.items()))
        brokers = ("leader", "replicas", "in sync") if self.copies else ()
        shown = table("partition", "first", "next", "offsets", *brokers, right=range(4))
        for partition, (first, end) in self.bounds.items():
            cells = [str(partition), str(first), str(end), str(end - first)]
            if (copies := self.copies.get(partition)) is not None:
                cells.append("none" if copies.leader is None else str(copies.leader))
                cells += [", ".join(map(str, sorted(each))) for each in (copies.replicas, copies.in_sync)]
            shown.add_row(*cells)
        yield shown


def _duration(time: timedelta) -> str:
    """A duration as people write it: 7 days, 36 hours, 90 seconds."""
    for unit, length in (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        if time and not time % length:
            return counted(time // length, unit)
    return f"{time.total_seconds():g} seconds"
