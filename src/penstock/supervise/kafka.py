"""Kafka in KRaft mode: each process is a broker and a controller. Checks and repairs of its log segments."""

import base64
import shlex
import shutil
import socket
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.core.errors import Misconfigured
from penstock.supervise.folder import HOST, LocalSettings, StateFolder, read_note, write_note
from penstock.supervise.java import Jars, Java
from penstock.supervise.process import Service

_LOGGING = Path(__file__).with_name("log4j2.xml")
# G1 returns memory: after a load it used 223 MB, the serial collector 271, at the same cost.
# C1 only: on a laptop C2 takes more time than it saves.
_JVM_OPTIONS = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:-UsePerfData",
    "-XX:+ExitOnOutOfMemoryError",
)


def kafka_services(
    java: Java, jars: Jars, folder: StateFolder, settings: LocalSettings, jvm: Sequence[str] = ()
) -> tuple[list[Service], str]:
    """The services of the brokers, and their addresses. `jvm`: further flags of their JVMs."""
    cluster, count = _cluster(folder, settings.brokers)
    nodes = range(1, count + 1)
    first_port = settings.kafka_port
    ports = {
        node: folder.port(f"kafka-{node}", first_port and first_port + node - 1, "[local] kafka_port") for node in nodes
    }
    voters = ",".join(f"{node}@{HOST}:{folder.port(f'kafka-{node}-controller')}" for node in nodes)
    services = []
    for node in nodes:
        broker_folder = folder.sub("kafka", str(node))
        properties = _properties(node, ports[node], folder.port(f"kafka-{node}-controller"), voters, count)
        (broker_folder / "server.properties").write_text(
            "".join(f"{key}={value}\n" for key, value in properties.items())
        )
        services.append(
            Service(
                f"kafka-{node}",
                ("sh", "-c", _script(java, jars, cluster, settings.kafka_memory, jvm)),
                folder.log(f"kafka-{node}"),
                ready=partial(_is_ready, node, ports[node], cluster),
                # UTF-8 for file names; fewer malloc arenas use less memory.
                env={"LC_ALL": "C.UTF-8", "MALLOC_ARENA_MAX": "2"},
                folder=broker_folder,
            )
        )
    return services, ",".join(f"{HOST}:{port}" for port in ports.values())


def _cluster(folder: StateFolder, brokers: int | None) -> tuple[str, int]:
    """The id of the cluster and its number of brokers, which never change.

    New, empty controllers could have the majority: then all topics would be lost.
    """
    file = folder.sub("kafka") / "cluster.json"
    remove = f"remove {file.parent} with all records"
    match read_note(file):
        case {"id": str(cluster), "brokers": int(count)}:
            if brokers not in (None, count):
                problem = f"it is {brokers}, but {file.parent} was created with {count}"
                raise Misconfigured("[local] brokers", problem, f"set brokers = {count}, or {remove}")
            return cluster, count
    if any(file.parent.glob("*/formatted")):
        raise Misconfigured(str(file), "the id of the cluster is missing", f"restore the file, or {remove}")
    # Without hyphens: a leading one would be read as an option.
    new = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")
    write_note(file, {"id": new, "brokers": brokers or 1})
    return new, brokers or 1


def _properties(node: int, port: int, controller_port: int, voters: str, brokers: int) -> dict[str, str | int]:
    replicas = min(3, brokers)
    min_isr = 2 if replicas == 3 else 1
    return {
        "process.roles": "broker,controller",
        "node.id": node,
        # A static quorum, so that the ports may change between two runs.
        "controller.quorum.voters": voters,
        "listeners": f"CLIENT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"CLIENT://{HOST}:{port}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "controller.listener.names": "CONTROLLER",
        # Relative to the working directory: a path may contain characters that a properties file cannot.
        "log.dirs": "data",
        "auto.create.topics.enable": "false",
        "default.replication.factor": replicas,
        "min.insync.replicas": min_isr,
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": min_isr,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": min_isr,
        "log.retention.hours": 30 * 24,
        "log.segment.bytes": 256 * 1024 * 1024,
        # A killed broker can only return after its session has timed out.
        "broker.session.timeout.ms": 3_000 if brokers == 1 else 6_000,
        "broker.heartbeat.interval.ms": 500,
        # Sizes for a laptop; the defaults are for a server.
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.num.partitions": 4,
        "log.index.size.max.bytes": 1024 * 1024,
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,
        "num.network.threads": 2,
        "num.io.threads": 4,
        "background.threads": 2,
        "num.recovery.threads.per.data.dir": 2,
        "group.initial.rebalance.delay.ms": 0,
        # A killed consumer keeps its partitions until then. The default is 45 s.
        "group.consumer.session.timeout.ms": 6_000,
        "group.consumer.min.session.timeout.ms": 6_000,
        "group.consumer.heartbeat.interval.ms": 1_000,
        "group.consumer.min.heartbeat.interval.ms": 1_000,
    }


def _script(java: Java, jars: Jars, cluster: str, memory: str, flags: Sequence[str]) -> str:
    """Format the storage if necessary, then exec the broker."""
    jvm = [str(java.path), "-cp", ":".join(map(str, jars.kafka)), f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}"]
    storage_tool = [*jvm, "-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=128m"]
    storage_tool += ["kafka.tools.StorageTool", "format", "--cluster-id", cluster]
    storage_tool += ["--config", "server.properties", "--ignore-formatted"]
    serve = [*jvm, f"-Xmx{memory}", *_JVM_OPTIONS, *flags, "kafka.Kafka", "server.properties"]
    return (
        f"test -e formatted || {{ {shlex.join(storage_tool)} && touch formatted; }} || exit 1\nexec {shlex.join(serve)}"
    )


