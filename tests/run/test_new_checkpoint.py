"""New checkpoints: where they begin, and what becomes of the old ones."""

from pathlib import Path

import pytest

from penstock.analysis.checkpoints.note import LAST, Note, note_of
from penstock.analysis.checkpoints.rescale import recover
from penstock.audit.account import Account
from penstock.core.errors import Misconfigured
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline
from penstock.run.new_checkpoint import Begin, Renewal
from penstock.testing import ManualClock, MemoryChannels


@pytest.fixture
def description() -> Description:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="city STRING")
    app.channel("venues", schema="city STRING")
    app.sql_query(
        "by_city", into="cities", key="city", sql="SELECT city, count(1) AS n, seen() FROM rsvps GROUP BY city"
    )
    app.sql_query("large", key="city", sql="SELECT city, origin FROM venues")
    return app.describe()


@pytest.fixture
def channels() -> MemoryChannels:
    """Of three records at the moments 100, 200 and 300 in each channel."""
    clock = ManualClock(0)
    made = MemoryChannels(clock=clock)
    for _ in range(3):
        clock.move(100e-6)
        for channel in ("rsvps", "venues"):
            made.append(channel, b"{}")
    return made


def applied(renewal: Renewal, description: Description, folder: Path, channels: MemoryChannels) -> list[str]:
    renewal.require(description)
    return list(renewal.apply(description, str(folder), channels))


@pytest.mark.parametrize(
    ("begin", "offset"),
    [
        (Begin(), 0),
        (Begin(end=True), 3),
        (Begin(timestamp=150), 1),
        (Begin(timestamp=1_000), 3),
        (Begin(offsets={"rsvps": {0: 2}}), 2),
        (Begin(offsets={"rsvps": {0: 3}}), 3),
    ],
)
def test_a_query_begins_where_it_is_told(
    begin: Begin, offset: int, description: Description, channels: MemoryChannels, tmp_path: Path
) -> None:
    said = applied(Renewal(("by_city",), begin), description, tmp_path, channels)
    assert said == [f"query by_city starts a new generation: rsvps at 0={offset}"]
    topics = {"rsvps": channels.topic_id("rsvps")}
    assert note_of(f"{tmp_path}/by_city") == Note(topics, 1, {"rsvps": {0: offset}})


def test_the_old_checkpoint_is_kept_and_each_life_counts(
    description: Description, channels: MemoryChannels, tmp_path: Path
) -> None:
    path = tmp_path / "by_city"
    path.mkdir()
    (path / "metadata").write_text("{}")
    # By the name of its result it is known as well.
    for name, generation in (("by_city", 1), ("cities", 2)):
        [said] = applied(Renewal((name,), Begin()), description, tmp_path, channels)
        assert (
            said
            == f"query by_city starts a new generation: rsvps at 0=0; its checkpoint is kept as {path}.{generation}"
        )
        assert note_of(str(path)).generation == generation
    assert (tmp_path / "by_city.1" / "metadata").exists()
    assert note_of(f"{path}.2").generation == 1


def test_a_life_is_later_than_any_that_was_told_of(
    description: Description, channels: MemoryChannels, tmp_path: Path
) -> None:
    told = Account("query:by_city", "gone", 0, {}, 1, number=6)
    channels.append(description.bookmarks, told.dumps(), told.key)
    applied(Renewal(("by_city",), Begin()), description, tmp_path, channels)
    assert note_of(f"{tmp_path}/by_city").generation == 7


def test_what_a_rescaling_left_half_done_does_not_come_back(
    description: Description, channels: MemoryChannels, tmp_path: Path
) -> None:
    folder = f"{tmp_path}/by_city"
    Note(generation=3).write(f"{folder}.before-rescale")
    applied(Renewal(("by_city",), Begin()), description, tmp_path, channels)
    assert not recover(folder)
    assert (note_of(folder).generation, note_of(f"{folder}.1").generation) == (4, 3)


def test_dead_letters_can_be_brought_anew(description: Description, channels: MemoryChannels, tmp_path: Path) -> None:
    applied(Renewal(("rsvps.dead", "large"), Begin(end=True)), description, tmp_path, channels)
    assert note_of(f"{tmp_path}/rsvps.dead").since == {"rsvps": {0: 3}}
    assert note_of(f"{tmp_path}/large").since == {"venues": {0: 3}}


@pytest.mark.parametrize(
    ("names", "offsets", "problem"),
    [
        (("by_contry",), {}, 'it has no query "by_contry"; did you mean "by_city"?'),
        (("by_city",), {"there": {0: 1}}, "--from: there is read by none of large, by_city; they read rsvps, venues"),
        (("by_city",), {"rsvps": {1: 0}}, "--from: rsvps has no partition 1; it has 0"),
        (("by_city",), {"rsvps": {0: 4}}, "--from: rsvps, partition 0 has no offset 4; use 0 to 3"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(
    names: tuple[str, ...],
    offsets: dict[str, dict[int, int]],
    problem: str,
    description: Description,
    channels: MemoryChannels,
    tmp_path: Path,
) -> None:
    with pytest.raises(Misconfigured) as refused:
        applied(Renewal(("large", *names), Begin(offsets=offsets)), description, tmp_path, channels)
    assert problem in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_lives_have_an_end(description: Description, channels: MemoryChannels, tmp_path: Path) -> None:
    Note(generation=LAST).write(f"{tmp_path}/by_city")
    with pytest.raises(Misconfigured, match=f"it has had {LAST} generations"):
        applied(Renewal(("by_city",), Begin()), description, tmp_path, channels)


def test_a_checkpoint_elsewhere_cannot_be_set_aside(description: Description, channels: MemoryChannels) -> None:
    with pytest.raises(Misconfigured, match="is on a remote file system; move it by hand"):
        list(Renewal(("by_city",), Begin()).apply(description, "s3://bucket", channels))
