"""What a checkpoint says of how far its query has come."""

from pathlib import Path

import pytest

from penstock.analysis.checkpoints.batches import Batch, batches, covered
from penstock.core.errors import Misconfigured


def checkpoint(folder: Path, offsets: dict[int, str], commits: list[int]) -> str:
    for name in ("offsets", "commits"):
        (folder / name).mkdir()
    for batch, text in offsets.items():
        (folder / "offsets" / str(batch)).write_text(f'v1\n{{"batchWatermarkMs":0}}\n{text}')
    for batch in commits:
        (folder / "commits" / str(batch)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return str(folder)


def test_the_last_committed_batch_counts_not_the_one_that_runs(tmp_path: Path) -> None:
    written = {9: '{"a":{"0":5,"1":7}}', 10: '{"a":{"0":8,"1":9}}', 11: '{"a":{"0":10,"1":10}}'}
    folder = checkpoint(tmp_path, written, [9, 10])
    assert covered(folder) == covered(f"file://{folder}") == {"a": {0: 8, 1: 9}}
    assert [batch.number for batch in batches(folder)] == [9, 10]
    assert [batch.number for batch in batches(folder, begun=True)] == [9, 10, 11]


def test_each_source_has_a_line(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {0: '{"a":{"0":5}}\n-\n{"b":{"0":6}}\n{"a":{"0":4}}'}, [0])
    assert covered(folder) == {"a": {0: 4}, "b": {0: 6}}


def test_a_query_that_has_committed_nothing_covers_nothing(tmp_path: Path) -> None:
    assert covered(str(tmp_path / "none")) is None
    assert covered(checkpoint(tmp_path, {0: '{"a":{"0":5}}'}, [])) is None


def test_a_checkpoint_elsewhere_is_not_looked_into() -> None:
    assert covered("s3://bucket/checkpoints/a") is None


@pytest.mark.parametrize("text", ["{", "[1]", '{"a":{"0":"x"}}', '{"a":3}'])
def test_a_broken_checkpoint_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=f"checkpoint {tmp_path}: its offsets cannot be read"):
        covered(checkpoint(tmp_path, {0: text}, [0]))


def test_a_batch_without_its_offsets_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="its offsets cannot be read"):
        covered(checkpoint(tmp_path, {}, [3]))


def test_finished_batches_are_remembered_with_their_watermarks(tmp_path: Path) -> None:
    written = {9: '{"a":{"0":5}}', 10: '{"a":{"0":8}}', 11: '{"a":{"0":10}}'}
    folder = checkpoint(tmp_path, written, [9, 10])
    (tmp_path / "offsets" / "10").write_text('v1\n{"batchWatermarkMs":77}\n{"a":{"0":8}}')
    assert batches(folder) == [Batch(9, 0, {"a": {0: 5}}), Batch(10, 77, {"a": {0: 8}})]


def test_what_lies_before_a_hole_is_not_told(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {9: '{"a":{"0":5}}', 11: '{"a":{"0":8}}'}, [9, 10, 11])
    assert [batch.number for batch in batches(folder)] == [11]
    assert batches("s3://bucket/a") == []
