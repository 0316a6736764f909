from pathlib import Path

import orjson
import pytest

from penstock.core.errors import Misconfigured
from penstock.simulate.feed import Feed
from penstock.simulate.recording import Recording


def written(folder: Path, content: bytes) -> Path:
    path = folder / "rsvps.jsonl"
    path.write_bytes(content)
    return path


def test_lines_are_replayed_in_order_and_numbered(tmp_path: Path) -> None:
    recording = Recording(written(tmp_path, b'{"n":0}\n\n {"n":1}\r\n{"n":2}\n{"n":3}'), senders=2)
    feed = Feed(recording, 1, 2, 100, len(recording))
    messages = [orjson.loads(feed.message(n)) for n in range(4)]
    recording.close()
    assert [message["n"] for message in messages] == [0, 1, 2, 3]
    assert [(message["feed"]["sender"], message["feed"]["seq"]) for message in messages] == [
        ("meetup-00", 1),
        ("meetup-01", 1),
        ("meetup-00", 2),
        ("meetup-01", 2),
    ]


def test_the_numbers_of_a_recorded_feed_give_way_to_new_ones(tmp_path: Path) -> None:
    recording = Recording(written(tmp_path, b'{"n":0,"feed":{"sender":"old","seq":99}}'), senders=1)
    assert recording(0, 1, 0) == b'{"n":0}'
    recording.close()


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"n":0}\n\n{"n":\n')
    with pytest.raises(Misconfigured, match=r"rsvps\.jsonl, line 3: it is not JSON"):
        Recording(path, senders=1)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="line 2: it is JSON, but not an object"):
        Recording(written(tmp_path, b"{}\n[1]\n"), senders=1)


def test_an_empty_file_is_misconfigured(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no documents"):
        Recording(written(tmp_path, b"\n"), senders=1)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"none\.jsonl: it cannot be read"):
        Recording(tmp_path / "none.jsonl", senders=1)
