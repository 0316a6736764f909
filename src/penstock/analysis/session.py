"""The Spark session, on a JVM that we start ourselves.

Spark's own launcher would take the Java on the PATH and ask it for modules that a trimmed runtime lacks. Started here,
the JVM runs on the Java that was found, comes up while Kafka does, and ends with this process: it reads our end of a
pipe, and Linux ends it when we are killed.
"""

import ctypes
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Self

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession

from penstock.analysis.frames import ARROW_SETTING
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Unavailable


def classpath(jars: Sequence[Path]) -> list[Path]:
    """Our jars and Spark's, one by one: a class-data archive knows no wildcards."""
    return [*jars, *sorted((spark_home() / "jars").glob("*.jar"))]


def spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


log = logging.getLogger(__name__)

# What Spark needs of the module system; the list is that of its own launcher.
_OPENED = {
    "java.base": (
        "java.lang java.lang.invoke java.lang.reflect java.io java.net java.nio java.util java.util.concurrent "
        "java.util.concurrent.atomic jdk.internal.ref sun.nio.ch sun.nio.cs sun.security.action sun.util.calendar"
    ),
    "java.security.jgss": "sun.security.krb5",
}
_JVM = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:MaxMetaspaceFreeRatio=40",
    # Spark makes one method of a whole query; where the payload has many fields, the JVM would leave it interpreted.
    "-XX:-DontCompileHugeMethods",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "--enable-native-access=ALL-UNNAMED",
    *(f"--add-opens={module}/{name}=ALL-UNNAMED" for module, names in _OPENED.items() for name in names.split()),
)

_GC = {
    # The other one stops everything for 200 ms whenever its heap is full. A small nursery keeps the whole below 1 GiB.
    "latency": ("-XX:+UseG1GC", "-XX:MaxNewSize=160m"),
    "throughput": ("-XX:+UseParallelGC",),
}

# With the quick compiler alone, a JVM reserves too little for its code: Spark filled it within a minute.
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m")

# PySpark logs each error of an analysis as a line of JSON; we say it as a sentence. By level: who sets up logging
# enables all that was disabled. Not made by PySpark, whose loggers turn the handlers of others (pytest's, say) to JSON.
for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
    logging.getLogger(name).setLevel(logging.CRITICAL + 1)

# Those of Hadoop fork chmod for each file, of which a batch has a dozen. The rename of this manager is not exclusive;
# the state folder's lock keeps a second driver away.
_FILES = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
    # Hadoop sets permissions by itself, whatever the process has as its umask.
    "spark.hadoop.fs.permissions.umask-mode": "077",
}
# Without them Spark listens on all addresses, and takes whatever connects. In local mode Spark makes the secret by
# itself, anew for each session. On a cluster the executors have to reach the driver: there the user's settings decide.
_LOOPBACK = "127.0.0.1"
_CLOSED = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.authenticate": "true",
}
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def conf(settings: SparkSettings, slots: int) -> dict[str, str]:
    """The settings of Spark that make both modes fast; the user's own come last."""
    local = _is_local(settings.master)
    return {
        "spark.master": f"local[{slots}]" if settings.master == "local" else settings.master,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # The files of lakes: with times that all readers know, and without markers that nobody reads.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
        **(_FILES | _CLOSED if local else {}),
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        # Real time takes no other; a checkpoint keeps the one that it was begun with. So a query may change its mode.
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        "spark.sql.streaming.minBatchesToRetain": "20",
        "spark.sql.streaming.numRecentProgressUpdates": "10",
        "spark.sql.streaming.pollingDelay": "2ms",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.shuffle.streaming.networkBufferMaxWaitTimeMs": "1",
        # A static table takes one at least, with each batch; by Spark's own reckoning it has 32 MiB.
        "spark.buffer.pageSize": "1m",
        # Spark would end a real-time query when a batch of it begins while tasks of others wait for slots. Whether
        # there are enough is found out before queries start, see slots.py; then these only wait for each other.
        "spark.scheduler.pipelinedGroup.slotCheck.enabled": "false",
        # State gives times to Python without a zone: in one that turns its clocks back, an hour would be there twice.
        "spark.executorEnv.TZ": "UTC",
        # Functions in Python get their records in columns; pickled one by one they cost several times as much.
        ARROW_SETTING: "true",
        **settings.conf,
    }


