"""A session of Spark in the process of somebody else."""

import logging
import os
import sys
from contextlib import closing
from logging.config import dictConfig

import psutil
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from tests.running import exposed

from penstock.analysis.session import conf, escaped
from penstock.analysis.settings import SparkSettings


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


def test_functions_of_users_run_in_the_python_of_the_driver(spark: SparkSession) -> None:
    executable = F.udf(lambda _: sys.executable, "string")
    assert spark.range(1).select(executable("id")).first() == (sys.executable,)


def test_spark_listens_on_this_machine_alone_and_knows_who_connects(spark: SparkSession) -> None:
    # A function in Python: its workers and the daemon that forks them listen, too.
    add = F.udf(lambda number: number + 1, "long")
    assert spark.range(3).select(add("id").alias("id")).groupBy().sum("id").first() == (6,)
    assert exposed(os.getpid()) == []
    assert spark.sparkContext.getConf().get("spark.authenticate") == "true"


def test_what_is_told_no_address_listens_on_this_machine_alone(spark: SparkSession) -> None:
    """As the shuffle of real-time queries does, which knows no setting for it."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    with closing(jvm.java.net.ServerSocket(0)) as listener:
        assert listener.getInetAddress().isLoopbackAddress()
        channel = jvm.java.nio.channels.SocketChannel.open(
            jvm.java.net.InetSocketAddress("127.0.0.1", listener.getLocalPort())
        )
        channel.close()


def test_a_setting_may_be_a_secret_and_is_on_no_command_line(spark: SparkSession) -> None:
    (jvm,) = [one for one in psutil.Process().children() if any("SparkSubmit" in part for part in one.cmdline())]
    assert not any(part.startswith(("--conf", "spark.")) for part in jvm.cmdline())


@pytest.mark.parametrize("master", ["spark://far:7077", "local-cluster[1,1,1024]"])
def test_on_a_cluster_the_settings_of_the_user_decide(master: str) -> None:
    told = conf(SparkSettings(master=master, conf={"spark.driver.bindAddress": "0.0.0.0"}), 4)
    assert {"spark.driver.host", "spark.authenticate"}.isdisjoint(told)
    assert told["spark.driver.bindAddress"] == "0.0.0.0"


@pytest.mark.parametrize("text", ["a=b:c # ! ü\\n", "\U0001f600\n x ", " a\t", ""])
def test_a_setting_comes_to_spark_as_it_was_written(text: str, spark: SparkSession) -> None:
    properties = spark.sparkContext._jvm.java.util.Properties()  # type: ignore[union-attr]
    properties.load(spark.sparkContext._jvm.java.io.StringReader(f"{escaped('a b')}={escaped(text)}\n"))  # type: ignore[union-attr]
    assert properties.getProperty("a b") == text
