from pathlib import Path

import pytest

from penstock.supervise.notes import read_note, write_note


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
