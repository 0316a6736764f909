"""`penstock doctor`: check this machine."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import typer
from rich.text import Text

from penstock.cli.options import AsJson, Folder, Profile
from penstock.cli.standard import print_result
from penstock.core.errors import PenstockError
from penstock.pipeline.config import Config
from penstock.run.warm import is_warmed_up, warm_up
from penstock.supervise.folder import StateFolder
from penstock.supervise.java import cached_jars, ensure_jars, find_java
from penstock.supervise.process import file_limit_warning, raise_file_limit
from penstock.supervise.redis import find_redis


@dataclass(frozen=True)
class Finding:
    what: str
    ok: bool
    details: str


def doctor(folder: Folder = Path(), profile: Profile = None, as_json: AsJson = False) -> None:
    """Check this machine: Python, Java, the jars, Redis, memory, disk, and the settings.

    Exit code: 0 when everything is there, 1 when something is missing. Each finding has a fix.
    """
    findings = [
        _check("Python", lambda: f"{sys.version.split()[0]} at {sys.executable}"),
        _check("Java", _java),
        _check("jars", _jars),
        _check("Redis", lambda: str(find_redis())),
        _check("settings", lambda: f"{Config.read(folder, profile).folder.absolute()} is valid"),
        _check("state folder", lambda: _state(folder)),
        _measure("memory", psutil.virtual_memory().available, 3 << 30, "a pipeline with its services uses up to 3 GiB"),
        _measure("disk", _free(folder), 5 << 30, "logs, checkpoints and lakes are stored here"),
        _files(),
        Finding("processors", True, f"{os.cpu_count()}; each real-time query needs one"),
    ]
    marks = {True: ("ok   ", "green"), False: ("wrong", "bold red")}
    lines = [Text.assemble(marks[finding.ok], f" {finding.what}: {finding.details}") for finding in findings]
    print_result(as_json, [asdict(finding) for finding in findings], lines)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


def _check(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, check())
    except PenstockError as error:
        return Finding(what, False, str(error))


def _java() -> str:
    java = find_java()
    return "; ".join([f"{java.version} at {java.path}", *java.rejected])


def _jars() -> str:
    jars = cached_jars()
    return f"{len(jars.kafka) + len(jars.spark)} of them" if jars else "none yet; the first run downloads them"


def _state(folder: Path) -> str:
    state = StateFolder(Config.read(folder).state)
    pid = state.owner()
    return f"{state.path} is in use by process {pid}" if pid else f"{state.path} is free"


def _free(folder: Path) -> int:
    """The free bytes of the disk of the folder, which may not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def _files() -> Finding:
    few = file_limit_warning(files := raise_file_limit())
    return Finding("open files", few is None, few or f"{files:,} in each process")


def _measure(what: str, have: int, need: int, why: str) -> Finding:
    free = f"{have / 2**30:.1f} GiB free"
    return Finding(what, have >= need, free if have >= need else f"{free}; {need >> 30} GiB are needed: {why}")


def warm() -> None:
    """Fetch the jars and prepare Java for fast starts, once per machine. `penstock run` also does it when needed."""
    java = find_java()
    jars = ensure_jars(java)
    if not is_warmed_up(java, jars):
        warm_up(java, jars)
    typer.echo("Kafka and Spark are ready for fast starts")
