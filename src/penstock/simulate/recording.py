"""Documents from a file of JSON lines, replayed. Only the offsets of its lines are kept in memory."""

import os
from array import array
from pathlib import Path

import orjson

from penstock.core.clock import Micros
from penstock.core.errors import Misconfigured


class Recording:
    """The lines of a file as the documents of a feed with so many senders, in the order of the file.

    Blank lines are passed over. Misconfigured names the first line that is not a JSON object.
    """

    def __init__(self, path: Path, senders: int) -> None:
        self._senders = senders
        self._starts, self._ends = array("Q"), array("Q")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise Misconfigured(str(path), f"it cannot be read: {error.strerror}") from error
        try:
            self._index(path)
        except BaseException:
            self._file.close()
            raise

    def _index(self, path: Path) -> None:
        end = 0
        for number, line in enumerate(self._file, 1):
            start, end = end, end + len(line)
            if not line.strip():
                continue
            try:
                document = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise Misconfigured(f"{path}, line {number}", f"it is not JSON: {error.msg}") from error
            if not isinstance(document, dict):
                raise Misconfigured(f"{path}, line {number}", "it is JSON, but not an object", "write {…} on each line")
            self._starts.append(start)
            self._ends.append(end)
        if not self._starts:
            raise Misconfigured(str(path), "it holds no documents", "write a JSON object on each line")

    def __len__(self) -> int:
        return len(self._starts)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        n = (number - 1) * self._senders + sender
        start, end = self._starts[n], self._ends[n]
        line = os.pread(self._file.fileno(), end - start, start).strip()
        if b'"feed"' in line:
            # Recorded from a feed: the numbers of that time would contradict the new ones.
            document = orjson.loads(line)
            document.pop("feed", None)
            line = orjson.dumps(document)
        return line

    def close(self) -> None:
        self._file.close()
