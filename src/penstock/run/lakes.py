"""The lakes of a pipeline: each is filled by a query of Spark, which runs in the analysis tier."""

from contextlib import suppress
from functools import partial

from penstock.analysis.dead_letters import DeadLetters
from penstock.analysis.engine import Engine
from penstock.analysis.frames import ResultWriters, genuine
from penstock.analysis.lake import Filling, Frame, columns, fill
from penstock.analysis.poison import validation_of
from penstock.analysis.supervision import StreamingQuery, telling
from penstock.audit.account import Account
from penstock.audit.lag import from_what_is_kept
from penstock.audit.writers import Writers
from penstock.core.clock import SystemClock
from penstock.core.contracts import Channels, Offsets
from penstock.core.errors import Misconfigured, Unavailable
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description, StoreSpec
from penstock.pipeline.graph import store_node
from penstock.pipeline.stores import make_store
from penstock.run.queries import Queries
from penstock.run.status import Figures
from penstock.stores.base import Progress
from penstock.stores.lake import LakeStore, LakeTable


class Lake:
    """One channel into its lake."""

    def __init__(
        self, engine: Engine, spec: StoreSpec, description: Description, config: Config, channels: Channels, topic: str
    ) -> None:
        self._engine, self._channels = engine, channels
        self._channel = description.channels[spec.channel]
        store = make_store(spec, description, config, topic)
        assert isinstance(store, LakeStore)
        self._store = store
        self._judged = self._channel in description.with_dead_letters
        self._shape = self._channel.shape
        result = self._channel.result_of is not None
        self._writers = Writers(channels, [description.bookmarks]) if result else None
        self._progress = Progress(spec.channel, SystemClock())
        self.stage = store_node(spec.url, spec.channel)
        self.name = f"{spec.channel}.lake"
        self.work = validation_of(self._shape, self._channel.dead, self.name) if self._judged else None
        """The work that may fail because of a record."""

    def require(self) -> None:
        """Misconfigured when the table cannot be filled from this channel. An unavailable table is retried later."""
        with suppress(Unavailable):
            self._open()

    def start(self) -> StreamingQuery:
        """Start the query at the table's offsets."""
        try:
            table = self._open()
            start = self._begins(table.positions())
        except Unavailable as error:
            self._progress.set_state("waiting", str(error))
            raise
        table.begin(start)
        self._progress.set_totals(table.share(), table.generation)
        dead = DeadLetters(self._channels, self._channel.dead, lambda: table.committed) if self._judged else None
        left_out = self._engine.left_out(self.name, self._channel.name)
        filling = Filling(table, self._shape, self._store.keyed, dead, self.selected, left_out)
        query = fill(self._engine, self.name, self._channel.name, start, partial(self._fill, table, filling))
        self._progress.set_state("loading")
        return query

    def figures(self) -> dict[str, object]:
        """The same figures as of a loader."""
        with suppress(Unavailable):
            self._progress.set_lag(self._lag())
        return self._progress.to_json()

    def account(self) -> Account | None:
        """The account of the table's last commit; None before it was opened."""
        return self._progress.account(self.stage)

    def _open(self) -> LakeTable:
        return self._store.open(columns(self._shape, self._store.keyed).json())

    def _fill(self, table: LakeTable, filling: Filling, batch: Frame, reached: Offsets) -> None:
        try:
            filled = filling(batch, reached)
        except Exception as error:
            # The query fails, and is restarted after a pause.
            self._progress.set_state("waiting", telling(error))
            raise
        times = () if filled.newest is None else [filled.newest]
        self._progress.stored(filled.taken, filled.rows, filled.refused, times)
        self._progress.set_state("loading")
        self._progress.set_totals(table.share(), table.generation)

    def _begins(self, stands: Offsets) -> Offsets:
        """The start offsets of each partition."""
        bounds = self._channels.bounds(self._channel.name)
        for partition, (_, end) in bounds.items():
            if (at := stands.get(partition, 0)) > end:
                raise Misconfigured(
                    f"the channel {self._channel.name}, partition {partition}",
                    f"it ends at {end}, but the lake was filled up to {at}: the channel was recreated",
                    "move the table away, or restore its channel",
                )
        start = {partition: stands.get(partition, low) for partition, (low, _) in bounds.items()}
        return from_what_is_kept(start, bounds) if self._engine.connector.skip_lost else start

    def selected(self, raw: Frame) -> Frame:
        """The records without forged rows of a result."""
        if self._writers is None:
            return raw
        # A writer is announced before its first row: all writers in this batch are known now.
        self._writers.refresh()
        name, writers = self._channel.name, self._writers.known
        if not (tokens := writers.tokens(name)):
            return raw
        return raw.where(genuine(ResultWriters([one.decode() for one in tokens], writers.first(name))))

    def _lag(self) -> int:
        account = self.account()
        stands = account.shares[self._channel.name].until if account else {}
        bounds = self._channels.bounds(self._channel.name)
        return sum(max(0, end - max(stands.get(partition, 0), low)) for partition, (low, end) in bounds.items())


class Lakes:
    def __init__(
        self, engine: Engine, description: Description, config: Config, channels: Channels, ids: dict[str, str]
    ) -> None:
        self._lakes = [
            Lake(engine, spec, description, config, channels, ids[spec.channel]) for spec in description.lakes
        ]

    def require(self) -> None:
        for lake in self._lakes:
            lake.require()

    def start(self, queries: Queries) -> None:
        """Start all, each supervised alone."""
        for lake in self._lakes:
            queries.supervise(lake.name, lake.start, None if lake.work is None else queries.isolation(lake.work))

    def accounts(self) -> list[Account]:
        return [account for lake in self._lakes if (account := lake.account()) is not None]

    def figures(self) -> Figures:
        return {lake.stage: lake.figures() for lake in self._lakes}
