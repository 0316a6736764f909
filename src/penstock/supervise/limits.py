"""What the system allows a process: open files, and room on a disk."""

import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

FILES = 4_096
"""So many files Kafka, Spark and many connections may have open in one process."""
_MOST = 65_536
"""More does no good: some programs walk through all that they may open."""


def raise_files() -> int:
    """Let this process and its children open as many files as the system allows; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _MOST if soft == resource.RLIM_INFINITY else soft


def too_few(files: int) -> str | None:
    """What to say of a limit of open files; None when it is enough."""
    if files >= FILES:
        return None
    return (
        f"a process may open {files:,} files, and {FILES:,} are needed; raise the limit: "
        f"ulimit -n {_MOST} as root, nofile in /etc/security/limits.conf, or LimitNOFILE= of systemd"
    )


@dataclass(frozen=True)
class Space:
    """The disk of a folder, and how much of it stays free."""

    folder: Path
    reserve: int

    def figures(self) -> dict[str, object]:
        """Folder, free bytes and reserve, for the status."""
        return {"folder": str(self.folder.absolute()), "free": self._free(), "reserve": self.reserve}

    def lacking(self) -> str | None:
        """What to say when less than the reserve is free; None when there is enough, or it cannot be known."""
        free = self._free()
        if free is None or free >= self.reserve:
            return None
        sizes = f"{free >> 20:,} MiB are free, less than the {self.reserve >> 20:,} MiB of [local] reserve"
        return f"the disk of {self.folder.absolute()} is full: {sizes}; make room, and it goes on"

    def _free(self) -> int | None:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return None
