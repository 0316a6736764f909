"""Streaming data pipelines in Python, on Spark, that account for every record."""

from typing import TYPE_CHECKING, Any

from penstock.core.contracts import Topic
from penstock.core.record import Origin, Record
from penstock.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    __version__: str
    from penstock.analysis.frames import seen
    from penstock.analysis.operators import tables
    from penstock.analysis.operators.joins import joined
    from penstock.analysis.operators.windows import average, by_count, total
    from penstock.analysis.state.keyed import Keyed
    from penstock.analysis.state.variables import List, Map, Value
    from penstock.channels.binders import bind
    from penstock.collect.shedding import Shed

__all__ = [
    "Keyed",
    "List",
    "Map",
    "Origin",
    "Pipeline",
    "Record",
    "Shed",
    "Topic",
    "Value",
    "__version__",
    "average",
    "bind",
    "by_count",
    "joined",
    "seen",
    "tables",
    "total",
]


def __getattr__(name: str) -> Any:
    # What takes a while to import comes when it is asked for: `penstock --help` needs neither Spark nor a client.
    if name == "seen":
        from penstock.analysis.frames import seen

        return seen
    if name == "joined":
        from penstock.analysis.operators.joins import joined

        return joined
    if name == "Keyed":
        from penstock.analysis.state.keyed import Keyed

        return Keyed
    if name in ("List", "Map", "Value"):
        from penstock.analysis.state import variables

        return getattr(variables, name)
    if name == "tables":
        from penstock.analysis.operators import tables

        return tables
    if name in ("average", "by_count", "total"):
        from penstock.analysis.operators import windows

        return getattr(windows, name)
    if name == "Shed":
        from penstock.collect.shedding import Shed

        return Shed
    if name == "bind":
        from penstock.channels.binders import bind

        return bind
    if name == "__version__":
        from importlib.metadata import version

        return version("penstock")
    raise AttributeError(f"penstock has no {name!r}")
