import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from penstock.analysis.query import Mode
from penstock.core.errors import Misconfigured
from penstock.pipeline.description import Channel
from penstock.pipeline.pipeline import Pipeline


@pytest.fixture
def app() -> Pipeline:
    """A pipeline with a source, whose channel is rsvps."""
    app = Pipeline("meetups")
    app.source("ws://feed/rsvps", into="rsvps")
    return app


def same(rsvps: Any) -> Any:
    """Everything, as it is."""
    return rsvps


def test_a_pipeline_describes_its_parts(app: Pipeline) -> None:
    app.channel(
        "rsvps", schema="n BIGINT", event_time="timestamp_millis(n)", partitions=4, retention="7 days", ahead="0 s"
    )
    app.query(into="copy", key=["n", "m"], mode="real-time", watermark="10 s", every="1 s", retention="1 h")(same)
    app.store("copy", "redis://", ttl="1 day")
    app.page("copy", chart={}, doc="what for")
    found = app.describe()
    assert found.name == "meetups"
    assert found.channels == {
        "rsvps": Channel("rsvps", "n BIGINT", "timestamp_millis(n)", 4, None, timedelta(days=7), timedelta()),
        "copy": Channel("copy", partitions=1, retention=timedelta(hours=1), result_of="same"),
    }
    (query,) = found.queries
    assert (query.name, query.inputs, query.into, query.key) == ("same", ("rsvps",), "copy", ("n", "m"))
    assert (query.build, query.mode, query.doc) == (same, Mode.REAL_TIME, "Everything, as it is.")
    assert (query.watermark, query.every) == (timedelta(seconds=10), timedelta(seconds=1))
    assert [(store.channel, store.url, store.ttl) for store in found.stores] == [
        ("copy", "redis://", timedelta(days=1))
    ]
    assert [(page.channel, page.title, page.doc) for page in found.pages] == [("copy", "copy", "what for")]


def test_what_is_not_said_follows_from_the_rest(app: Pipeline) -> None:
    app.query(key="n")(same)
    found = app.describe()
    assert found.channels == {"rsvps": Channel("rsvps"), "same": Channel("same", partitions=1, result_of="same")}
    assert [(source.name, source.partition_by, source.options) for source in found.sources] == [("rsvps", (), {})]
    assert (found.queries[0].into, found.queries[0].mode, found.queries[0].key) == ("same", Mode.AUTO, ("n",))


def test_a_query_stays_the_function_that_it_was(app: Pipeline) -> None:
    assert app.query(key="n")(same) is same


def test_a_query_in_sql_reads_the_tables_that_it_names(app: Pipeline) -> None:
    app.channel("cities", schema="city STRING")
    app.sql_query("by_city", key="city", sql="WITH r AS (SELECT * FROM rsvps) SELECT * FROM r JOIN cities USING (city)")
    (query,) = app.describe().queries
    assert query.inputs == ("rsvps", "cities")


def test_channels_from_outside_are_sifted_if_they_have_a_schema_or_a_query_reads_them(app: Pipeline) -> None:
    app.channel("typed", schema="n BIGINT")
    app.channel("unread")
    app.query(key="n")(same)
    assert {channel.name for channel in app.describe().with_dead_letters} == {"typed", "rsvps"}


def test_a_sender_may_not_have_the_name_of_another_at_a_second_door(app: Pipeline) -> None:
    app.source("listen+http://127.0.0.1:8700/in", into="shared", name="one", named=True)
    app.source("listen+tcp://127.0.0.1:8701", into="shared", name="two")
    with pytest.raises(Misconfigured, match="channel shared: two sources that number their records fill it"):
        app.describe()


def test_two_sources_that_number_their_records_do_not_share_a_channel(app: Pipeline) -> None:
    app.source("ws://one", into="shared", name="one")
    app.source("ws://two", into="shared", name="two")
    with pytest.raises(Misconfigured, match="channel shared: two sources that number their records fill it"):
        app.describe()


def test_the_names_of_a_pipelines_own_topics_hold_its_name(app: Pipeline) -> None:
    found = app.describe()
    assert (found.heartbeats, found.bookmarks, found.status) == (
        "penstock.meetups.heartbeats",
        "penstock.meetups.bookmarks",
        "penstock.meetups.status",
    )
    assert found.channels["rsvps"].dead == "rsvps.dead"


def test_a_description_does_not_change_with_its_pipeline(app: Pipeline) -> None:
    found = app.describe()
    app.channel("later")
    assert "later" not in found.channels


NOT_A_NAME = "this is not a name; begin with a letter and use letters, digits, _ and -"


@pytest.mark.parametrize("name", ["", "7up", "a b", "../etc", "a.dead", "a\n", "é", "a" * 201])
def test_a_name_that_could_be_a_path_or_another_topic_is_refused(name: str) -> None:
    with pytest.raises(Misconfigured, match="this is not a name; begin with a letter and use letters"):
        Pipeline(name)


Step = Callable[[Pipeline], object]


def steps(*several: Step) -> Step:
    return lambda app: [step(app) for step in several]


def described(app: Pipeline, step: Step) -> None:
    step(app)
    app.describe()


