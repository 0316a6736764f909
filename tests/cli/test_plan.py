"""`penstock plan` in a process of its own."""

import json
from pathlib import Path

from tests.cli.test_cli import python

PIPELINE = """
from penstock import Pipeline

app = Pipeline("meetups")
app.channel("rsvps", schema="city STRING")
app.source("{address}", into="{into}")
app.sql_query("by_city", key="city", sql="SELECT city, count(1) AS n, seen() FROM rsvps GROUP BY city")
"""
MODULES = """
import sys
sys.argv = ["penstock", "plan", "pipe.py"]
from penstock.cli import main
try:
    main()
finally:
    print(*sys.modules)
"""


def write(folder: Path, address: str = "ws://feed/rsvps", into: str = "rsvps") -> None:
    (folder / "pipe.py").write_text(PIPELINE.format(address=address, into=into))


def test_what_is_mistyped_is_told_before_spark_is_imported(tmp_path: Path) -> None:
    write(tmp_path, address="wss//feed/rsvps")
    found = python(tmp_path, "-c", MODULES)
    assert found.returncode == 2
    assert found.stderr.startswith("penstock: pipe.py:6, source rsvps:")
    assert not set(found.stdout.split()) & {"pyspark", "pyarrow", "deltalake"}


def test_a_source_that_nothing_reads_and_a_channel_that_nothing_fills_are_said_at_once_and_exit_with_1(
    tmp_path: Path,
) -> None:
    write(tmp_path, into="rsvp")
    found = python(tmp_path, "-m", "penstock", "plan", "pipe.py", "--json")
    assert found.returncode == 1
    told = json.loads(found.stdout)["findings"]
    assert [(one["level"], one["place"]) for one in told] == [("error", "source rsvp"), ("error", "channel rsvps")]
    lines = found.stderr.splitlines()
    said = [line for line in lines if "source rsvp" in line or "channel rsvps" in line]
    assert said
    assert lines.index(said[-1]) < next(at for at, line in enumerate(lines) if "Spark" in line)
