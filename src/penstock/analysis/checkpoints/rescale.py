"""Change the number of partitions of a query's state, on a checkpoint that is not in use.

A copy of the checkpoint is kept until the change is complete. The copy gets its final name when it is complete. A copy
that is found later shows that a change was interrupted, and is restored.
"""

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import SparkSession

from penstock.analysis.checkpoints.batches import numbers, on_disk, read_offsets
from penstock.analysis.frames import SPARK_ERRORS, description
from penstock.core.errors import Misconfigured, Unaccounted, Unavailable

Say = Callable[[str], None]

_PARTITIONS = "spark.sql.shuffle.partitions"
_BEFORE, _COPYING = ".before-rescale", ".being-copied"
_REFUSALS = {
    "UNSUPPORTED_PROVIDER": "its state is not kept by RocksDB; leave [spark] conf as it is, and begin a new checkpoint",
    "UNSUPPORTED_STATEFUL_OPERATOR": "Spark cannot spread the state of one of its operators anew",
    "UNSUPPORTED_TRANSFORM_WITH_STATE_VARIABLE_TYPE": "Spark cannot spread the state of one of its variables anew",
    "OFFSET_SEQ_NOT_FOUND": "a note of its offsets is gone: files of the checkpoint were removed",
    "MISSING_OFFSET_SEQ_METADATA": "it was made by a Spark that is too old",
    "UNSUPPORTED_OFFSET_SEQ_VERSION": "it was made by a Spark that is too old",
}


@dataclass(frozen=True, slots=True)
class Rescaled:
    """The result: the number of partitions before and after, the rows of the state, and the seconds."""

    query: str
    before: int
    after: int
    rows: int
    seconds: float
    unfinished: bool
    """Its last batch was not committed: it is repeated, and writes its rows again."""


def spread(folder: str) -> int | None:
    """The number of state partitions of a checkpoint; None when it is not fixed yet, or unknown."""
    path = on_disk(folder)
    # An uncommitted batch counts as well: Spark repeats it.
    if path is None or not (begun := numbers(path / "offsets")):
        return None
    try:
        metadata, _ = read_offsets(path, begun[-1])
        return int(metadata["conf"][_PARTITIONS])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def recover(folder: str) -> bool:
    """Restore a checkpoint after an interrupted rescaling; return whether there was one.

    The checkpoint must not be in use.
    """
    if (path := on_disk(folder)) is None:
        return False
    shutil.rmtree(_sibling(path, _COPYING), ignore_errors=True)
    if not (copy := _sibling(path, _BEFORE)).exists():
        return False
    if path.exists():
        shutil.rmtree(path)
    copy.rename(path)
    return True


def rescale(spark: SparkSession, query: str, folder: str, partitions: int, say: Say = lambda _: None) -> Rescaled:
    """Change the number of partitions of a query's state. The query must not run.

    Misconfigured when it is impossible. Whenever this raises, the checkpoint is unchanged.
    """
    path, before = ready(query, folder, partitions, say)
    unfinished = numbers(path / "offsets")[-1] != numbers(path / "commits")[-1]
    began = time.monotonic()
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    say(f"keeping a copy of the checkpoint, {size / 2**20:,.1f} MiB")
    with _kept(query, path, size):
        with _explained(query):
            rows = _rows(spark, folder)
            if not rows:
                raise Misconfigured(f"query {query}", "it has no state", "there is nothing to rescale")
            say(f"spreading {sum(rows.values()):,} rows from {before} over {partitions} partitions")
            # Readers of a result ignore repeated rows: a batch may be repeated.
            spark._streamingCheckpointManager.repartition(folder, partitions, enforce_exactly_once_sink=False)
            say("comparing the state before and after")
            found = _rows(spark, folder)
        if found != rows or spread(folder) != partitions:
            raise Unaccounted(f"query {query}", (), f"its state had {_counts(rows)}, and now {_counts(found)}")
        _remove_beyond(path, partitions)
    return Rescaled(query, before, partitions, sum(rows.values()), time.monotonic() - began, unfinished)


