"""A whole pipeline, with everything real: it is killed in the middle, goes on, and every record is accounted for."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from deltalake import DeltaTable
from playwright.sync_api import Browser, ConsoleMessage
from pyspark.sql import SparkSession
from tests.running import Outside, Run, alive, demo, exposed, readable

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.frames import encoded
from penstock.analysis.query import Query
from penstock.pipeline.config import Config
from penstock.pipeline.load import load

RECORDS = 24_000
RATE = 250
SENDERS = 20
Eventually = Callable[..., None]


@pytest.fixture(scope="module")
def feed() -> Iterator[Outside]:
    with closing(Outside(RECORDS, RATE, SENDERS)) as outside:
        yield outside


@pytest.fixture(scope="module")
def run(feed: Outside, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "pipeline.py").write_text(demo())
    (folder / "penstock.toml").write_text(
        f'[sources]\nrsvps = "{feed.url}"\n\n[spark]\nreal_time_batch = "5 seconds"\nevery = "2 seconds"\n'
    )
    running = Run(folder)
    yield running
    running.close()


def test_it_survives_kills_and_accounts_for_every_record(run: Run, feed: Outside, eventually: Eventually) -> None:
    run.start()
    eventually(lambda: " runs; the page is at " in run.said, 180)
    # Only now: a slow start must not leave the kills without records that flow.
    feed.start()
    eventually(lambda: run.records > 1_000, 120)

    # The driver of Spark.
    before = run.tier("analyse")
    assert before
    os.kill(before, signal.SIGKILL)
    eventually(lambda: run.tier("analyse") not in {None, before}, 120)
    assert "analyse died: it was ended by SIGKILL" in run.said

    # The collector.
    taken, before = run.audit()["records"], run.tier("collect")
    assert before
    os.kill(before, signal.SIGKILL)
    eventually(lambda: run.tier("collect") not in {None, before}, 120)
    eventually(lambda: run.records > taken or taken == RECORDS, 120)

    # The auditor.
    before = run.tier("audit")
    assert before
    os.kill(before, signal.SIGKILL)
    eventually(lambda: run.tier("audit") not in {None, before}, 120)

    # Everything at once.
    children = run.kill()
    assert len(children) > 6
    eventually(lambda: not any(alive(child) for child in children), 30)
    run.start()
    eventually(lambda: run.said.count(" runs; the page is at ") == 2, 180)

    eventually(lambda: run.records == RECORDS, 300)
    source = run.audit()
    expected = {"senders": SENDERS, "distinct": RECORDS, "duplicates": 0, "missing": 0, "in_flight": 0, "refused": 0}
    assert {name: source[name] for name in expected} == expected
    eventually(lambda: run.settled(RECORDS), 180)
    verdict = run.penstock("audit", "--strict")
    assert "Whole: nothing is missing." in verdict.stdout, verdict.stdout + verdict.stderr


def test_every_hop_accounts_for_every_record(run: Run) -> None:
    """Exactly, although the driver, the collector, the auditor and all of them at once were killed."""
    told = json.loads(run.penstock("audit", "--json").stdout)
    for hop in told["hops"]:
        assert hop["due"] == sum(hop["outcomes"].values()), hop
        assert hop["missing"] == hop["in_flight"] == hop["outcomes"]["late"] == hop["outcomes"]["refused"] == 0, hop
    reading = {hop["stage"]: hop for hop in told["hops"] if hop["reads"] == "rsvps"}
    assert set(reading) == {
        *("query:people_by_country", "query:trending_topics", "query:answers_by_city", "query:distinct_members"),
        *("query:busy_venues", "store:delta/rsvps"),
    }
    assert {stage: hop["due"] for stage, hop in reading.items()} == dict.fromkeys(reading, RECORDS)
    assert reading["query:people_by_country"]["outcomes"]["filtered"] > 0
    assert reading["query:distinct_members"]["outcomes"]["passed"] == RECORDS


def test_the_status_tells_latency_and_memory(run: Run, eventually: Eventually) -> None:
    # Early: latencies are those of the last five minutes.
    eventually(lambda: run.penstock("status", "--json").returncode == 0, 120)
    told = run.penstock("status", "--json")
    assert told.returncode == 0, told.stdout + told.stderr
    status = json.loads(told.stdout)
    assert status["nodes"]["feed:by_country"]["delivery"]["p50"] > 0
    source = status["nodes"]["source:rsvps"]
    # It ends after some records: then it is done, and has no connection that it could lack.
    assert (source["connected"], source["state"]) in [(True, "connected"), (False, "waiting"), (None, "done")]
    assert status["balance"]["whole"] is True
    assert 0 < status["memory"] < 3 << 30
    assert "by_country" in run.penstock("status").stdout


def test_a_query_computed_again_is_equal_to_its_live_result(run: Run) -> None:
    compared = run.penstock("audit", "--recompute", "people_by_country")
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "Equal" in compared.stdout


def test_results_are_equal_to_a_batch_over_the_log(run: Run, spark: SparkSession, eventually: Eventually) -> None:
    description = load(run.file)
    servers = json.loads((run.folder / ".penstock" / "services.json").read_text())["kafka"]
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    engine = Engine(spark, Config.read(run.folder).spark, KafkaConnector(servers), "", shapes)
    address = json.loads((run.folder / ".penstock" / "run.json").read_text())["redis"]
    with redis.Redis.from_url(address, decode_responses=True) as client:
        for query in description.queries:
            due = recomputed(engine, query)
            assert due
            eventually(lambda query=query, due=due: run.rows(query.into) == due, 120)
            eventually(lambda query=query, due=due: in_redis(client, query.into) == due, 120)


def recomputed(engine: Engine, query: Query) -> dict[str, dict[str, Any]]:
    """The rows that a query has to have now, by key."""
    rows = encoded(engine.recompute(query), query).collect()
    return {json.dumps(json.loads(bytes(row["key"]))): json.loads(bytes(row["value"])) for row in rows}


def in_redis(client: "redis.Redis", channel: str) -> dict[str, dict[str, Any]]:
    prefix = f"penstock:{channel}:row:"
    found = {}
    for key in client.scan_iter(f"{prefix}*", count=1_000):
        if (row := client.hget(key, "row")) is not None:
            found[json.dumps(json.loads(key.removeprefix(prefix)))] = json.loads(str(row))
    return found


def test_the_lake_has_every_record_once(run: Run, eventually: Eventually) -> None:
    lake = run.folder / ".penstock" / "lake" / "rsvps"
    eventually(lambda: numbers(lake)[0] >= RECORDS, 60)
    assert numbers(lake) == (RECORDS, RECORDS)


def numbers(lake: Path) -> tuple[int, int]:
    """How many rows, and how many different origins."""
    table = DeltaTable(lake).to_pyarrow_table(columns=["_sender", "_epoch", "_seq"])
    rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    return len(rows), len(set(rows))


def test_the_page_lives_in_a_browser(run: Run, chromium: Browser) -> None:
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            errors.append(message.text)

    page = chromium.new_page(viewport={"width": 1400, "height": 1000})
    page.on("console", note)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(json.loads((run.folder / ".penstock" / "run.json").read_text())["page"])
    page.wait_for_function("document.querySelectorAll('figure.chart canvas').length === 5", timeout=60_000)
    page.wait_for_function("document.getElementById('verdict').dataset.verdict === 'whole'", timeout=60_000)
    # The status comes again and again, and the numbers with it.
    page.wait_for_function("/[0-9]/.test(document.getElementById('taken').textContent)", timeout=60_000)
    assert "rsvps" in page.inner_text("#graph")
    assert str(RECORDS) in re.sub(r"[^0-9a-z]", "", page.inner_text("#balance"))
    page.close()
    assert errors == []


def test_it_listens_on_this_machine_alone(run: Run) -> None:
    assert exposed(run.pid) == []


def test_only_its_owner_can_read_what_it_keeps(run: Run) -> None:
    assert readable(run.folder / ".penstock") == []


def test_a_second_run_on_the_same_folder_is_refused(run: Run) -> None:
    second = subprocess.run(
        [sys.executable, "-m", "penstock", "run", str(run.file)], capture_output=True, text=True, check=False
    )
    assert second.returncode == 2
    assert f"it is in use by process {run.pid}" in second.stderr


def test_ctrl_c_stops_everything_in_time(run: Run) -> None:
    children = psutil.Process(run.pid).children(recursive=True)
    began = time.monotonic()
    assert run.stop() == 0
    assert time.monotonic() - began < 15  # ten seconds for the services, and some for a busy machine
    assert not any(alive(child) for child in children)
    assert "stopped; the next run continues from here" in run.said
