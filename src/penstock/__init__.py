"""Streaming data pipelines in Python, on Spark, that account for every record."""

import importlib
from typing import TYPE_CHECKING, Any

from penstock.core.clock import Clock, Micros, SystemClock, duration
from penstock.core.contracts import Arrival, Channels, Entry, Guarantee, Intake, ResumeState, Source, Topic
from penstock.core.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable
from penstock.core.record import Heartbeat, Origin, OutageInterval, Record
from penstock.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    __version__: str
    from penstock import sources
    from penstock.analysis.frames import seen
    from penstock.analysis.operators import tables
    from penstock.analysis.operators.joins import interval_join
    from penstock.analysis.operators.keyed import Keyed
    from penstock.analysis.operators.variables import ListState, MapState, ValueState
    from penstock.analysis.operators.windows import average, count_window, total
    from penstock.channels.binders import bind
    from penstock.collect.shedding import Shed

__all__ = [
    "Arrival",
    "Channels",
    "Clock",
    "Entry",
    "Guarantee",
    "Heartbeat",
    "Intake",
    "Keyed",
    "ListState",
    "MapState",
    "Micros",
    "Misconfigured",
    "Origin",
    "OutageInterval",
    "PenstockError",
    "Pipeline",
    "Record",
    "Refused",
    "ResumeState",
    "Shed",
    "Source",
    "SystemClock",
    "Topic",
    "Unaccounted",
    "Unavailable",
    "ValueState",
    "__version__",
    "average",
    "bind",
    "count_window",
    "duration",
    "interval_join",
    "seen",
    "sources",
    "tables",
    "total",
]

_MODULES = {"sources": "penstock.sources", "tables": "penstock.analysis.operators.tables"}
_LAZY = {
    "Keyed": "analysis.operators.keyed",
    "ListState": "analysis.operators.variables",
    "MapState": "analysis.operators.variables",
    "Shed": "collect.shedding",
    "ValueState": "analysis.operators.variables",
    "average": "analysis.operators.windows",
    "bind": "channels.binders",
    "count_window": "analysis.operators.windows",
    "interval_join": "analysis.operators.joins",
    "seen": "analysis.frames",
    "total": "analysis.operators.windows",
}
"""Names that are imported on first use: `penstock --help` needs neither Spark nor a client library."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("penstock")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _LAZY:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(importlib.import_module(f"penstock.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
