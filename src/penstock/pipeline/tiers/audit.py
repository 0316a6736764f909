"""The audit: the ledger of all channels of a pipeline, and its balance told every second."""

import threading
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from penstock.audit.auditor import Auditor
from penstock.audit.balance import balance
from penstock.audit.findings import Kind, Watched
from penstock.audit.latency import Sketch
from penstock.audit.ledger import Ledger
from penstock.audit.rate import Rate
from penstock.audit.recent import Lately
from penstock.clock import SystemClock
from penstock.pipeline.description import Description
from penstock.pipeline.pulse import Figures, pulse
from penstock.pipeline.tiers import Ready, Tier
from penstock.pipeline.wiring import Wiring


def run(description: Description, wiring: Wiring, stop: threading.Event, ready: Ready) -> None:
    """The ledger of all channels of the pipeline, and its balance told every second."""
    kafka = wiring.channels()
    watched = []
    for channel in description.channels.values():
        watched.append(Watched(channel.name, Kind.RESULT if channel.result_of else Kind.SOURCE))
        if not channel.result_of:
            watched.append(Watched(channel.dead, Kind.DEAD))
    clock = SystemClock()
    rates = {one.channel: Rate(clock) for one in watched}
    lately = {one.channel: Lately(clock) for one in watched}

    def figures() -> Figures:
        # Opened anew each time: a reader that stays open would keep the ledger's log from being folded in.
        with closing(Ledger(wiring.ledger, read_only=True)) as reader:
            content = reader.content()
        told = balance(content, clock.now()).to_json(brief=True)
        nodes = {}
        for one in told["channels"]:
            name = one["channel"]
            latency = lately[name].of(content.latencies.get(name) or Sketch()).summary()
            nodes[f"channel:{name}"] = _counted(one, rates[name], latency)
        return {"nodes": nodes, "balance": told}

    with closing(Ledger(wiring.ledger)) as ledger, pulse(kafka, description.status, Tier.AUDIT, figures):
        ready()
        Auditor(kafka, ledger, watched, description.heartbeats).run(stop)


def _counted(channel: Mapping[str, Any], rate: Rate, latency: Mapping[str, float] | None) -> dict[str, Any]:
    rate.reach(channel["records"])
    return {
        "count": channel["records"],
        "rate": rate.per_second(),
        "lag": None,
        "latency": latency,
        "state": "missing" if channel["missing"] else "whole",
        "note": f"{channel['duplicates']} duplicates, {channel['missing']} missing",
    }
