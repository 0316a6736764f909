from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.supervise.notes import fitting, read_note, write_note


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_note(tmp_path / "new" / "a.json", {"x": [1, 2.5], "y": "é"})
    assert read_note(tmp_path / "new" / "a.json") == {"x": [1, 2.5], "y": "é"}


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": '])
def test_a_spoilt_note_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert read_note(tmp_path / "a.json") == {}


def test_a_note_of_bytes_that_are_no_text_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe\x00")
    assert read_note(tmp_path / "a.json") == {}


def test_a_missing_note_says_nothing(tmp_path: Path) -> None:
    assert read_note(tmp_path / "a.json") == {}


def test_only_the_owner_can_read_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch(0o644)
    write_note(tmp_path / "a.json", {"x": 2})
    assert (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600


@dataclass(frozen=True)
class Known:
    a: int
    b: int = 0


def test_a_note_of_another_version_is_understood_as_far_as_it_goes() -> None:
    assert fitting(Known, {"a": 1, "b": 2}) == Known(1, 2)
    assert fitting(Known, {"a": 1, "c": 3}) == Known(1)
    assert fitting(Known, {"b": 2}) is None
    assert fitting(Known, {}) is None
