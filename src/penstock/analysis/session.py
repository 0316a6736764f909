"""The Spark session, on a JVM that Penstock starts.

Spark's launcher would use the Java on the PATH, and modules that a trimmed runtime does not have. Started here, the JVM
uses the Java that was found, starts while Kafka does, and ends with this process: it reads a pipe from this process,
and Linux kills it when this process is killed.
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
from pathlib import Path
from typing import IO, Self

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession as SparkSession

from penstock.analysis.frames import ARROW_SETTING
from penstock.analysis.settings import SparkSettings
from penstock.core.errors import Unavailable

log = logging.getLogger(__name__)

_SPARK_HOME = Path(pyspark.__file__).parent


def classpath(jars: Sequence[Path]) -> list[Path]:
    """All jars, one by one: a class-data archive does not support wildcards."""
    return [*jars, *sorted((_SPARK_HOME / "jars").glob("*.jar"))]


# The module options that Spark needs; the list is from Spark's launcher.
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
    # Spark generates one method for a query. If it is huge, the JVM would interpret it.
    "-XX:-DontCompileHugeMethods",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dio.netty.allocator.type=pooled",
    "--enable-native-access=ALL-UNNAMED",
    *(f"--add-opens={module}/{name}=ALL-UNNAMED" for module, names in _OPENED.items() for name in names.split()),
)

_GC = {
    # The parallel collector pauses for 200 ms when the heap is full. A small nursery keeps the process below 1 GiB.
    "latency": ("-XX:+UseG1GC", "-XX:MaxNewSize=160m"),
    "throughput": ("-XX:+UseParallelGC",),
}

# With only the quick compiler, the default code cache is too small: Spark filled it within a minute.
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m")

# PySpark logs each analysis error as JSON; Penstock reports it as a sentence. The level is set, because logging setup
# enables disabled loggers. The loggers are not created by PySpark, which would switch other handlers to JSON.
for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
    logging.getLogger(name).setLevel(logging.CRITICAL + 1)

# Hadoop's defaults fork chmod for each of a batch's dozen files. Renames of this manager are not exclusive; the lock of
# the state folder prevents a second driver.
_FILES = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
    # Hadoop ignores the umask of the process.
    "spark.hadoop.fs.permissions.umask-mode": "077",
}
# By default Spark listens on all addresses, without authentication. In local mode Spark makes a new secret for each
# session. On a cluster the executors must reach the driver: the user's settings apply.
_LOOPBACK = "127.0.0.1"
_CLOSED = {
    "spark.driver.host": _LOOPBACK,
    "spark.driver.bindAddress": _LOOPBACK,
    "spark.authenticate": "true",
}
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def conf(settings: SparkSettings, slots: int) -> dict[str, str]:
    """Spark settings that make both modes fast; the user's settings override them."""
    local = _is_local(settings.master)
    return {
        "spark.master": f"local[{slots}]" if settings.master == "local" else settings.master,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        # Lake files: timestamps that all readers support, and no marker files.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
        **(_FILES | _CLOSED if local else {}),
        "spark.sql.streaming.stateStore.providerClass": _ROCKSDB,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
        # Required by real time. A checkpoint keeps its format, so a query can change its mode.
        "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
        "spark.sql.streaming.minBatchesToRetain": "20",
        "spark.sql.streaming.numRecentProgressUpdates": "10",
        "spark.sql.streaming.pollingDelay": "2ms",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.adaptive.streaming.stateless.enabled": "false",
        "spark.shuffle.streaming.networkBufferMaxWaitTimeMs": "1",
        # A static table uses at least one page with each batch; Spark's default is 32 MiB.
        "spark.buffer.pageSize": "1m",
        # Spark would fail a real-time query when its batch starts while tasks of others wait for slots. The number of
        # slots is checked before queries start, see plans.need; then tasks only wait for each other.
        "spark.scheduler.pipelinedGroup.slotCheck.enabled": "false",
        # State passes timestamps to Python without a time zone: with DST, an hour would be ambiguous.
        "spark.executorEnv.TZ": "UTC",
        # Python functions get records in columns. Pickled rows cost several times as much.
        ARROW_SETTING: "true",
        **settings.conf,
    }


