"""The list of records that a query leaves out."""

from pathlib import Path

import pytest

from penstock.analysis.checkpoints.excluded import NAME, Excluded, exclude, excluded
from penstock.core.errors import Misconfigured

ONE, OTHER = Excluded("things", 0, 7, "why"), Excluded("things", 1, 7, "why not")


def test_records_are_added_and_each_is_there_once(tmp_path: Path) -> None:
    assert excluded(str(tmp_path)) == []
    exclude(str(tmp_path), [ONE])
    exclude(f"file://{tmp_path}", [ONE, OTHER])
    assert excluded(str(tmp_path)) == [ONE, OTHER]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 2, "records": []}', '{"format": 1, "records": [{}]}'])
def test_a_list_that_cannot_be_read_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(Misconfigured) as told:
        excluded(str(tmp_path))
    assert told.value.place == f"checkpoint {tmp_path}"


def test_where_this_machine_cannot_look_nothing_is_excluded() -> None:
    assert excluded("s3://bucket/q") == []
    with pytest.raises(Misconfigured):
        exclude("s3://bucket/q", [ONE])
