"""A pipeline at work, with everything real: its query on Spark, a lake, Redis and the audit."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.soak.dropping import Dropping
from tests.soak.sizes import PATIENCE
from tests.soak.things import PARTITIONS, SCHEMA, WINDOW, Who

from penstock.analysis.accounting import QueryAccounting
from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.launch import launch
from penstock.analysis.query import Query
from penstock.analysis.settings import SparkSettings
from penstock.audit.account import Account
from penstock.audit.auditor import Auditor
from penstock.audit.balance import Balance, balance
from penstock.audit.content import Content
from penstock.audit.hops import Hop
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.core.clock import SystemClock
from penstock.core.contracts import Entry, Offsets
from penstock.operate.recompute import Report, recompute
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.graph import stage_inputs, store_node
from penstock.pipeline.pipeline import Pipeline
from penstock.run.accounts import accounting, last_accounts
from penstock.run.audit import watched
from penstock.run.lakes import Lake
from penstock.stores.lake import LakeStore
from penstock.stores.loader import Loader
from penstock.stores.redis import RedisStore

Lost = Callable[[Entry], bool]


class LosingLake(Lake):
    """A lake that does not get one record."""

    lost: Who | None = None

    def selected(self, raw: DataFrame) -> DataFrame:
        if self.lost is None:
            return super().selected(raw)
        told = {name: F.expr(f"filter(headers, h -> h.key = '{name}')[0].value") for name in ("sender", "seq")}
        sender, seq = self.lost
        is_lost = (told["sender"].cast("string") == sender) & (told["seq"].cast("string") == str(seq))
        return raw.where(~F.coalesce(is_lost, F.lit(False)))


def until(condition: Callable[[], object], patience: float = PATIENCE) -> None:
    """Wait until something is true."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.2)


@dataclass
class Line:
    kafka: Kafka
    engine: Engine
    description: Description
    config: Config
    lake: LakeStore
    _books: QueryAccounting | None = field(default=None, init=False)

    @property
    def query(self) -> Query:
        return self.description.queries[0]

    @property
    def things(self) -> str:
        return self.query.inputs[0]

    @property
    def totals(self) -> str:
        return self.query.into

    def start_query(self) -> None:
        """Launch the query, as the analysis does when it begins and when it comes back."""
        running, _ = launch(self.engine, self.query, 0, {})
        before = last_accounts(self.kafka, self.description.bookmarks).get(f"query:{self.query.name}")
        self._books = QueryAccounting(self.engine, self.query, running, before, self.kafka, SystemClock())

    def stop_query(self) -> None:
        if self._books is not None:
            self._books.running.stop()

    def skip(self, partition: int) -> None:
        """Move the checkpoint of the query past one record, as no query ever should."""
        folder = Path(self.engine.checkpoint(self.query.name))
        last = max(int(file.name) for file in folder.glob("commits/[0-9]*"))
        file = folder / "offsets" / str(last)
        *head, line = file.read_text().splitlines()
        offsets = json.loads(line)
        offsets[self.things][str(partition)] += 1
        file.write_text("\n".join([*head, json.dumps(offsets)]))
        file.with_name(f".{last}.crc").unlink(missing_ok=True)

    def query_account(self) -> list[Account]:
        if self._books is None:
            return []
        self._books.look()
        return [self._books.account]

    def content(self) -> Content:
        with closing(Ledger(self.config.ledger, read_only=True)) as ledger:
            return ledger.content()

    def balance(self) -> Balance:
        """What is not there by now is missing."""
        with closing(Ledger(self.config.ledger, read_only=True)) as ledger:
            unread = ledger.unread({self.things: self.kafka.bounds(self.things)})
            return balance(ledger.content(), SystemClock().now(), 0, unread)

    def hop(self, stage: str) -> Hop:
        [found] = [hop for hop in self.balance().hops if hop.stage == stage]
        return found

    def ends(self, channel: str) -> Offsets:
        return {partition: end for partition, (_, end) in self.kafka.bounds(channel).items()}

    def taken(self) -> bool:
        """Whether the query has accounted for all that its channel holds."""
        account = self.content().accounts.get(f"query:{self.query.name}")
        return account is not None and account.shares[self.things].until == self.ends(self.things)

    def at_rest(self) -> bool:
        """Whether every part has read all there is, the ledger knows it, and nothing is in flight."""
        if not self.taken():
            return False
        content = self.content()
        stages = all(
            stage in content.accounts and content.accounts[stage].shares[channel].until == self.ends(channel)
            for stage, channels in stage_inputs(self.description).items()
            for channel in channels
        )
        read = (*(one.channel for one in watched(self.description)), self.description.heartbeats)
        ends = {channel: {at: end for at, end in self.ends(channel).items() if end} for channel in read}
        whole = all(content.until.get(channel, {}) == end for channel, end in ends.items())
        return stages and whole and self.balance().settled

    def recompute(self) -> Report:
        return recompute(self.engine, self.kafka, self.description, self.config, self.query)


