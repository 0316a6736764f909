"""A topic as it is, told to people and to programs. No I/O but the questions to its binder."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from rich.console import Console
from rich.table import Table

from penstock.channels.kafka import Kafka
from penstock.channels.kafka.topics import Copies
from penstock.core.contracts import Channels, Topic

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
        kept = "for ever" if topic.keep is None else f"for {span(topic.keep)}"
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
            "keep": topic.keep and topic.keep.total_seconds(),
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


def counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def span(time: timedelta) -> str:
    """A time as it would be written: 7 days, 36 hours, 90 seconds."""
    for unit, length in _UNITS.items():
        if time and not time % length:
            return counted(time // length, unit.removesuffix("s"))
    return f"{time.total_seconds():g} seconds"