def ready(query: str, folder: str, partitions: int, say: Say = lambda _: None) -> tuple[Path, int]:
    """The checkpoint and its number of state partitions; Misconfigured when it cannot be rescaled.

    An interrupted attempt is undone first.
    """
    if partitions < 1:
        raise Misconfigured(f"query {query}", f"the number of partitions is {partitions}", "use 1 or more")
    if (path := on_disk(folder)) is None:
        problem = f"its checkpoint at {folder} is not on a local file system"
        raise Misconfigured(f"query {query}", problem, "copy it to a local folder ([spark] checkpoints), and back")
    if not path.exists() and not _sibling(path, _BEFORE).exists():
        problem = f"it has no checkpoint at {folder}"
        raise Misconfigured(f"query {query}", problem, "set [spark] shuffle_partitions before its first run")
    if recover(folder):
        say("an earlier attempt was interrupted; the checkpoint was restored")
    before = spread(folder)
    if before is None or not numbers(path / "commits"):
        problem = "it has no committed batch"
        raise Misconfigured(f"query {query}", problem, "run it for a while; or set [spark] shuffle_partitions")
    if before == partitions:
        raise Misconfigured(f"query {query}", f"its state has {partitions} partitions already")
    return path, before


@contextmanager
def _kept(query: str, path: Path, size: int) -> Iterator[None]:
    """Keep a copy of the folder while the body changes it; restore it if that fails."""
    copying, copy = _sibling(path, _COPYING), _sibling(path, _BEFORE)
    try:
        shutil.copytree(path, copying)
        copying.rename(copy)
    except OSError as error:
        shutil.rmtree(copying, ignore_errors=True)
        # The first file that could not be copied.
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        fix = f"it takes {size / 2**20:,.1f} MiB beside {path}"
        raise Misconfigured(f"query {query}", f"no copy of its checkpoint can be kept: {why}", fix) from error
    try:
        yield
    except BaseException:
        recover(str(path))
        raise
    # Renamed first: a partly removed copy must not be restored.
    copy.rename(copying)
    shutil.rmtree(copying)


def _remove_beyond(path: Path, partitions: int) -> None:
    """Remove the folders of removed partitions: Spark keeps them, and they would count as damaged."""
    for folder in path.glob("state/[0-9]*/[0-9]*"):
        if folder.name.isdigit() and int(folder.name) >= partitions:
            shutil.rmtree(folder)


def _rows(spark: SparkSession, folder: str) -> dict[str, int]:
    """How many rows each store of each stateful operator holds."""
    found: dict[str, int] = {}
    for one in spark.read.format("state-metadata").load(folder).collect():
        location = {"operatorId": str(one["operatorId"]), "storeName": one["stateStoreName"]}
        properties = json.loads(one["operatorProperties"] or "{}")
        for variable in properties.get("stateVariables", [{"stateName": ""}]):
            name = str(variable["stateName"])
            reader = spark.read.format("statestore").options(**location, **_reading(name))
            found[f"{one['operatorName']}/{one['stateStoreName']}/{name}"] = reader.load(folder).count()
    return found


def _reading(variable: str) -> dict[str, str]:
    """The reader options for a variable of an operator, for its timers, or for an operator without variables."""
    if variable.startswith("$"):
        return {"readRegisteredTimers": "true"}
    return {"stateVarName": variable} if variable else {}


@contextmanager
def _explained(query: str) -> Iterator[None]:
    try:
        yield
    except SPARK_ERRORS as error:
        text = str(error)
        for condition, problem in _REFUSALS.items():
            if f".{condition}]" in text:
                raise Misconfigured(f"query {query}", problem) from None
        line = next((line for line in text.splitlines() if re.search(r"\[[A-Z_.]+\]", line)), text)
        raise Unavailable(f"the state of {query}", description(Exception(line)) or type(error).__name__) from None


def _counts(rows: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} in {name}" for name, count in sorted(rows.items()))


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
