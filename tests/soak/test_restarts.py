"""kill -9 of the analysis at random times: at every look after it, all records of the source are due at every query."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from statistics import median
from typing import Any

import pytest
from tests.running import Outside, Run, demo
from tests.soak.sizes import FULL, PATIENCE, RESTARTS, figure
from tests.soak.test_verdicts import judged, pid_of, wait

pytestmark = pytest.mark.skipif(not FULL, reason="minutes; test_verdicts kills the analysis as well")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "pipeline.py").write_text(demo())
    with closing(Outside(10_000_000, 200, 20)) as feed:
        (folder / "penstock.toml").write_text(f'[sources]\nrsvps = "{feed.url}"\n')
        feed.start()
        with closing(Run(folder)) as running:
            running.start()
            running.is_up(240)
            yield running


def test_accounts_are_complete_after_each_restart(run: Run) -> None:
    chance = random.Random(30)
    # The first one comes before any account has settled.
    pauses = [8.0, *(chance.uniform(0, 25) for _ in range(RESTARTS - 1))]
    known: list[float] = []
    done: list[float] = []
    for pause in pauses:
        time.sleep(pause)
        before = passed(judged(run))
        killed = pid_of(run, "analyse")
        os.kill(killed, signal.SIGKILL)
        # A look costs a second of a core: one that follows another at once would slow down what it waits for.
        known.append(wait(partial(whole, run, killed), PATIENCE, every=3.0))
        done.append(known[-1] + wait(partial(accounted, run, before), PATIENCE, every=3.0))
        print(f"whole after {known[-1]:.0f} s, done after {done[-1]:.0f} s", flush=True)  # noqa: T201  # minutes pass
    for what, took in (("the verdict is whole", known), ("those from before processed", done)):
        told = f"after {median(took):.0f} s (median), {max(took):.0f} s (max)"
        figure(f"kill -9 of the analysis, {RESTARTS} times: {what}", told)


def passed(told: dict[str, Any]) -> int:
    """How many records the source has brought."""
    (found,) = (hop["outcomes"]["passed"] for hop in told["hops"] if not hop["reads"])
    return int(found)


def whole(run: Run, killed: int) -> bool:
    """Whether the analysis is back, and the verdict is "whole" again."""
    told = judged(run)
    found = [hop["due"] for hop in queries(told)]
    assert found == [passed(told)] * len(found)
    return told["verdict"] == "whole" and run.tier("analyse") not in (None, killed)


def accounted(run: Run, before: int) -> bool:
    """Whether each query has processed the records that were there before the kill."""
    told = judged(run)
    return all(hop["due"] == passed(told) and hop["due"] - hop["in_flight"] >= before for hop in queries(told))


def queries(told: dict[str, Any]) -> list[dict[str, Any]]:
    hops = [hop for hop in told["hops"] if hop["stage"].startswith("query:") and hop["reads"] == "rsvps"]
    assert len(hops) == 5
    assert not any(hop["missing"] for hop in hops)
    return hops
