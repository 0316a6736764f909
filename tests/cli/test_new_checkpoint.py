"""`penstock run --new-checkpoint`: what one may write. What it does: tests/analysis/checkpoints/test_new_life.py."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cli.run import beginning
from penstock.core.clock import SystemClock
from penstock.core.errors import Misconfigured
from penstock.run.new_checkpoint import Begin


def test_a_place_to_begin_is_a_word_a_moment_or_offsets() -> None:
    assert beginning("beginning") == Begin()
    assert beginning("end") == Begin(end=True)
    assert beginning("2026-11-15T10:00+00:00") == Begin(timestamp=1_794_736_800_000_000)
    assert beginning("2026-11-15 10:00+00:00") == beginning("2026-11-15T10:00+00:00")
    before = SystemClock().now()
    assert before <= (beginning("10m").timestamp or 0) + 600_000_000 <= SystemClock().now()
    assert beginning("rsvps:0=120, rsvps:1=80,venues:0=0") == Begin(
        offsets={"rsvps": {0: 120, 1: 80}, "venues": {0: 0}}
    )


@pytest.mark.parametrize("text", ["rsvps=3", "rsvps:0=", "rsvps:0=-1", "rsvps:0=1,", "=", "rsvps:0=1;rsvps:1=2"])
def test_what_is_no_offset_is_told(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"--from: .*CHANNEL:PARTITION=OFFSET"):
        beginning(text)


def test_what_is_no_place_is_told() -> None:
    with pytest.raises(Misconfigured, match='--from: "middle" is not a valid time'):
        beginning("middle")


@pytest.mark.parametrize(
    ("options", "description"),
    [
        (["--from", "beginning"], "--from: "),
        (["--new-checkpoint", "by_city"], "--new-checkpoint: "),
        (["--new-checkpoint", "by_contry", "--from", "end"], 'it has no query "by_contry"; did you mean "by_city"?'),
        (["--new-checkpoint", "by_city", "--from", "x:0=1"], "--from: x is read by none of by_city; they read rsvps"),
    ],
)
def test_half_of_it_or_a_stranger_is_refused_before_anything_starts(
    options: list[str], description: str, tmp_path: Path
) -> None:
    file = tmp_path / "small.py"
    sql = "SELECT city, count(1) AS n, seen() FROM rsvps GROUP BY city"
    file.write_text(
        "from penstock import Pipeline\n"
        'app = Pipeline("small")\n'
        'app.channel("rsvps", schema="city STRING")\n'
        f'app.sql_query("by_city", key="city", sql="{sql}")\n'
    )
    ran = CliRunner().invoke(app, ["run", str(file), *options])
    assert isinstance(ran.exception, Misconfigured)
    assert description in str(ran.exception)
    assert not (tmp_path / ".penstock").exists()
