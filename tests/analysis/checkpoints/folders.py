"""Checkpoints as Spark leaves them behind, made by hand."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

CONF = {"spark.sql.shuffle.partitions": "2"}


def checkpoint(
    path: Path,
    batches: int = 1,
    begun: int = 0,
    sources: Sequence[str] = ("things",),
    ends: Mapping[str, int] | None = None,
    identity: str = "an-id",
) -> Path:
    """One with so many finished batches, and one more that was begun. `ends`: per partition, how far it has read."""
    for name in ("offsets", "commits", "state/0/0/left", "state/0/1"):
        (path / name).mkdir(parents=True)
    (path / "metadata").write_text(json.dumps({"id": identity}))
    for number in range(batches + begun):
        told = [json.dumps({source: ends or {"0": 10 * (number + 1)}}) for source in sources]
        lines = ["v1", json.dumps({"batchWatermarkMs": 0, "conf": CONF}), *told]
        (path / "offsets" / str(number)).write_text("\n".join(lines))
    for number in range(batches):
        (path / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
        for store in ("0/0", "0/0/left", "0/1"):
            (path / "state" / store / f"{number + 1}.changelog").write_text("changes")
    return path
