"""Which records lie in the windows that were closed."""

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from penstock.analysis.recount import within


def test_a_time_lies_in_one_of_many_windows_or_in_none(spark: SparkSession) -> None:
    """Far more than conditions can be nested; the end of a window is not in it."""
    spans = [(-30, -20), *((at, at + 10) for at in range(0, 200_000, 20)), (200_000, 200_010), (200_010, 200_015)]
    windows = [Row(start=start, end=end) for start, end in spans]
    times = [-31, -30, -20, 0, 9, 10, 19, 20, 199_989, 199_990, 200_010, 200_014, 200_015]
    frame = spark.createDataFrame([(at,) for at in times], "at BIGINT").withColumn(
        "event_time", F.timestamp_micros("at")
    )
    found = [row["at"] for row in frame.where(within(windows)).collect()]
    assert found == [-30, 0, 9, 20, 199_989, 200_010, 200_014]
    assert frame.where(~within([])).count() == len(times)
