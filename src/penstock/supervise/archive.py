"""Class-data archives: what a JVM has loaded and linked once, mapped into memory by the next one.

Most of a JVM's start is the loading of classes. An archive belongs to one Java and one list of jars; a JVM that finds
another one than it was made for goes on without it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.supervise.jars import cache_folder
from penstock.supervise.java import Java


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
