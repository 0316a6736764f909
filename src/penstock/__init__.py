"""Streaming data pipelines in Python, on Spark, that account for every record."""

from typing import TYPE_CHECKING, Any

from penstock.pipeline.description import Pipeline

if TYPE_CHECKING:
    from penstock.analysis.frames import seen

__all__ = ["Pipeline", "seen"]


def __getattr__(name: str) -> Any:
    # Only the analysis needs pyspark, which takes a while to import: `seen` comes when it is asked for.
    if name == "seen":
        from penstock.analysis.frames import seen

        return seen
    raise AttributeError(f"penstock has no {name!r}")