def _is_ready(node: int, port: int, cluster: str) -> bool:
    """A readiness probe: this broker has joined its cluster and serves clients."""
    # librdkafka logs errors for a port without a listener.
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    client = AdminClient({"bootstrap.servers": f"{HOST}:{port}", "log_level": 0})
    try:
        metadata = client.list_topics(timeout=1)
    except KafkaException:
        return False
    return metadata.cluster_id == cluster and node in metadata.brokers


_HEADER = Struct(">qiibIhi")
_BEFORE_LENGTH = 12
_BEFORE_CRC = 21
_LEAST, _MOST = 49, 128 << 20
_MAGIC = 2
_METADATA = "__cluster_metadata-"


def _table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ 0x82F63B78 if value & 1 else value >> 1
        table.append(value)
    return table


_TABLE = _table()


def crc32c(data: bytes) -> int:
    table, crc = _TABLE, 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Batch:
    """Bytes of a segment: a valid batch, or damaged bytes up to the next valid batch."""

    start: int
    stop: int
    first: int
    """Its first offset; of damaged bytes, the first missing offset."""
    last: int
    """Its last offset; of damaged bytes, the last missing offset, or -1 if unknown."""
    valid: bool


@dataclass(frozen=True)
class DamagedSegment:
    file: Path
    damaged: tuple[Batch, ...]
    copies: int
    """The number of brokers with this partition."""

    @property
    def channel(self) -> str:
        return self.file.parent.name.rpartition("-")[0]

    @property
    def partition(self) -> int:
        return int(self.file.parent.name.rpartition("-")[2])

    @property
    def repairable(self) -> bool:
        """The metadata log of the cluster cannot be repaired."""
        return not self.file.parent.name.startswith(_METADATA)

    @property
    def offsets(self) -> str:
        """The unreadable offsets, as text."""
        return ", ".join(
            f"{one.first} and later" if one.last < 0 else f"{one.first} to {one.last}" for one in self.damaged
        )

    def repair(self, aside: Path) -> Path:
        """Remove the damaged batches; return the path of the original in the folder `aside`. No broker may run.

        If other brokers have the partition, the whole copy is removed: Kafka fetches it from them.
        """
        broker, folder = self.file.parent.parent.parent.name, self.file.parent
        aside.mkdir(parents=True, exist_ok=True)
        if self.copies > 1:
            kept = _free(aside / f"kafka-{broker}-{folder.name}")
            shutil.move(folder, kept)
            return kept
        kept = _free(aside / f"kafka-{broker}-{folder.name}-{self.file.name}")
        shutil.copy2(self.file, kept)
        data = self.file.read_bytes()
        new = self.file.with_name(f"{self.file.name}.repaired")
        # Readers accept missing offsets, which compaction leaves, too.
        new.write_bytes(b"".join(data[one.start : one.stop] for one in batches(data) if one.valid))
        new.replace(self.file)
        for index in ("index", "timeindex"):
            self.file.with_suffix(f".{index}").unlink(missing_ok=True)
        return kept


def damaged_segments(kafka: Path) -> Iterator[DamagedSegment]:
    """The damaged segments in the folder of the brokers, `.penstock/kafka`."""
    for file in sorted(kafka.glob("*/data/*-*/*.log")):
        if found := tuple(one for one in batches(file.read_bytes()) if not one.valid):
            yield DamagedSegment(file, found, len(list(kafka.glob(f"*/data/{file.parent.name}"))))


def batches(data: bytes) -> Iterator[Batch]:
    """The batches of a segment, from its beginning to its end."""
    at, offset = 0, None
    while at < len(data):
        if (batch := _at(data, at, offset)) is not None:
            yield batch
            at, offset = batch.stop, batch.last + 1
            continue
        following = _next(data, at + 1, offset)
        stop = following.start if following else len(data)
        first = offset if offset is not None else _HEADER.unpack_from(data, at)[0] if len(data) - at >= 61 else 0
        yield Batch(at, stop, first, following.first - 1 if following else -1, valid=False)
        at = stop
        if following is not None:
            offset = following.first


def _next(data: bytes, at: int, offset: int | None) -> Batch | None:
    """The next valid batch. After damage the lengths are not reliable, so this searches for a header."""
    while (magic := data.find(b"\x02", at + 16)) >= 0:
        at = magic - 16
        if (batch := _at(data, at, offset)) is not None:
            return batch
        at += 1
    return None


def _at(data: bytes, at: int, offset: int | None) -> Batch | None:
    """The valid batch at this byte, with offsets from `offset` on."""
    if len(data) - at < _BEFORE_LENGTH + _LEAST:
        return None
    base, length, _, magic, crc, _, delta = _HEADER.unpack_from(data, at)
    stop = at + _BEFORE_LENGTH + length
    if magic != _MAGIC or not _LEAST <= length <= _MOST or stop > len(data) or delta < 0:
        return None
    if base < (offset or 0) or crc32c(data[at + _BEFORE_CRC : stop]) != crc:
        return None
    return Batch(at, stop, base, base + delta, valid=True)


def _free(path: Path) -> Path:
    """A path that does not exist yet."""
    number, free = 1, path
    while free.exists():
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free
