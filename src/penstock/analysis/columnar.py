"""Functions in Python get their records in columns, not pickled one by one; also those of a pipeline's own file.

Spark decides it when a function is made, by the session that there is; a file is read before there is one.
"""

from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

SETTING = "spark.sql.execution.pythonUDF.arrow.enabled"


def in_columns(build: Callable[..., Any], spark: SparkSession) -> None:
    """Let the functions that a query can name run on Arrow, unless the settings of Spark say otherwise.

    Also those made with useArrow=False: Spark does not keep whether that was said.
    """
    plain = [one for one in _named(build) if one.evalType == PythonEvalType.SQL_BATCHED_UDF]
    if plain and spark.conf.get(SETTING) == "true":
        for one in plain:
            one.evalType = PythonEvalType.SQL_ARROW_BATCHED_UDF
            one._judf_placeholder = None


def _named(build: Callable[..., Any]) -> Iterator[UserDefinedFunction]:
    """The functions for Spark among the names of the module, and those that surround the query."""
    cells = getattr(build, "__closure__", None) or ()
    around = [cell.cell_contents for cell in cells if _filled(cell)]
    for value in (*getattr(build, "__globals__", {}).values(), *around):
        # What F.udf() gives is a plain function around the one that Spark runs.
        if isinstance(found := getattr(value, "_unwrapped", None), UserDefinedFunction):
            yield found


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