@dataclass
class Gateway:
    """A JVM with a gateway for PySpark."""

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
        local = _is_local(conf.get("spark.master", "local"))
        folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        info = folder / "gateway"
        # A setting may be a secret: command lines are public, the folder is private.
        properties = folder / "spark.properties"
        properties.write_text("".join(f"{escaped(name)}={escaped(value)}\n" for name, value in conf.items()), "ascii")
        options = ["--properties-file", str(properties), "--load-spark-defaults"]
        if not local and jars:
            options += ["--jars", ",".join(map(str, jars))]
        command = [
            str(java),
            *_JVM,
            *flags,
            f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}",
            "-cp",
            os.pathsep.join(map(str, classpath(jars))),
            "org.apache.spark.deploy.SparkSubmit",
            *options,
            "pyspark-shell",
        ]
        env = {
            **os.environ,
            "SPARK_HOME": str(_SPARK_HOME),
            # Workers need the driver's modules, such as one beside the pipeline.
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(info),
            # RocksDB allocates outside the heap; an arena for each thread would waste memory.
            "MALLOC_ARENA_MAX": "2",
            **({"SPARK_LOCAL_IP": _LOOPBACK} if local else {}),
        }
        out = log if log is not None else subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=out, stderr=out, preexec_fn=_end_with_parent
            )
            while not info.exists():
                if process.poll() is not None:
                    raise Unavailable("Spark", f"its JVM ended with code {process.returncode} while it started")
                time.sleep(0.02)
            content = info.read_bytes()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        port, length = struct.unpack(">ii", content[:8])
        return cls(process, port, content[8 : 8 + length].decode())

    def stop(self, timeout: float) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
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
    timeout: float = 5.0,
) -> Iterator[SparkSession]:
    """A Spark session with its own JVM, which is stopped at the end, after `timeout` seconds by force.

    The output of the JVM goes to `log`, if given; `jvm` are further flags.
    """
    flags = [f"-Xmx{settings.memory}", *_GC[settings.profile], *(_QUICK if settings.jit == "quick" else ()), *jvm]
    gateway = Gateway.start(java, jars, flags, {"spark.app.name": name, **conf(settings, slots)}, log)
    os.environ["PYSPARK_GATEWAY_PORT"] = str(gateway.port)
    os.environ["PYSPARK_GATEWAY_SECRET"] = gateway.secret
    os.environ.setdefault("SPARK_HOME", str(_SPARK_HOME))
    if _is_local(settings.master):
        # PySpark's default is the first python3 of the PATH, which may be of another version.
        os.environ["PYSPARK_PYTHON"] = sys.executable
    try:
        interrupted = signal.getsignal(signal.SIGINT)
        spark = SparkSession.builder.getOrCreate()
        if _is_local(str(spark.sparkContext.master)):
            _listen_here(spark)
        if threading.current_thread() is threading.main_thread():
            # PySpark installs a handler for Ctrl-C; the caller's handler is restored.
            signal.signal(signal.SIGINT, interrupted)
        yield spark
        for query in spark.streams.active:
            query.stop()
    finally:
        # Garbage-collected objects report to the stopped JVM, and py4j would log a trace for each, also as the root.
        logging.getLogger("py4j").setLevel(logging.CRITICAL)
        logging.getLogger().addFilter(lambda record: "py4j" not in record.pathname)
        if (context := SparkContext._active_spark_context) is not None:
            # The accumulator server would print a trace when the JVM disconnects.
            context._accumulatorServer.handle_error = lambda *_: None  # type: ignore[method-assign]
        gateway.stop(timeout)
        del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]
        # PySpark keeps its JVM for the whole process; the next session needs another one.
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = None


def wait_for_slots(spark: SparkSession, needed: int, timeout: float = 60.0) -> int:
    """Wait for a while until the executors of a cluster have `needed` slots; return how many they have."""
    # In local mode the number is fixed.
    until = time.monotonic() + (0 if str(spark.sparkContext.master).startswith("local[") else timeout)
    while (there := spark.sparkContext.defaultParallelism) < needed and time.monotonic() < until:
        time.sleep(0.2)
    return there


def _listen_here(spark: SparkSession) -> None:
    """Make the JVM listen on the loopback address only.

    The shuffle of real-time queries listens on all addresses, without authentication, and has no setting for it. So the
    wildcard address of this JVM is replaced by the loopback address.
    """
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    try:
        held = jvm.java.lang.Class.forName("java.net.InetAddress").getDeclaredField("impl")
        held.setAccessible(True)
        impl = held.get(None)
        # Called first: the JVM caches the result.
        impl.anyLocalAddress()
        every = impl.getClass().getDeclaredField("anyLocalAddress")
        every.setAccessible(True)
        every.set(impl, jvm.java.net.InetAddress.getByName(_LOOPBACK))
    except Py4JError as error:
        log.warning("this Java keeps its wildcard address: real-time queries listen on all addresses (%s)", error)


def _is_local(master: str) -> bool:
    return master == "local" or master.startswith("local[")


def escaped(text: str) -> str:
    """Escape a name or a value for a Java properties file."""
    units = text.encode("utf-16-be", "surrogatepass")
    numbers = (int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2))
    return "".join(chr(one) if chr(one).isascii() and chr(one).isalnum() else f"\\u{one:04x}" for one in numbers)


def is_running(spark: SparkSession) -> bool:
    """Whether the JVM answers, and the Spark context is not stopped."""
    try:
        jsc = spark.sparkContext._jsc
        return jsc is not None and not jsc.sc().isStopped()
    except (Py4JError, OSError):
        return False


def _end_with_parent() -> None:
    os.umask(0o077)
    # Ctrl-C is for the driver, which stops the JVM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
