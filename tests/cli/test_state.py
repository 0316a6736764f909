from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.analysis.checkpoints.rescale import Rescaled
from penstock.cli.state import app, rescaled_line
from penstock.core.errors import Misconfigured
from penstock.supervise.folder import StateFolder

PIPELINE = """
from penstock import Pipeline, seen

app = Pipeline("small")
app.channel("things", schema="name STRING")


@app.query(key="name")
def counted(things):
    return things.groupBy("name").agg(seen())
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline.py"
    path.write_text(PIPELINE)
    return path


def asked(*arguments: str) -> Misconfigured:
    found = CliRunner().invoke(app, ["rescale", *arguments]).exception
    assert isinstance(found, Misconfigured), found
    return found


def test_a_pipeline_that_runs_is_left_alone(file: Path) -> None:
    with StateFolder(file.parent / ".penstock").locked():
        assert "it is in use by process" in str(asked(str(file), "counted", "--partitions", "4"))


def test_a_query_is_named_before_anything_starts(file: Path) -> None:
    assert 'it has no query "count"; did you mean "counted"?' in str(asked(str(file), "count", "--partitions", "4"))


def test_a_query_that_never_ran_has_nothing_to_be_spread(file: Path) -> None:
    error = str(asked(str(file), "counted", "--partitions", "4"))
    assert "query counted: it has no checkpoint at" in error
    assert error.endswith("set [spark] shuffle_partitions before its first run")


def test_what_was_done_is_told_in_a_sentence() -> None:
    done = Rescaled("counted", 2, 8, 1_234_567, 12.34, unfinished=True)
    line = rescaled_line(done)
    assert line.startswith("counted: 1,234,567 rows of state, 8 partitions instead of 2, in 12.3 s; ")
    assert "last batch" in line
    assert "last batch" not in rescaled_line(Rescaled("counted", 2, 8, 1, 1.0, unfinished=False))


def test_a_number_of_partitions_has_to_be_one() -> None:
    result = CliRunner().invoke(app, ["rescale", "pipeline.py", "counted", "--partitions", "0"])
    assert result.exit_code == 2
    assert "--partitions" in result.output