SENTENCES: dict[str, tuple[Step, str]] = {
    "the name of a channel": (lambda app: app.channel("my channel"), f"channel 'my channel': {NOT_A_NAME}"),
    "the name of a source": (lambda app: app.source("ws://x", into="x", name="a/b"), f"source 'a/b': {NOT_A_NAME}"),
    "the channel of a source": (lambda app: app.source("ws://x", into="a/b", name="x"), f"channel 'a/b': {NOT_A_NAME}"),
    "the name of a query": (lambda app: app.query("a b", into="x", key="n")(same), f"query 'a b': {NOT_A_NAME}"),
    "the channel of a query": (lambda app: app.query(into="a b", key="n")(same), f"channel 'a b': {NOT_A_NAME}"),
    "a channel twice": (
        steps(lambda app: app.channel("a"), lambda app: app.channel("a")),
        "channel a: it is declared twice; remove or rename one of them",
    ),
    "no partitions": (
        lambda app: app.channel("a", partitions=0),
        "channel a: partitions= is 0; set 1 or more",
    ),
    "a result without partitions": (
        lambda app: app.query(key="n", partitions=-1)(same),
        "query same: partitions= is -1; set 1 or more",
    ),
    "a duration": (
        lambda app: app.channel("a", retention="soon"),
        'channel a: "soon" is not a duration; write a number and a unit, such as "10 seconds", "250 ms", "1 day"',
    ),
    "the duration of a query": (
        lambda app: app.query(key="n", watermark="10")(same),
        'query same: "10" is not a duration; write a number and a unit, such as "10 seconds", "250 ms", "1 day"',
    ),
    "the duration of a store": (
        lambda app: app.store("rsvps", "redis://", ttl="1 fortnight"),
        'store redis://: "1 fortnight" is not a duration; '
        'write a number and a unit, such as "10 seconds", "250 ms", "1 day"',
    ),
    "a schema": (
        lambda app: app.channel("a", schema=object),
        "schema object: it has no annotated field; write fields such as `guests: int`",
    ),
    "a mode": (
        lambda app: app.query(key="n", mode="fast")(same),  # type: ignore[arg-type]
        'query same: mode is "fast"; the choices are auto, real-time, micro-batch',
    ),
    "no key": (
        lambda app: app.query(key=[])(same),
        "query same: it has no key; name the columns that identify its rows: key=…",
    ),
    "no parameter": (
        lambda app: app.query("nothing", key="n")(lambda: None),
        "query nothing: it has no parameter; name the channels that it reads",
    ),
    "sql without a channel": (
        lambda app: app.sql_query("one", key="n", sql="SELECT 1 AS n"),
        "query one: it reads no channel; name one after FROM",
    ),
    "a result that is there already": (
        steps(lambda app: app.channel("a"), lambda app: app.query(into="a", key="n")(same)),
        "query same: it writes into a, which is declared already; name another channel",
    ),
    "a source into a result": (
        steps(lambda app: app.query(key="n")(same), lambda app: app.source("ws://x", into="same")),
        "source same: same is the result of a query; name another channel",
    ),
    "two sources of one name": (
        lambda app: app.source("ws://other", into="rsvps"),
        "source rsvps: two have this name; rename one of them: name=…",
    ),
    "two queries of one name": (
        steps(lambda app: app.query(into="a", key="n")(same), lambda app: app.query(into="b", key="n")(same)),
        "query same: two have this name; rename one of them: name=…",
    ),
    "a channel that is almost there": (
        lambda app: app.query("q", key="n")(lambda rsvp: rsvp),
        'query q: there is no channel "rsvp"; did you mean "rsvps"?',
    ),
    "a channel of sql that is almost there": (
        lambda app: app.sql_query("q", key="n", sql="SELECT * FROM rsvp"),
        'query q: there is no channel "rsvp"; did you mean "rsvps"?',
    ),
    "a channel in capitals": (
        lambda app: app.sql_query("q", key="n", sql="SELECT * FROM RSVPS"),
        'query q: there is no channel "RSVPS"; did you mean "rsvps"?',
    ),
    "a channel unlike any": (
        lambda app: app.store("orders", "redis://"),
        'store redis://: there is no channel "orders"; there are rsvps',
    ),
    "a page of nothing": (
        lambda app: app.page("rsvp_counts", chart={}),
        'page rsvp counts: there is no channel "rsvp_counts"; did you mean "rsvps"?',
    ),
    "a page of what is no result": (
        lambda app: app.page("rsvps", chart={}, title="All"),
        "page All: rsvps is not the result of a query; show one that is",
    ),
    "a query of its own result": (
        lambda app: app.sql_query("a", key="n", sql="SELECT * FROM a"),
        "channel a: its query depends on it; write into another channel",
    ),
    "a circle": (
        steps(
            lambda app: app.sql_query("a", key="n", sql="SELECT * FROM rsvps JOIN c"),
            lambda app: app.sql_query("b", key="n", sql="SELECT * FROM a"),
            lambda app: app.sql_query("c", key="n", sql="SELECT * FROM b"),
        ),
        "channel a: its query depends on it; write into another channel",
    ),
}


@pytest.mark.parametrize(("mistake", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_a_mistake_is_told_with_its_place_and_the_fix(app: Pipeline, mistake: Step, sentence: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        described(app, mistake)
    # Of what is declared, the line is told as well.
    assert re.sub(r"^test_description\.py:\d+, ", "", str(caught.value)) == sentence


def test_a_pipeline_without_channels_says_how_to_make_one() -> None:
    app = Pipeline("empty")
    app.store("rsvps", "redis://")
    with pytest.raises(Misconfigured, match=r'there is no channel "rsvps"; declare it: app.channel\(…\)'):
        app.describe()


def test_queries_may_read_the_results_of_others_in_any_order(app: Pipeline) -> None:
    app.sql_query("second", key="n", sql="SELECT * FROM first")
    app.sql_query("first", key="n", sql="SELECT * FROM rsvps")
    app.sql_query("third", key="n", sql="SELECT * FROM first JOIN second")
    assert [query.name for query in app.describe().queries] == ["second", "first", "third"]
