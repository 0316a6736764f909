"""The channels in a folder: each a folder of its own, with what it is in `meta.json`, and a log for each partition."""

import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import orjson
from pydantic import BaseModel, PositiveInt, ValidationError

from penstock.channels.checks import differences, spelled
from penstock.channels.files import folder as folders
from penstock.channels.files import mark as marks
from penstock.channels.files.log import Log
from penstock.channels.files.recovery import locked
from penstock.core.clock import duration
from penstock.core.contracts import EnsureResult, Topic
from penstock.core.errors import Misconfigured, Unaccounted, Unavailable
from penstock.core.text import did_you_mean

COMPACT_AFTER = "compact.after"
"""Our own word in the settings of a channel: how long a record stays that a later one of its key has replaced."""
_HOUR = timedelta(hours=1)
_META = "meta.json"
_LOCK = ".lock"
_REMOVED = ".removed-"
_NEW = ".new"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


@dataclass(frozen=True, slots=True)
class Known:
    """A channel as it is."""

    id: str
    topic: Topic

    def dumps(self) -> bytes:
        keep = self.topic.retention.total_seconds() if self.topic.retention is not None else None
        told = {"id": self.id, "partitions": self.topic.partitions, "keep": keep, "compacted": self.topic.compacted}
        return orjson.dumps(told | {"config": dict(self.topic.config)}, option=orjson.OPT_INDENT_2)

    @classmethod
    def loads(cls, name: str, document: bytes) -> "Known":
        told = _Meta.model_validate_json(document, strict=True)
        keep = timedelta(seconds=told.keep) if told.keep is not None else None
        return cls(told.id, Topic(name, told.partitions, 1, told.compacted, keep, told.config))


class _Meta(BaseModel):
    id: str
    partitions: PositiveInt
    keep: float | None
    compacted: bool
    config: dict[str, str]


def home(root: Path, channel: str) -> Path:
    """The folder of a channel; Misconfigured when its name could lead elsewhere."""
    if not _NAME.fullmatch(channel):
        fix = "a name has up to 200 letters, digits and . _ -, and does not begin with a dot"
        raise Misconfigured(f"channel {channel!r}", "a folder cannot have this name", fix)
    return root / channel


def partition(root: Path, channel: str, number: int) -> Path:
    return home(root, channel) / str(number)


def known(root: Path, channel: str) -> Known:
    """A channel as it is; Unavailable when it is not there."""
    try:
        return Known.loads(channel, (home(root, channel) / _META).read_bytes())
    except FileNotFoundError:
        raise _absent(root, channel) from None
    except (ValidationError, OverflowError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        path = home(root, channel) / _META
        raise Unaccounted(
            f"channel {channel}", (), f"{path} is damaged: {why}; set it right, or remove the channel"
        ) from error


def _absent(root: Path, channel: str) -> Unavailable:
    return Unavailable(f"channel {channel}", f"there is none of that name in {root}")


def stamp(root: Path, channel: str) -> tuple[int, int] | None:
    """What changes when a channel does; None when it is not there."""
    try:
        told = (home(root, channel) / _META).stat()
    except FileNotFoundError:
        return None
    return told.st_ino, told.st_mtime_ns


def names(root: Path) -> list[str]:
    if not root.exists():
        _check(root)
        return []
    return sorted(one.name for one in root.iterdir() if _NAME.fullmatch(one.name) and (one / _META).exists())


def ensure(root: Path, topics: Sequence[Topic]) -> EnsureResult:
    made, extended = list[str](), list[str]()
    different: list[str] = []
    for topic in topics:
        home(root, topic.name)
        _check_words(topic)
        compact_after(topic)
        if topic.partitions < 1:
            raise Misconfigured(f"channel {topic.name}", f"{topic.partitions} partitions", "ask for 1 at least")
    _check(root)
    root.mkdir(exist_ok=True)
    with folders.alone(root / _LOCK):
        _sweep(root)
        for topic in topics:
            if stamp(root, topic.name) is None:
                _make(root, topic)
                made.append(topic.name)
            here = known(root, topic.name)
            if here.topic.partitions < topic.partitions:
                _extend(root, here, topic.partitions)
                extended.append(topic.name)
            different += differences(here.topic, topic, "file://", [COMPACT_AFTER])
            if (
                here.topic.compacted
                and topic.compacted
                and (after := compact_after(here.topic)) != compact_after(topic)
            ):
                told = topic.config.get(COMPACT_AFTER, "nothing")
                different.append(f"channel {topic.name} has {COMPACT_AFTER}={spelled(after)}, and {told} is declared")
    return EnsureResult(tuple(made), tuple(extended), tuple(different))


def _check_words(topic: Topic) -> None:
    """What nobody knows may be another binder's own word, and is told as a difference; but ours is spelled right."""
    for word in topic.config:
        if word != COMPACT_AFTER and (fix := did_you_mean(word, [COMPACT_AFTER], "", cutoff=0.8)):
            raise Misconfigured(f"channel {topic.name}", f'"{word}" is not a setting', fix)


def remove(root: Path, channel: str) -> None:
    """Destroy a channel. Who is appending to it finishes first, and who comes later is told that it is gone."""
    if stamp(root, channel) is None:
        raise _absent(root, channel)
    with folders.alone(root / _LOCK):
        away = root / f"{_REMOVED}{uuid.uuid4().hex}"
        home(root, channel).rename(away)
        folders.settle(root)
        for path in away.glob(f"*/{marks.NAME}"):
            with path.open("r+b") as mark, locked(mark.fileno()):
                path.unlink()
        _sweep(root)


def _sweep(root: Path) -> None:
    """Take away what was removed, and what somebody left half-made who died over it."""
    for rest in (*root.glob(f"{_REMOVED}*"), *root.glob(f".*{_NEW}")):
        shutil.rmtree(rest)


def compact_after(topic: Topic) -> timedelta:
    told = topic.config.get(COMPACT_AFTER)
    try:
        return duration(told) if told is not None else _HOUR
    except ValueError as error:
        raise Misconfigured(f"channel {topic.name}", f"{COMPACT_AFTER}: {error}") from error


def turn(topic: Topic) -> timedelta | None:
    """How old a segment gets before a new one begins: only closed ones are cleaned."""
    ages = [compact_after(topic)] if topic.compacted else []
    if topic.retention is not None:
        ages.append(topic.retention / 8)
    return min(ages, default=None)


def _check(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise Misconfigured(f"channels in {root}", "it is no folder", "tell a folder")
    if not root.parent.is_dir():
        # Not made: where a disk is not mounted, the records would go to another one.
        raise Misconfigured(f"channels in {root}", f"there is no folder {root.parent}", "make it, or tell another")


def _make(root: Path, topic: Topic) -> None:
    new = root / f".{uuid.uuid4().hex}{_NEW}"
    new.mkdir()
    try:
        for number in range(topic.partitions):
            Log.make(new / str(number))
        ours = {word: told for word, told in topic.config.items() if word == COMPACT_AFTER}
        folders.replace(new / _META, Known(uuid.uuid4().hex, replace(topic, config=ours)).dumps())
        new.rename(home(root, topic.name))
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    folders.settle(root)


def _extend(root: Path, here: Known, partitions: int) -> None:
    for number in range(here.topic.partitions, partitions):
        Log.make(partition(root, here.topic.name, number))
    new = replace(here, topic=replace(here.topic, partitions=partitions))
    folders.replace(home(root, here.topic.name) / _META, new.dumps())
