"""Practice for the pause between two batches.

Spark plans a query anew for each batch, and in real time nothing flows meanwhile. A JVM takes three times as long for
what it has not done often, and a batch a minute is not often. So it plans the same query beside, until it is quick.
"""

import threading

from penstock.analysis.engine import Engine
from penstock.analysis.frames import encoded
from penstock.analysis.query import Query

TIMES = 25
PAUSE = 0.5


def practise(engine: Engine, query: Query, stop: threading.Event, times: int = TIMES, pause: float = PAUSE) -> int:
    """Plan a query over nothing again and again, with pauses for what it is done for; how often, until `stop`."""
    rows = encoded(engine.over_nothing(query), query)
    for done in range(times):
        if stop.wait(pause):
            return done
        # A frame keeps the plan that it got; this is another one.
        rows.select("*")._jdf.queryExecution().executedPlan()
    return times
