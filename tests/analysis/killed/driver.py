"""A driver to be killed: runs every operator as a query of one session until then.

python driver.py SERVERS RUN CHECKPOINTS LOCAL ORDER

ORDER names the queries as they are to be started.
"""

import sys
import time

from pyspark.sql.streaming.query import StreamingQuery
from tests.analysis.killed.queries import PARTITIONS, UP, Trial, bookmarks, channel, engine_for, trials

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.dead_letters import LateRecords
from penstock.analysis.launch import failed, launch
from penstock.analysis.plans import need
from penstock.analysis.query import Late, Mode
from penstock.analysis.session import session
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.run.accounts import accounting, last_accounts
from penstock.run.warm import spark_archive
from penstock.supervise.java import ensure_jars, find_java

AT_ONCE = 2
"""Tasks of micro-batches that run at once, beside those of real time."""
SHUFFLES = 2
"""The most that a query of those in real time has: a gate, and an aggregation."""


def main(servers: str, run: str, checkpoints: str, local: str, order: str) -> None:
    java, kafka = find_java(), Kafka(servers)
    jars = ensure_jars(java)
    # All batches are remembered: who compares has to know what each of them took.
    conf = {"spark.local.dir": local, "spark.sql.streaming.minBatchesToRetain": "1000"}
    settings = SparkSettings(every="2 seconds", real_time_batch="5 seconds", conf=conf)
    known = trials(run)
    live = {name: SHUFFLES for name, trial in known.items() if trial.live}
    partitions = {channel(run, name): number for name, number in PARTITIONS.items()}
    slots = need([trial.query for trial in known.values()], live, partitions, [], settings.shuffle_partitions)
    archive = spark_archive(java, jars).use_flags()
    with session("killed", settings, java.path, jars.spark, slots.fixed + AT_ONCE, None, archive) as spark:
        sys.stdout.write(UP)
        sys.stdout.flush()
        before = last_accounts(kafka, bookmarks(run))
        running: list[StreamingQuery] = []
        books: list[QueryAccounting] = []

        def start(trial: Trial) -> None:
            engine, query = engine_for(trial, run, spark, settings, servers, checkpoints), trial.query
            started, verdict = launch(engine, query, len(live), {})
            assert verdict.mode is (Mode.REAL_TIME if trial.live else Mode.MICRO_BATCH), f"{query.name}: {verdict}"
            running.append(started)
            if trial.accounted:
                account = before.get(f"query:{query.name}")
                late_records = (
                    LateRecords(query.name, kafka, account.at if account else 0) if query.late is Late.DEAD else None
                )
                books.append(QueryAccounting(engine, query, started, account, kafka, SystemClock(), late_records))

        with accounting(kafka, bookmarks(run), lambda: [one.look() or one.account for one in [*books]], every=0.5):
            for name in order.split(","):
                start(known[name])
            while (error := failed(running)) is None:
                time.sleep(0.1)
        raise error


if __name__ == "__main__":
    main(*sys.argv[1:])
