"""Streaming data pipelines in Python, on Spark, that account for every record."""

from typing import TYPE_CHECKING

from penstock.pipeline.description import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["Pipeline", "seen"]


def seen() -> "Column":
    """How many records are folded into a result row, and the time of the newest of them."""
    # Here and not above: only the analysis needs pyspark, and it takes a while to import.
    from penstock.analysis import frames

    return frames.seen()
