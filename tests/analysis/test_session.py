"""A session of Spark in the process of somebody else."""

import logging
from logging.config import dictConfig

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession


@pytest.mark.parametrize("wrong", ["SELECT missing FROM range(1)", "SELEC"])
def test_an_error_of_a_query_is_raised_and_not_logged_as_well(
    spark: SparkSession, wrong: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    dictConfig({"version": 1, "disable_existing_loggers": False})  # As web servers do: what was disabled is no more.
    with pytest.raises(AnalysisException):
        spark.sql(wrong)
    assert capfd.readouterr().err == ""
    assert caplog.records == []


def test_the_logs_of_others_keep_their_format(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    """Pytest's handlers are those of each logger that keeps its records to itself: PySpark's do."""
    for wrong in ("SELECT missing FROM range(1)", "SELECT missing"):
        with pytest.raises(AnalysisException):
            spark.sql(wrong)
    with pytest.raises(AnalysisException):
        spark.range(1).select("missing")
    before = caplog.handler.formatter
    keeping = [
        logger
        for logger in logging.getLogger().manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and not logger.propagate
    ]
    assert {"SQLQueryContextLogger", "DataFrameQueryContextLogger"} <= {logger.name for logger in keeping}
    for logger in keeping:
        logger.addHandler(caplog.handler)
        logger.removeHandler(caplog.handler)
    assert caplog.handler.formatter is before
