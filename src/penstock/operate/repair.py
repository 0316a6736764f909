"""Finds and repairs damaged files in a state folder while nothing runs there."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import orjson
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyarrow import ArrowException  # type: ignore[import-untyped]  # it ships no types
from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]  # it ships no types

from penstock.analysis.checkpoints.batches import written
from penstock.analysis.checkpoints.doctor import begin_anew
from penstock.analysis.checkpoints.note import note_of
from penstock.audit.ledger import Ledger, Unreadable, set_aside
from penstock.channels.sqlite.repairing import DamagedLog, damaged_logs
from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.supervise.kafka import DamagedSegment, damaged_segments
from penstock.supervise.redis import find_redis

ASIDE = "damaged"
"""The folder for the originals, in the state folder."""


@dataclass(frozen=True)
class Damage:
    """A damaged file."""

    file: Path
    problem: str
    consequence: str
    fix: str
    """What `repair` does; without it, what to do by hand."""
    repair: Callable[[], str] | None = None
    """Repair it; returns what was done."""


def damages(config: Config) -> Iterator[Damage]:
    """All damages. The caller holds the folder, so that nothing writes there."""
    state, aside = config.state, config.state / ASIDE
    for segment in damaged_segments(state / "kafka"):
        yield _of_kafka(segment, aside)
    for log in _logs(config):
        yield _of_log(log, aside)
    yield from _of_redis(state / "redis", aside)
    yield from _of_ledger(config.ledger)
    yield from _of_checkpoints(Path(config.checkpoints))
    for entries in sorted((state / "lake").glob("*/_delta_log")):
        yield from _of_lake(entries.parent)


def _of_kafka(segment: DamagedSegment, aside: Path) -> Damage:
    location = f"{segment.channel}, partition {segment.partition}"
    problem = f"the offsets {segment.offsets} of {location} are damaged"
    if not segment.repairable:
        consequence = "Kafka no longer knows its topics, and does not start"
        return Damage(segment.file, problem, consequence, "bring the file back from a copy of the folder")

    def repair() -> str:
        return f"the original is {segment.repair(aside)}"

    if segment.copies > 1:
        fix = "this copy of the partition is put aside; its broker fetches another from the others"
        return Damage(segment.file, problem, "readers of this copy stop there", fix, repair)
    fix = "the damaged batches are taken out of the log; the audit then names the records as missing"
    return Damage(segment.file, problem, "every reader stops there: queries, stores, the audit", fix, repair)


def _logs(config: Config) -> Iterator[DamagedLog]:
    yield from damaged_logs(config.state / "spool")
    if config.channels.address.startswith("file://"):
        folder = urlsplit(config.channels.address).path
        yield from damaged_logs(config.folder / unquote(folder))


def _of_log(log: DamagedLog, aside: Path) -> Damage:
    def repair() -> str:
        copy, left = log.repair(aside)
        return f"{left:,} records are left; the original is {copy}"

    consequence = f"every reader of {log.channel} stops there; if this is a spool, its source does not start"
    fix = "what cannot be read is taken out; the audit then names the records as missing"
    if not log.readable:
        fix = "none of it can be read: the channel is moved away, and begins anew"
    return Damage(log.file, log.problem, consequence, fix, repair)


def _of_redis(folder: Path, aside: Path) -> Iterator[Damage]:
    # Since version 7 a manifest names the files.
    for file in (*folder.glob("appendonly.aof"), *folder.glob("appendonlydir/*.manifest")):
        result = _redis_check(file)
        if result.returncode == 0 or not file.stat().st_size:
            continue

        def repair(file: Path = file) -> str:
            aside.mkdir(parents=True, exist_ok=True)
            # All of it: loaders fill the rows again from the channels.
            kept = _named(aside / f"redis-{file.parent.name if file.suffix == '.manifest' else file.name}")
            (file.parent if file.suffix == ".manifest" else file).rename(kept)
            return f"the original is {kept}"

        lines = result.stdout.strip().splitlines()
        fix = "it is put aside, and the loaders fill Redis again from the channels"
        problem = lines[0] if lines else "redis-check-aof refuses it"
        yield Damage(file, problem, "Redis does not start", fix, repair)


def _redis_check(file: Path) -> "subprocess.CompletedProcess[str]":
    # The server checks files when it is called by this name.
    return subprocess.run(
        ["redis-check-aof", file.name],
        executable=find_redis(),
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _of_ledger(path: Path) -> Iterator[Damage]:
    if not path.exists():
        return
    try:
        with closing(Ledger(path, read_only=True)) as ledger:
            ledger.verify()
    except Unreadable as error:
        fix = "it is kept as a copy, and the auditor builds a new one from the channels"
        yield Damage(
            path,
            error.problem,
            "its counts are not known",
            fix,
            lambda: f"the original is {set_aside(path)}",
        )


def _of_checkpoints(folder: Path) -> Iterator[Damage]:
    for checkpoint in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not checkpoint.is_dir() or checkpoint.name.rpartition(".")[2].isdigit():
            continue
        try:
            note_of(str(checkpoint))
            written(checkpoint)
        except Misconfigured as error:
            fix = f"restore the file from a backup, or {begin_anew(checkpoint.name)}"
            yield Damage(checkpoint, error.problem, f"the query {checkpoint.name} does not start", fix)


def _of_lake(table: Path) -> Iterator[Damage]:
    fix = f"move {table} away; it is filled again from its channel"
    unreadable = [file for file in sorted((table / "_delta_log").glob("*.json")) if not _is_json(file)]
    try:
        files = DeltaTable(table).file_uris()
    except (DeltaError, OSError) as error:
        problem = str(error).partition("\n")[0]
        for file in unreadable or [table]:
            yield Damage(file, problem, f"the lake {table} cannot be opened", fix)
        return
    for file in map(Path, files):
        try:
            with ParquetFile(file) as opened:
                for _ in opened.iter_batches():
                    pass
        except (ArrowException, OSError) as error:
            problem = str(error).partition("\n")[0]
            yield Damage(file, problem, f"its rows, and so all of {table}, cannot be read", fix)


def _is_json(file: Path) -> bool:
    try:
        return all(isinstance(orjson.loads(line), dict) for line in file.read_bytes().splitlines() if line)
    except ValueError:
        return False


def _named(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free
