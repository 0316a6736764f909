"""kill -9 of the analysis at random moments: after each, every query has to do with every record of its source."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
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
    took: list[float] = []
    for pause in pauses:
        time.sleep(pause)
        before = passed(judged(run))
        os.kill(pid_of(run, "analyse"), signal.SIGKILL)
        # A look costs a second of a core: one that follows another at once would slow down what it waits for.
        took.append(wait(partial(accounted, run, before), PATIENCE, every=3.0))
    middle = sorted(took)[RESTARTS // 2]
    told = f"accounts complete after {middle:.0f} s in the middle, {max(took):.0f} s at most"
    figure(f"kill -9 of the analysis, {RESTARTS} times", told)


def passed(told: dict[str, Any]) -> int:
    """How many records the source has brought."""
    (found,) = (hop["outcomes"]["passed"] for hop in told["hops"] if not hop["reads"])
    return int(found)


def accounted(run: Run, before: int) -> bool:
    """Each query has all records to do with, and has done so with those that were there before the kill."""
    told = judged(run)
    hops = [hop for hop in told["hops"] if hop["stage"].startswith("query:") and hop["reads"] == "rsvps"]
    assert len(hops) == 5
    assert not any(hop["missing"] for hop in hops)
    return all(hop["due"] == passed(told) and hop["due"] - hop["in_flight"] >= before for hop in hops)
