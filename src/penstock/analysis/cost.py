"""What a query costs, as Spark's physical plan tells: how its records reach Python, if at all, and its shuffles."""

import re
from enum import StrEnum

from pyspark.sql import DataFrame

_OPERATOR = re.compile(r"^[\s:+-]*(?:\*\(\d+\) )?([A-Z]\w*)", re.MULTILINE)
_IN_COLUMNS = re.compile(r"Arrow|Pandas|Python")
_BY_ROWS = re.compile(r"BatchEvalPython|TransformWithStateIn|InPandasWithState")


class Cost(StrEnum):
    """The class of a query's cost."""

    JVM = "jvm"
    ARROW = "arrow"
    ROW = "row"

    @property
    def words(self) -> str:
        """What it means for each record, by order of magnitude."""
        match self:
            case Cost.JVM:
                return "no Python: all of it runs in the JVM"
            case Cost.ARROW:
                return "records go to Python in columns: some 3 µs each for a function, hardly any for mapInArrow"
            case Cost.ROW:
                return "records go to Python one by one: some 20 µs each; a function made with useArrow=True costs less"


def cost(result: DataFrame) -> Cost:
    """The class of a query, from its result over streams: the dearest operator decides."""
    names = operators(result)
    if any(_BY_ROWS.search(name) for name in names):
        return Cost.ROW
    return Cost.ARROW if any(_IN_COLUMNS.search(name) for name in names) else Cost.JVM


def shuffles(result: DataFrame) -> int:
    """How often its records change their task on their way."""
    return operators(result).count("Exchange")


def operators(result: DataFrame) -> list[str]:
    """The names of the operators that Spark would run."""
    jvm = result.sparkSession._jvm
    assert jvm is not None
    simple = jvm.org.apache.spark.sql.execution.ExplainMode.fromString("simple")
    # Of a text in SQL alone, Spark would not see that it is about streams.
    analyzed = result.select("*")
    return _OPERATOR.findall(str(analyzed._jdf.queryExecution().explainString(simple)))
