"""Kafka in KRaft mode: each process is a broker and a controller."""

import base64
import shlex
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from penstock.core.errors import Misconfigured
from penstock.supervise.folder import HOST, StateFolder, read_note, write_note
from penstock.supervise.jars import Jars
from penstock.supervise.java import Java
from penstock.supervise.process import Service
from penstock.supervise.settings import LocalSettings

_LOGGING = Path(__file__).with_name("log4j2.xml")
# G1 gives memory back: after a load it held 223 MB where the serial collector held 271, at the same cost.
# The quick compiler alone: on a laptop the thorough one takes more time than it saves.
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
    """A service for each broker, and the addresses at which they will answer; `jvm` are further flags of their Java."""
    cluster, count = _cluster(folder, settings.brokers)
    nodes = range(1, count + 1)
    wanted = settings.kafka_port
    ports = {node: folder.port(f"kafka-{node}", wanted and wanted + node - 1, "[local] kafka_port") for node in nodes}
    voters = ",".join(f"{node}@{HOST}:{folder.port(f'kafka-{node}-controller')}" for node in nodes)
    services = []
    for node in nodes:
        home = folder.sub("kafka", str(node))
        properties = _properties(node, ports[node], folder.port(f"kafka-{node}-controller"), voters, count)
        (home / "server.properties").write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        services.append(
            Service(
                f"kafka-{node}",
                ("sh", "-c", _script(java, jars, cluster, settings.kafka_memory, jvm)),
                folder.log(f"kafka-{node}"),
                ready=_Answers(node, ports[node], cluster),
                # Names of files are text only in a locale that says so; and a JVM needs no arena for each thread.
                env={"LC_ALL": "C.UTF-8", "MALLOC_ARENA_MAX": "2"},
                folder=home,
            )
        )
    return services, ",".join(f"{HOST}:{port}" for port in ports.values())


def _cluster(folder: StateFolder, brokers: int | None) -> tuple[str, int]:
    """The id of the cluster and its number of brokers: made once, and kept.

    New and empty controllers could outvote those that know the topics: the topics would be lost.
    """
    file = folder.sub("kafka") / "cluster.json"
    remove = f"remove {file.parent} and all that its channels hold"
    match read_note(file):
        case {"id": str(known), "brokers": int(made)}:
            if brokers not in (None, made):
                problem = f"{brokers} asked for, but {file.parent} was made with {made}"
                raise Misconfigured("[local] brokers", problem, f"set brokers = {made}, or {remove}")
            return known, made
    if any(file.parent.glob("*/formatted")):
        raise Misconfigured(str(file), "it does not tell the id of the cluster any more", f"restore it, or {remove}")
    # A hyphen in front would be taken for an option.
    new = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "_")
    write_note(file, {"id": new, "brokers": brokers or 1})
    return new, brokers or 1


def _properties(node: int, port: int, controller_port: int, voters: str, brokers: int) -> dict[str, str | int]:
    copies = min(3, brokers)
    enough = 2 if copies == 3 else 1
    return {
        "process.roles": "broker,controller",
        "node.id": node,
        # Fixed, and not joined at run time: so the ports may change between two runs.
        "controller.quorum.voters": voters,
        "listeners": f"CLIENT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"CLIENT://{HOST}:{port}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "controller.listener.names": "CONTROLLER",
        # Below the folder where it starts: a path may hold what a properties file cannot.
        "log.dirs": "data",
        "auto.create.topics.enable": "false",
        "default.replication.factor": copies,
        "min.insync.replicas": enough,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": enough,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": enough,
        "log.retention.hours": 30 * 24,
        "log.segment.bytes": 256 * 1024 * 1024,
        # A broker that was killed cannot come back before its old session is over.
        "broker.session.timeout.ms": 3_000 if brokers == 1 else 6_000,
        "broker.heartbeat.interval.ms": 500,
        # Sizes for a machine that has other things to do: the defaults are those of a server.
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
        # A member that was killed holds its partitions until then; the default is 45 s, for networks that stall.
        "group.consumer.session.timeout.ms": 6_000,
        "group.consumer.min.session.timeout.ms": 6_000,
        "group.consumer.heartbeat.interval.ms": 1_000,
        "group.consumer.min.heartbeat.interval.ms": 1_000,
    }


def _script(java: Java, jars: Jars, cluster: str, memory: str, flags: Sequence[str]) -> str:
    """Format the storage where that was not done, then become the broker."""
    jvm = [
        str(java.path),
        *("-cp", ":".join(map(str, jars.kafka))),
        f"-Dlog4j2.configurationFile={_LOGGING.as_uri()}",
    ]
    form = [
        *jvm,
        "-Xmx128m",
        "-XX:TieredStopAtLevel=1",
        "-XX:ReservedCodeCacheSize=128m",
        "kafka.tools.StorageTool",
        "format",
    ]
    form += ["--cluster-id", cluster, "--config", "server.properties", "--ignore-formatted"]
    serve = [*jvm, f"-Xmx{memory}", *_JVM_OPTIONS, *flags, "kafka.Kafka", "server.properties"]
    return f"test -e formatted || {{ {shlex.join(form)} && touch formatted; }} || exit 1\nexec {shlex.join(serve)}"


class _Answers:
    """Asks the broker at the port whether it is this one, has joined its cluster and serves clients."""

    def __init__(self, node: int, port: int, cluster: str) -> None:
        self._node, self._port, self._cluster = node, port, cluster

    def __call__(self) -> bool:
        # A client of librdkafka would complain aloud about a port where nobody listens yet.
        try:
            socket.create_connection((HOST, self._port), timeout=1).close()
        except OSError:
            return False
        client = AdminClient({"bootstrap.servers": f"{HOST}:{self._port}", "log_level": 0})
        try:
            metadata = client.list_topics(timeout=1)
        except KafkaException:
            return False
        return metadata.cluster_id == self._cluster and self._node in metadata.brokers
