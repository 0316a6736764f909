"""What groups know: a small document for each, in `.groups`, that is changed under a lock and replaced whole."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from penstock.channels.files.folder import alone, answering, replace
from penstock.channels.leases import Standing
from penstock.core.clock import Clock, Micros
from penstock.core.errors import Misconfigured, Unaccounted

Answer = TypeVar("Answer")
_ENDING = ".json"


class Groups:
    def __init__(self, root: Path, clock: Clock) -> None:
        self._root, self._folder, self._clock = root, root / ".groups", clock

    def change(self, group: str, change: Callable[[Standing, Micros], Answer]) -> Answer:
        path = self._path(group)
        with answering(self._root):
            self._folder.mkdir(exist_ok=True)
            with alone(path.with_suffix(".lock")):
                before = _read(path)
                standing = _standing(path, before)
                answer = change(standing, self._clock.now())
                # To forget what a group has committed may be to lose records: so it outlasts a power cut.
                if (after := standing.dumps()) != before and (before or standing != Standing()):
                    replace(path, after)
                return answer

    def standing(self, group: str) -> Standing:
        """What a group knows, for somebody who only asks."""
        path = self._path(group)
        with answering(self._root):
            return _standing(path, _read(path))

    def _path(self, group: str) -> Path:
        path = self._folder / f"{quote(group, safe='')}{_ENDING}"
        if not group or len(path.name) > 200:
            raise Misconfigured(f"group {group!r}", "a file cannot have this name", "use 1 to 60 letters")
        return path

    def names(self) -> list[str]:
        with answering(self._root):
            if not self._folder.exists():
                return []
            found = {unquote(path.name.removesuffix(_ENDING)): path for path in self._folder.glob(f"*{_ENDING}")}
            now = self._clock.now()
            return sorted(name for name, path in found.items() if _standing(path, _read(path)).known(now))


def _standing(path: Path, document: bytes | None) -> Standing:
    try:
        return Standing.loads(document)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # To go on as if nothing were committed could skip records, or repeat all of them.
        raise Unaccounted(
            f"group {unquote(path.stem)}", (), f"{path} is damaged: {error}; set it right or remove it"
        ) from error


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
