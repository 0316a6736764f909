"""Give a query a new checkpoint: the old one is renamed, and the query starts a new generation at given offsets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.analysis.checkpoints.batches import format_offsets, on_disk
from penstock.analysis.checkpoints.note import Note, last_generation, next_generation, set_aside
from penstock.analysis.checkpoints.rescale import recover
from penstock.core.clock import Micros
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Misconfigured
from penstock.pipeline.description import Description
from penstock.run.accounts import last_accounts

OPTION = "--from"


@dataclass(frozen=True)
class Begin:
    """The start of new generations: a timestamp, or offsets. The default is the beginning."""

    timestamp: Micros | None = None
    offsets: Mapping[str, Offsets] = field(default_factory=dict)
    end: bool = False
    """Start at the end of the channels."""

    def positions(self, channels: Channels, channel: str) -> Offsets:
        """The start offsets of a channel; Misconfigured when they do not exist."""
        bounds = channels.bounds(channel)
        if self.timestamp is not None:
            return channels.since(channel, self.timestamp)
        found = {partition: end if self.end else low for partition, (low, end) in bounds.items()}
        for partition, offset in self.offsets.get(channel, {}).items():
            if partition not in bounds:
                has = ", ".join(map(str, sorted(bounds)))
                raise Misconfigured(OPTION, f"{channel} has no partition {partition}", f"it has {has}")
            low, end = bounds[partition]
            if not low <= offset <= end:
                problem = f"{channel}, partition {partition} has no offset {offset}"
                raise Misconfigured(OPTION, problem, f"use {low} to {end}")
            found[partition] = offset
        return found


@dataclass(frozen=True)
class Renewal:
    """The queries that get a new checkpoint. CHANNEL.dead is the query for the dead letters of a channel."""

    names: tuple[str, ...]
    begin: Begin

    def require(self, description: Description) -> None:
        """Misconfigured for an unknown query, or a channel that no query reads."""
        read = {channel for name in self.names for channel in _selected(description, name)[1]}
        if strangers := sorted(self.begin.offsets.keys() - read):
            problem = f"{strangers[0]} is read by none of {', '.join(self.names)}"
            raise Misconfigured(OPTION, problem, f"they read {', '.join(sorted(read))}")

    def apply(self, description: Description, checkpoints: str, channels: Channels) -> Iterator[str]:
        """Rename the checkpoints and write the start offsets; yields a message for each query.

        Nothing is changed before all checks succeed. The pipeline must not run.
        """
        accounts = last_accounts(channels, description.bookmarks)
        notes: dict[str, Note] = {}
        for name, inputs in (_selected(description, one) for one in self.names):
            # An interrupted rescaling would replace the new checkpoint.
            recover(f"{checkpoints}/{name}")
            account = accounts.get(f"query:{name}")
            generation = next_generation(
                name, max(last_generation(f"{checkpoints}/{name}"), account.number if account else 0)
            )
            since = {channel: self.begin.positions(channels, channel) for channel in inputs}
            notes[name] = Note({channel: channels.topic_id(channel) for channel in inputs}, generation, since)
        for name, note in notes.items():
            yield _begun(name, f"{checkpoints}/{name}", note)


def _begun(name: str, folder: str, note: Note) -> str:
    path = on_disk(folder)
    if path is None:
        problem = f"its checkpoint {folder} is on a remote file system"
        raise Misconfigured(f"query {name}", problem, "move it by hand; then the query starts at the beginning")
    aside = set_aside(path)
    note.write(folder)
    since = "; ".join(f"{channel} at {format_offsets(positions)}" for channel, positions in (note.since or {}).items())
    old = f"; its checkpoint is kept as {aside}" if aside else ""
    return f"query {name} starts a new generation: {since}{old}"


def _selected(description: Description, name: str) -> tuple[str, Sequence[str]]:
    """The query's name and its input channels."""
    validated = {channel.dead: channel.name for channel in description.validated}
    if name in validated:
        return name, (validated[name],)
    query = description.query(name)
    return query.name, query.inputs
