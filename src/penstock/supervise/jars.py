"""The jars of the JVM side: brought once by Ivy, checked, and kept in a cache of the user.

`ivy.xml` pins them and `jars.sha256` says what each has to be. Apache Ivy itself comes inside the pyspark wheel.
"""

import fcntl
import hashlib
import importlib.util
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import Misconfigured, Unavailable
from penstock.supervise.java import Java
from penstock.supervise.process import tied

Progress = Callable[[int, int], None]
"""Told how many steps are done, and how many there are: each jar is found, then fetched."""

_LIST = Path(__file__).with_name("ivy.xml")
_SUMS = Path(__file__).with_name("jars.sha256")
_SILENCE = 90.0


@dataclass(frozen=True, slots=True)
class Jars:
    kafka: tuple[Path, ...]
    spark: tuple[Path, ...]


def ensure_jars(
    java: Java, cache: Path | None = None, progress: Progress | None = None, pauses: Sequence[float] = (1, 4, 10)
) -> Jars:
    """The jars, from the cache or else from the network; a complete cache needs neither network nor JVM.

    What the network refuses is asked for again after each of the pauses; Unavailable when that did not help.
    """
    cache = cache or cache_folder()
    home, wanted = _home(cache), _wanted()
    if not _complete(home, wanted):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _lock(home.with_suffix(".lock")):
                if not _complete(home, wanted):
                    _bring(java, home, wanted, progress or (lambda _done, _total: None), pauses)
        except OSError as error:
            raise Misconfigured(
                str(cache), f"the jars cannot be kept there: {error}", "set XDG_CACHE_HOME to a folder with 200 MB free"
            ) from error
    return _jars(home)


def kept_jars(cache: Path | None = None) -> Jars | None:
    """The jars, if the cache has them all already."""
    home = _home(cache or cache_folder())
    return _jars(home) if _complete(home, _wanted()) else None


def _home(cache: Path) -> Path:
    """A folder for each list of jars: versions never meet."""
    return cache / hashlib.sha256(_LIST.read_bytes()).hexdigest()[:16]


def _jars(home: Path) -> Jars:
    return Jars(
        *(tuple(home / name for name in _wanted() if name.startswith(f"{conf}/")) for conf in ("kafka", "spark"))
    )


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where the jars of this user lie."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "jars"


def broken(folder: Path) -> list[str]:
    """The names of the jars that are missing from the folder, or are not what they have to be."""
    return [name for name, checksum in _wanted().items() if _checksum(folder / name) != checksum]


def _wanted() -> dict[str, str]:
    lines = (line.split() for line in _SUMS.read_text(encoding="utf-8").splitlines())
    return {name: checksum for checksum, name in lines}


def _complete(home: Path, wanted: Mapping[str, str]) -> bool:
    # The folder got its name only after every checksum was right, so that names are enough from then on.
    return all((home / name).is_file() for name in wanted)


def _checksum(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _bring(java: Java, home: Path, wanted: Mapping[str, str], progress: Progress, pauses: Sequence[float]) -> None:
    # What Ivy fetched stays here when it fails, so that the next attempt, or the next run, goes on from there.
    work = home.with_suffix(".part")
    problem = ""
    for pause in (0, *pauses):
        time.sleep(pause)
        if problem := _run_ivy(java, work, len(wanted), progress):
            continue
        if bad := broken(work / "lib"):
            problem = f"{', '.join(bad)}: not what jars.sha256 says"
            shutil.rmtree(work)
            continue
        os.sync()  # Before the name says that they are complete.
        shutil.rmtree(home, ignore_errors=True)
        (work / "lib").rename(home)
        shutil.rmtree(work)
        return
    raise Unavailable("the repository of the jars", problem)


def _run_ivy(java: Java, work: Path, jars: int, progress: Progress) -> str:
    """Run Ivy once; what went wrong, or nothing."""
    command: list[str | Path] = [
        *(java.path, "-Xmx256m", f"-Divy.default.ivy.user.dir={work / 'user'}", "-jar", _ivy()),
        *("-ivy", _LIST, "-cache", work / "ivy", "-retrieve", f"{work}/lib/[conf]/[artifact]-[revision].[ext]"),
    ]
    said, done = b"", 0
    try:
        process = subprocess.Popen(
            tied(*map(str, command)),
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
            # A dot for each few kilobytes comes without a line end, so that a slow network is not taken for a dead one.
            while select.select([process.stdout], [], [], _SILENCE)[0]:
                if not (chunk := process.stdout.read(65536)):
                    break
                said += chunk
                if (now := said.count(b"\tfound ") + said.count(b"[SUCCESSFUL ]")) > done:
                    progress(done := now, 2 * jars)
            else:
                return f"nothing was heard for {_SILENCE:g} s"
            if process.wait() == 0:
                return ""
        finally:
            process.kill()
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip(" .\t")]
    trust = ", Java does not trust its certificate (docs/supervise.md, Certificates)" if b"PKIX" in said else ""
    return "\n".join([f"Ivy gave up{trust}:", *lines[-15:]])


def _ivy() -> Path:
    spec = importlib.util.find_spec("pyspark")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("jars/ivy-*.jar")):
            return path
    raise Misconfigured("pyspark", "its folder has no jars/ivy-*.jar", "install pyspark from PyPI again")


@dataclass(frozen=True)
class Archive:
    path: Path

    @classmethod
    def of(cls, name: str, java: Java, classpath: Sequence[Path], cache: Path | None = None) -> "Archive":
        """The archive for these jars on this Java, whether it was made yet or not."""
        told = [str(java.path.resolve()), str(java.version), *map(str, classpath)]
        digest = hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]
        return cls((cache or cache_folder().with_name("classes")) / f"{name}-{digest}.jsa")

    @property
    def tried(self) -> bool:
        """It is there, or this Java cannot make one."""
        return self.path.exists() or self._impossible.exists()

    def used(self) -> tuple[str, ...]:
        """The flags of a JVM that starts with it."""
        return (f"-XX:SharedArchiveFile={self.path}", "-Xshare:auto", _SILENT) if self.path.exists() else ()

    def made(self) -> tuple[str, ...]:
        """The flags of a JVM that makes it when it ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return (f"-XX:ArchiveClassesAtExit={self._new}", _SILENT)

    def keep(self) -> None:
        """Take over what such a JVM has made; if that is nothing, remember not to try again."""
        if self._new.exists():
            self._new.replace(self.path)
        else:
            self._impossible.touch()

    @property
    def _new(self) -> Path:
        return self.path.with_suffix(".new")

    @property
    def _impossible(self) -> Path:
        return self.path.with_suffix(".none")


# The JVM warns of each class that cannot be archived, on standard output.
_SILENT = "-Xlog:cds=off,cds+dynamic=off,class+path=off"