@contextmanager
def line(
    kafka: Kafka,
    spark: SparkSession,
    redis_url: str,
    folder: Path,
    name: str,
    lake_loses: Who | None = None,
    redis_loses: Lost | None = None,
) -> Iterator[Line]:
    """Everything runs, each part as its tier runs it, until the end of the body."""
    environ = {"PENSTOCK_CHANNELS_ADDRESS": kafka.where, "PENSTOCK_REDIS_URL": redis_url}
    description, config = _described(name), Config.read(folder, environ=environ)
    kafka.ensure(topics(description))
    settings = SparkSettings(every="500 ms", real_time_queries=0)
    shapes = {one: channel.shape for one, channel in description.channels.items()}
    engine = Engine(spark, settings, KafkaConnector(kafka.servers), str(folder / "checkpoints"), shapes)
    things, totals = (f"things_{name}", f"totals_{name}")
    (spec,) = description.lakes
    filling = LosingLake(engine, spec, description, config, kafka, kafka.topic_id(things))
    filling.lost = lake_loses
    live = RedisStore(redis_url, totals)
    loaders = {
        store_node("redis://", totals): Loader(kafka, totals, Dropping(live, redis_loses) if redis_loses else live),
    }
    made = Line(kafka, engine, description, config, LakeStore(config.lake_path(spec.url), things))
    with ExitStack() as stack:
        ledger = stack.enter_context(closing(Ledger(config.ledger)))
        auditor = Auditor(kafka, ledger, watched(description), description.heartbeats, bookmarks=description.bookmarks)
        _work(stack, auditor.run)

        def accounts() -> list[Account]:
            told = [loader.account(stage) for stage, loader in loaders.items()]
            return [*made.query_account(), *(account for account in (filling.account(), *told) if account)]

        stack.enter_context(accounting(kafka, description.bookmarks, accounts, every=0.5))
        for loader in loaders.values():
            _work(stack, loader.run)
        stack.callback(filling.start().stop)
        made.start_query()
        stack.callback(made.stop_query)
        yield made


def _work(stack: ExitStack, run: Callable[[threading.Event], None]) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(stop,))
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)


def _described(name: str) -> Description:
    things, totals = f"things_{name}", f"totals_{name}"
    app = Pipeline(f"soak-{name}")
    app.channel(things, schema=SCHEMA, event_time="timestamp_millis(at)", partitions=PARTITIONS, unique="number")
    app.source("ws://127.0.0.1:9", into=things)
    window = f"window(event_time, '{WINDOW} milliseconds')"
    text = f"SELECT {window} AS window, name, sum(n) AS total, seen() FROM {things} GROUP BY {window}, name"
    app.sql_query(totals, key=("window", "name"), sql=text, watermark="10 seconds", mode="micro-batch")
    app.store(things, "delta://lake")
    app.store(totals, "redis://")
    return app.describe()
