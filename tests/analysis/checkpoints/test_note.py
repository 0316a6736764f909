"""What lies beside a checkpoint."""

import json
import random
from pathlib import Path

import pytest
from tests.damaging import flipped

from penstock.analysis.checkpoints.fingerprint import Fingerprint, Operator
from penstock.analysis.checkpoints.note import Note, last_life, note_of, set_aside
from penstock.core.errors import Misconfigured

QUERY = Fingerprint(
    ("things",), "totals", "update", (Operator("Aggregate", ("name string",), ("sum(n) bigint",)),), "ab"
)


def test_a_note_is_read_as_it_was_written(tmp_path: Path) -> None:
    note = Note({"things": "one"}, 3, {"things": {0: 7, 1: 9}}, QUERY)
    note.write(str(tmp_path / "q"))
    assert note_of(str(tmp_path / "q")) == note_of(f"file://{tmp_path}/q") == note


def test_where_there_is_none_a_first_life_begins(tmp_path: Path) -> None:
    assert Note.read(str(tmp_path)) is None
    assert note_of(str(tmp_path)) == Note()
    assert note_of("s3://bucket/q") == Note()
    Note().write("s3://bucket/q")


def test_a_note_of_before_tells_the_topics(tmp_path: Path) -> None:
    (tmp_path / "penstock.json").write_text(json.dumps({"things": "one", "format": "two"}))
    assert note_of(str(tmp_path)) == Note({"things": "one", "format": "two"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format":2}',
        '{"format":2,"topics":{},"life":"x"}',
        '{"format":2,"topics":[],"life":0,"since":null,"query":null}',
        '{"format":3,"topics":{},"life":0,"since":null,"query":null}',
    ],
)
def test_a_note_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "penstock.json").write_text(text)
    with pytest.raises(Misconfigured, match=f"checkpoint {tmp_path}: its note penstock.json cannot be read"):
        note_of(str(tmp_path))


def test_a_checkpoint_is_set_aside_under_a_number_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "q"
    assert set_aside(path) is None
    (tmp_path / "q.7x").mkdir()
    for life in range(3):
        Note(life=life).write(str(path))
        assert last_life(str(path)) == life
        assert set_aside(path) == tmp_path / f"q.{life + 1}"
    assert last_life(str(path)) == 2
    assert not path.exists()


@pytest.mark.parametrize("seed", range(20))
def test_a_note_that_has_changed_is_refused(tmp_path: Path, seed: int) -> None:
    note = Note({"things": "one"}, 3, {"things": {0: 7, 1: 9}}, QUERY)
    note.write(str(tmp_path))
    flipped(tmp_path / "penstock.json", random.Random(seed))
    with pytest.raises(Misconfigured):
        note_of(str(tmp_path))
