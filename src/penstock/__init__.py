"""Streaming data pipelines in Python, on Spark, that account for every record."""

from typing import TYPE_CHECKING, Any

from penstock.contracts import Topic
from penstock.pipeline.description import Pipeline
from penstock.record import Origin, Record

if TYPE_CHECKING:
    from penstock.analysis.frames import seen
    from penstock.channels.binders import bind

__all__ = ["Origin", "Pipeline", "Record", "Topic", "bind", "seen"]


def __getattr__(name: str) -> Any:
    # What takes a while to import comes when it is asked for: `penstock --help` needs neither Spark nor a client.
    if name == "seen":
        from penstock.analysis.frames import seen

        return seen
    if name == "bind":
        from penstock.channels.binders import bind

        return bind
    raise AttributeError(f"penstock has no {name!r}")
