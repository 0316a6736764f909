"""Spark's own word on whether a query may go on from a checkpoint: its planner is asked, over copies of small files."""

import re
import shutil
import tempfile
from pathlib import Path

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from penstock.analysis.checkpoints.integrity import Written
from penstock.analysis.frames import words
from penstock.analysis.plans import analyzed

_OPERATORS = {
    "stateStoreSave": "an aggregation",
    "sessionWindowStateStoreSaveExec": "an aggregation by sessions",
    "dedupe": "dropDuplicates",
    "dedupeWithinWatermark": "dropDuplicatesWithinWatermark",
    "symmetricHashJoin": "a join of streams",
    "globalLimit": "a limit",
    "transformWithStateInPySparkExec": "state in Python",
}


def objection(spark: SparkSession, result: DataFrame, output: str, path: Path, found: Written) -> str | None:
    """What Spark's planner has against going on from this checkpoint; None when it accepts.

    The next batch is planned as at a start of the query, over copies of the files in which Spark notes its operators
    and their schemas. No source is asked, no state is loaded, and the checkpoint stays as it is.
    """
    folder = Path(tempfile.mkdtemp(prefix="penstock-doctor-"))
    try:
        _copy(path, folder, found)
        _plan(spark, result, output, folder, found)
    except (PySparkException, Py4JJavaError) as error:
        return explained(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def _copy(path: Path, folder: Path, found: Written) -> None:
    for log, number in (("offsets", found.begun), ("commits", found.finished)):
        if number is not None:
            (folder / log).mkdir()
            shutil.copy(path / log / str(number), folder / log)
    if found.begun == found.finished:
        # Spark notes what a batch will read before it plans it.
        shutil.copy(path / "offsets" / str(found.begun), folder / "offsets" / str(found.begun + 1))
    for noted in path.glob("state/**/_metadata"):
        shutil.copytree(noted, folder / noted.relative_to(path))


def _plan(spark: SparkSession, result: DataFrame, output: str, folder: Path, found: Written) -> None:
    jvm = spark._jvm
    assert jvm is not None
    streaming = jvm.org.apache.spark.sql.execution.streaming
    execution = streaming.runtime.IncrementalExecution
    metadata = getattr(getattr(streaming.checkpointing, "OffsetSeqMetadata$"), "MODULE$")
    watermarks = getattr(getattr(streaming.runtime, "WatermarkPropagator$"), "MODULE$")
    nothing = getattr(getattr(jvm, "scala.None$"), "MODULE$")
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    someone = jvm.java.util.UUID.randomUUID()
    _, noted, *_ = (folder / "offsets" / str(found.begun)).read_text(encoding="utf-8").splitlines()
    execution(
        spark._jsparkSession,
        analyzed(result),
        modes.Update() if output == "update" else modes.Append(),
        str(folder / "state"),
        someone,
        someone,
        found.begun + (found.begun == found.finished),
        nothing,
        metadata.apply(noted),
        watermarks.noop(),
        True,
        *(getattr(execution, f"$lessinit$greater$default${number}")() for number in range(12, 17)),
    ).executedPlan()


def explained(error: Exception) -> str:
    """Spark's objection, with its facts in words."""
    text = str(error.java_exception.getMessage()) if isinstance(error, Py4JJavaError) else str(error)
    if schemas := re.search(r"Existing (key|value)_schema=(.*?) and new \w+_schema=(.*?)\.\s", text, re.DOTALL):
        return f"its state has the {schemas[1]}s {_columns(schemas[2])}, and would have {_columns(schemas[3])}"
    if operators := re.search(r"in the metadata: \[(.*?)\]; .* in current batch: \[(.*?)\]", text, re.DOTALL):
        had, has = (re.findall(r"OperatorName: (\w+)", operators[number]) for number in (1, 2))
        return f"its state is that of {_named(had)}, and would be that of {_named(has)}"
    return f"Spark objects: {words(error)}"


def _named(operators: list[str]) -> str:
    return ", ".join(_OPERATORS.get(one, one) for one in operators) or "nothing"


def _columns(schema: str) -> str:
    found = re.findall(r"StructField\((\w+),(\w+?)(?:Type)?\b", schema)
    return ", ".join(f"{name} {kind.lower()}" for name, kind in found) or schema
