"""Limits of the system: open files and disk space."""

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

REQUIRED_FILES = 4_096
"""Open files that one process of Kafka or Spark, or one with many connections, may need."""
_LARGEST_LIMIT = 65_536
"""A larger limit makes programs slow that iterate over all file descriptors."""


def raise_file_limit() -> int:
    """Raise the limit of open files of this process and its children as far as allowed; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _LARGEST_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _LARGEST_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return _LARGEST_LIMIT if soft == resource.RLIM_INFINITY else soft


def file_limit_warning(limit: int) -> str | None:
    """A warning if the limit of open files is too low."""
    if limit >= REQUIRED_FILES:
        return None
    return (
        f"a process may open {limit:,} files, but {REQUIRED_FILES:,} are needed; raise the limit: "
        f"ulimit -n {_LARGEST_LIMIT} as root, nofile in /etc/security/limits.conf, or LimitNOFILE= of systemd"
    )


@dataclass(frozen=True)
class DiskSpace:
    """The disk of a folder, and the space on it that has to stay free."""

    folder: Path
    reserve: int

    def figures(self) -> dict[str, object]:
        """Folder, free bytes and reserve, for the status."""
        return {"folder": str(self.folder.absolute()), "free": self._free(), "reserve": self.reserve}

    def shortage(self) -> str | None:
        """A warning if less than the reserve is free; None if there is enough, or the free space is unknown."""
        free = self._free()
        if free is None or free >= self.reserve:
            return None
        sizes = f"{free >> 20:,} MiB are free, less than the {self.reserve >> 20:,} MiB of [local] reserve"
        return f"the disk of {self.folder.absolute()} is full: {sizes}; free some space; then it continues"

    def _free(self) -> int | None:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None
