"""Whether a query may go on from the checkpoint that it has: on folders made by hand."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.analysis.checkpoints.folders import checkpoint

from penstock.analysis.checkpoints.doctor import Diagnosis, Facts, Fit, examine, readable
from penstock.analysis.checkpoints.note import LAST, Fingerprint, Note, Operator
from penstock.audit.account import Account, Share
from penstock.core.errors import Misconfigured

SUMS = Operator("Aggregate", ("name string",), ("sum(n) bigint",))
QUERY = Fingerprint(("things",), "totals", "update", (SUMS,), "ab")
KEEP = "keep the query unchanged and give the new one another name, or begin anew: "
ANEW = "begin anew: penstock run FILE --new-checkpoint q --from beginning|MOMENT|CHANNEL:PARTITION=OFFSET,…"


def examined(path: Path, now: Fingerprint = QUERY, facts: Facts | None = None, spark: str | None = None) -> Diagnosis:
    return examine("q", str(path), now, facts or Facts(), lambda *_: spark)


def kept(path: Path, note: Note | None = None, **facts: object) -> Path:
    """A checkpoint of two batches, up to 20 of partition 0, and its note."""
    made = checkpoint(path, batches=2, **facts)  # type: ignore[arg-type]  # as they come
    (note or Note({"things": "one"}, query=QUERY)).write(str(made))
    return made


def account(until: int, generation: str = "an-id", number: int = 0, step: int = 2) -> Facts:
    share = Share({0: 0}, {0: until}, until)
    return Facts(account=Account("query:q", generation, 0, {"things": share}, step, number=number))


def refused(found: Diagnosis, description: str) -> str:
    """Its way out."""
    assert (found.fit, found.problem) == (Fit.REFUSED, description)
    with pytest.raises(Misconfigured) as error:
        found.require()
    assert str(error.value).startswith("query q, checkpoint ")
    assert str(found) == f"does not fit: {description}; {found.fix}"
    return found.fix


def test_a_query_without_a_checkpoint_is_new(tmp_path: Path) -> None:
    found = examined(tmp_path / "q", facts=Facts({"things": "one"}))
    assert (found.fit, str(found)) == (Fit.NEW, "new")
    assert found.require() == Note({"things": "one"}, query=QUERY)


def test_a_query_that_is_as_it_was_fits(tmp_path: Path) -> None:
    facts = replace(account(20), topics={"things": "one", "totals": "two"}, bounds={"things": {0: (0, 30)}})
    found = examined(kept(tmp_path / "q"), facts=facts)
    assert (found.fit, found.remarks) == (Fit.FITS, ())
    assert found.require() == Note({"things": "one", "totals": "two"}, query=QUERY)


def test_what_lies_elsewhere_is_left_to_spark() -> None:
    found = examine("q", "s3://bucket/q", QUERY, Facts())
    assert found.fit is Fit.UNSEEN
    assert found.require() == Note()


def test_another_topic_of_the_same_name_is_refused_even_before_its_first_batch(tmp_path: Path) -> None:
    description = "the topic things was recreated after this checkpoint"
    other = Facts({"things": "two"})
    assert refused(examined(kept(tmp_path / "q"), facts=other), description) == ANEW
    Note({"things": "one"}).write(str(tmp_path / "begun"))
    assert refused(examined(tmp_path / "begun", facts=other), description) == ANEW


@pytest.mark.parametrize(
    ("now", "description"),
    [
        (replace(QUERY, into="others"), "it wrote into totals; others would hold only rows that change from now on"),
        (
            replace(QUERY, sources=("things", "more")),
            "it read things, and now reads things, more: the number of its sources may not change",
        ),
        (
            replace(QUERY, sources=("more",)),
            "it read things, and now reads more: its sources may not change",
        ),
        (replace(QUERY, operators=()), "its state is of Aggregate, and would be of no operator"),
        (
            replace(QUERY, operators=(SUMS, Operator("Deduplicate", ("n bigint",)))),
            "its state is of Aggregate, and would be of Aggregate, Deduplicate",
        ),
        (
            replace(QUERY, operators=(replace(SUMS, keys=("city string",)),)),
            "its state (Aggregate) is kept by name string, and would be kept by city string",
        ),
        (
            replace(QUERY, operators=(replace(SUMS, values=("sum(m) bigint",)),)),
            "its state (Aggregate) holds sum(n) bigint, and would hold sum(m) bigint",
        ),
        (
            replace(QUERY, operators=(replace(SUMS, values=()),)),
            "its state (Aggregate) holds sum(n) bigint, and would hold it no longer",
        ),
        (
            replace(QUERY, operators=(replace(SUMS, values=("sum(n) bigint", "max(n) bigint")),)),
            "its state (Aggregate) does not hold max(n) bigint, and would",
        ),
    ],
)
def test_what_its_state_depends_on_may_not_change(now: Fingerprint, description: str, tmp_path: Path) -> None:
    assert refused(examined(kept(tmp_path / "q"), now), description).startswith(KEEP)


def test_values_may_not_change_places(tmp_path: Path) -> None:
    def of(*values: str) -> Fingerprint:
        return replace(QUERY, operators=(replace(SUMS, values=values),))

    path = kept(tmp_path / "q", Note(query=of("sum(a) bigint", "sum(b) bigint")))
    description = "its state (Aggregate) holds sum(a) bigint, sum(b) bigint in another order than it would"
    refused(examined(path, of("sum(b) bigint", "sum(a) bigint")), description)


def test_sources_may_not_change_places(tmp_path: Path) -> None:
    before = replace(QUERY, sources=("a", "b"))
    path = kept(tmp_path / "q", Note(query=before), sources=["a", "b"])
    description = "it read a, b, and now reads b, a: the order of sources may not change"
    refused(examined(path, replace(QUERY, sources=("b", "a"))), description)
    assert examined(path, before).fit is Fit.FITS


def test_a_source_that_was_not_read_yet_is_known_from_the_note(tmp_path: Path) -> None:
    before = replace(QUERY, sources=("a", "b"))
    path = kept(tmp_path / "q", Note(query=before), sources=["a", "b"])
    for number in (0, 1):
        file = path / "offsets" / str(number)
        file.write_text("\n".join([*file.read_text().splitlines()[:-1], "-"]))
    assert examined(path, before).fit is Fit.FITS
    description = "it read a, b, and now reads a, c: its sources may not change"
    refused(examined(path, replace(QUERY, sources=("a", "c"))), description)


def test_the_word_of_spark_counts_as_well(tmp_path: Path) -> None:
    refused(examined(kept(tmp_path / "q"), spark="it has other types"), "it has other types")


def test_a_note_of_before_leaves_state_to_spark(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "q", batches=2)
    (path / "penstock.json").write_text(json.dumps({"things": "one"}))
    other = replace(QUERY, operators=())
    assert examined(path, other).fit is Fit.FITS
    refused(examined(path, other, spark="no"), "no")


@pytest.mark.parametrize(
    ("bounds", "description"),
    [
        ({1: (0, 30)}, "it has read partition 0 of things, which now has 1"),
        (
            {0: (0, 19)},
            "it is at offset 20 of things, partition 0, which ends at 19: the channel was recreated, or has lost its "
            "last records",
        ),
        ({0: (25, 30)}, "the offsets 20–24 of things, partition 0 were removed before it read them"),
    ],
)
def test_channels_have_to_hold_the_places_where_it_stands(
    bounds: dict[int, tuple[int, int]], description: str, tmp_path: Path
) -> None:
    path = kept(tmp_path / "q")
    refused(examined(path, facts=Facts(bounds={"things": bounds})), description)
    lenient = examined(path, facts=Facts(bounds={"things": {0: (25, 30)}}, skip_lost=True))
    assert lenient.fit is Fit.FITS
    assert examined(path, facts=Facts(bounds={"things": {0: (20, 20), 1: (0, 5)}})).fit is Fit.FITS


def test_an_older_checkpoint_is_refused(tmp_path: Path) -> None:
    description = "it is an older one: it is at 0=20 in things, and the query has read things up to 0=30 (partition 0)"
    ways = refused(examined(kept(tmp_path / "q"), facts=account(30)), description)
    assert ways == f"bring the one that it had back from a copy, or {ANEW}"


def test_a_checkpoint_of_which_no_batch_is_finished_is_older_than_any_account(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "q", batches=0, begun=1)
    description = (
        "it is an older one: it has no commit in things, and the query has read things up to 0=5 (partition 0)"
    )
    refused(examined(path, facts=account(5)), description)


def test_a_checkpoint_that_is_gone_is_missed(tmp_path: Path) -> None:
    description = "its checkpoint is missing, and it has read things up to 0=30: all would be counted again"
    refused(examined(tmp_path / "q", facts=account(30)), description)
    # Unless nothing was covered.
    assert examined(tmp_path / "q", facts=account(0, step=0)).fit is Fit.NEW


def test_one_that_was_set_aside_does_not_come_back_unnoticed(tmp_path: Path) -> None:
    path = kept(tmp_path / "q")
    description = "the query has had a newer one, and has read things up to 0=30 with it"
    refused(examined(path, facts=account(30, "another-id")), description)
    # Rows of a life may be there before it has told of a batch.
    older = "its rows would always count as older than those of generation 1"
    for step in (0, 2):
        facts = account(30, "another-id", number=1, step=step)
        refused(examined(path, facts=facts), f"the query has had a newer one: {older}")
        refused(examined(tmp_path / "none", facts=facts), f"its checkpoint is missing: {older}")


def test_a_checkpoint_that_has_lost_its_note_is_not_taken_for_a_first_life(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "q", batches=2)
    assert examined(path, facts=account(20)).fit is Fit.FITS
    assert examined(path, facts=account(20, number=1)).fit is Fit.REFUSED


def test_a_new_life_need_not_have_told_of_itself_yet(tmp_path: Path) -> None:
    facts = account(30, "another-id", number=1)
    Note(generation=2, since={"things": {0: 3}}).write(str(tmp_path / "begun"))
    assert examined(tmp_path / "begun", facts=facts).fit is Fit.NEW
    path = kept(tmp_path / "q", Note(generation=2, since={"things": {0: 3}}, query=QUERY))
    assert examined(path, facts=facts).fit is Fit.FITS


def test_damage_is_told_with_the_ways_out(tmp_path: Path) -> None:
    path = kept(tmp_path / "q")
    (path / "offsets" / "1").write_text("")
    found = examined(path)
    assert found.problem.startswith("it is damaged: offsets/1 cannot be read")
    assert found.fix == f"bring the file back from a copy, or {ANEW}"
    (path / "penstock.json").write_text("{")
    assert examined(path).problem.startswith("its note penstock.json cannot be read")
    with pytest.raises(Misconfigured, match=f"query q, checkpoint {path}: its note .*, or begin anew: "):
        readable("q", str(path))


def test_settings_that_a_checkpoint_keeps_are_told(tmp_path: Path) -> None:
    facts = Facts(setting={"spark.sql.shuffle.partitions": "8"}.get)
    found = examined(kept(tmp_path / "q"), facts=facts)
    assert found.fit is Fit.FITS
    assert found.remarks == (
        "it uses spark.sql.shuffle.partitions = 2 of its checkpoint, not 8: penstock state rescale changes it",
    )


def test_changes_that_do_no_harm_are_remarked(tmp_path: Path) -> None:
    path = kept(tmp_path / "q")
    found = examined(path, replace(QUERY, plan="cd", output="append"))
    assert found.fit is Fit.FITS
    assert found.remarks == (
        "from now on its rows are written once, when they are final",
        "it has changed, but not its state: the change applies to new records only",
    )
    assert str(found) == "fits; " + "; ".join(found.remarks)


def test_a_checkpoint_of_the_first_format_goes_on_in_batches(tmp_path: Path) -> None:
    path = kept(tmp_path / "q")
    why = "its checkpoint was begun in a format that Spark takes in micro-batches only"
    assert (examined(path).fit, examined(path).in_batches_only) == (Fit.FITS, why)
    shutil.rmtree(path / "state")
    assert examined(path).in_batches_only is None


def test_a_query_that_changed_before_its_first_batch_ended_begins_another_life(tmp_path: Path) -> None:
    """Its rows may be there already, and would pass for those of the query as it is now."""
    Note({"things": "one"}, 2, {"things": {0: 3}}, QUERY).write(str(tmp_path))
    assert examined(tmp_path).require().generation == 2
    now = replace(QUERY, plan="cd")
    found = examined(tmp_path, now)
    assert str(found) == "new; it changed before its first commit: it starts a new generation"
    assert found.require() == Note({"things": "one"}, 3, {"things": {0: 3}}, now)
    Note(generation=LAST, query=QUERY).write(str(tmp_path))
    assert refused(
        examined(tmp_path, now), f"it has had {LAST} generations, and versions cannot count more"
    ).startswith("give it")