@dataclass
class Gateway:
    """A JVM that waits for PySpark."""

    process: subprocess.Popen[bytes]
    port: int
    secret: str

    @classmethod
    def start(
        cls,
        java: Path,
        jars: Sequence[Path],
        flags: Sequence[str],
        conf: Mapping[str, str],
        log: IO[bytes] | None = None,
    ) -> Self:
        home = spark_home()
        local = _is_local(conf.get("spark.master", "local"))
        folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        told = folder / "gateway"
        # Everybody can read a command line; the folder is private. A setting may be a secret.
        properties = folder / "spark.properties"
        properties.write_text("".join(f"{escaped(name)}={escaped(value)}\n" for name, value in conf.items()), "ascii")
        options = ["--properties-file", str(properties), "--load-spark-defaults"]
        if not local and jars:
            options += ["--jars", ",".join(map(str, jars))]
        command = [
            str(java),
            *_JVM,
            *flags,
            *_logging(),
            "-cp",
            os.pathsep.join(map(str, classpath(jars))),
            "org.apache.spark.deploy.SparkSubmit",
            *options,
            "pyspark-shell",
        ]
        env = {
            **os.environ,
            "SPARK_HOME": str(home),
            # Workers find what the driver has imported, such as a module beside the pipeline.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(told),
            # RocksDB allocates outside the heap; an arena for each thread would keep what others need.
            "MALLOC_ARENA_MAX": "2",
            **({"SPARK_LOCAL_IP": _LOOPBACK} if local else {}),
        }
        out = log if log is not None else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, preexec_fn=_end_with_parent
            )
            while not told.exists():
                if process.poll() is not None:
                    raise Unavailable("Spark", f"its JVM ended with code {process.returncode} while it started")
                time.sleep(0.02)
            content = told.read_bytes()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        port, length = struct.unpack(">ii", content[:8])
        return cls(process, port, content[8 : 8 + length].decode())

    def stop(self, patience: float) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def session(
    name: str,
    settings: SparkSettings,
    java: Path,
    jars: Sequence[Path],
    slots: int,
    log: IO[bytes] | None = None,
    jvm: Sequence[str] = (),
    patience: float = 5.0,
) -> Iterator[SparkSession]:
    """A Spark session of our own, ended with everything that belongs to it, after `patience` by force.

    What its JVM says goes to the log, or nowhere; `jvm` are further flags of it.
    """
    flags = [f"-Xmx{settings.memory}", *_GC[settings.profile], *(_QUICK if settings.jit == "quick" else ()), *jvm]
    gateway = Gateway.start(java, jars, flags, {"spark.app.name": name, **conf(settings, slots)}, log)
    os.environ["PYSPARK_GATEWAY_PORT"] = str(gateway.port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = gateway.secret
    os.environ.setdefault("SPARK_HOME", str(spark_home()))
    try:
        interrupted = signal.getsignal(signal.SIGINT)
        spark = SparkSession.builder.getOrCreate()
        if _is_local(str(spark.sparkContext.master)):
            _listen_here(spark)
        if threading.current_thread() is threading.main_thread():
            # PySpark takes Ctrl-C for itself; it is for whoever started us to say what that means.
            signal.signal(signal.SIGINT, interrupted)
        yield spark
        for query in spark.streams.active:
            query.stop()
    finally:
        # What is collected from now on reports itself to a JVM that is gone, and py4j would log a trace for each.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(_not_of_the_gone)
        if (context := SparkContext._active_spark_context) is not None:
            # Its server of accumulators would print a trace as soon as the JVM hangs up.
            context._accumulatorServer.handle_error = lambda *_: None  # type: ignore[method-assign]
        gateway.stop(patience)
        del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]
        # PySpark remembers its JVM for the life of the process; the next session has another one.
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = None


def wait_for_slots(spark: SparkSession, needed: int, patience: float = 60.0) -> int:
    """Wait until the executors of a cluster have that many slots, for a while; how many there are."""
    # On this machine there will never be more.
    until = time.monotonic() + (0 if str(spark.sparkContext.master).startswith("local[") else patience)
    while (there := spark.sparkContext.defaultParallelism) < needed and time.monotonic() < until:
        time.sleep(0.2)
    return there


def _listen_here(spark: SparkSession) -> None:
    """Let the JVM listen on this machine alone, also where it is told no address.

    The shuffle of real-time queries listens on all addresses, without the secret of the session, and has no setting
    for it. So what this JVM takes for "all addresses" becomes the loopback address.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    try:
        held = jvm.java.lang.Class.forName("java.net.InetAddress").getDeclaredField("impl")
        held.setAccessible(True)
        impl = held.get(None)
        # Asked first: it is found once, and kept.
        impl.anyLocalAddress()
        every = impl.getClass().getDeclaredField("anyLocalAddress")
        every.setAccessible(True)
        every.set(impl, jvm.java.net.InetAddress.getByName(_LOOPBACK))
    except Py4JError as error:
        log.warning("this Java does not tell where it keeps its addresses: real-time queries listen on all (%s)", error)


def _is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def escaped(text: str) -> str:
    """A name or a value in a properties file of Java."""
    units = text.encode("utf-16-be", "surrogatepass")
    numbers = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(one) if chr(one).isascii() and chr(one).isalnum() else f"\\u{one:04x}" for one in numbers)


def is_alive(spark: SparkSession) -> bool:
    """Whether the session still runs queries: its JVM answers, and its context was not stopped."""
    try:
        jsc = spark.sparkContext._jsc
        return jsc is not None and not jsc.sc().isStopped()
    except (Py4JError, OSError):
        return False


def _not_of_the_gone(record: logging.LogRecord) -> bool:
    """Some traces py4j logs under no name of its own."""
    return "py4j" not in record.pathname


def _logging() -> list[str]:
    return [f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"]


def _end_with_parent() -> None:
    os.umask(0o077)
    # Ctrl-C is for the driver, which ends the JVM in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
