from pathlib import Path

from penstock.pipeline.config import Config
from penstock.pipeline.description import Description
from penstock.pipeline.graph import graph, stage_inputs, store_node
from penstock.pipeline.pipeline import Pipeline


def described() -> Description:
    app = Pipeline("meetups")
    app.channel("rsvps", schema="n BIGINT")
    app.source("wss://ada:secret@feed/rsvps?token=abc", into="rsvps", name="feed")
    app.sql_query("by_city", key="n", sql="SELECT * FROM rsvps")
    app.store("by_city", "redis://:secret@host:6379")
    app.page("by_city", chart={})
    return app.describe()


def test_every_part_is_a_node_and_every_hop_an_edge(tmp_path: Path) -> None:
    drawn = graph(described(), Config.read(tmp_path, environ={}))
    assert [(node["id"], node["kind"], node["label"]) for node in drawn["nodes"]] == [
        ("source:feed", "source", "feed"),
        ("channel:rsvps", "channel", "rsvps"),
        ("channel:rsvps.dead", "channel", "rsvps.dead"),
        ("channel:by_city", "channel", "by_city"),
        ("query:by_city", "query", "by city"),
        ("store:redis/by_city", "store", "redis"),
        ("page", "page", "page"),
    ]
    assert drawn["edges"] == [
        ["source:feed", "channel:rsvps"],
        ["channel:rsvps", "channel:rsvps.dead"],
        ["channel:rsvps", "query:by_city"],
        ["query:by_city", "channel:by_city"],
        ["channel:by_city", "store:redis/by_city"],
        ["channel:by_city", "page"],
    ]


def test_no_edge_hangs_in_the_air(tmp_path: Path) -> None:
    drawn = graph(described(), Config.read(tmp_path, environ={}))
    assert {end for edge in drawn["edges"] for end in edge} == {node["id"] for node in drawn["nodes"]}


def test_nodes_are_told_where_they_are_without_their_secrets(tmp_path: Path) -> None:
    drawn = graph(described(), Config.read(tmp_path, environ={"PENSTOCK_SOURCES_FEED": "ws://x:secret@there/feed"}))
    notes = {node["id"]: node["note"] for node in drawn["nodes"]}
    assert notes["source:feed"] == "ws://there/feed"
    assert notes["store:redis/by_city"] == "by_city in redis://host:6379"
    assert notes["channel:by_city"] == "the result of by_city"
    assert "secret" not in str(drawn)


def test_without_pages_there_is_no_page(tmp_path: Path) -> None:
    assert graph(Pipeline("empty").describe(), Config.read(tmp_path, environ={})) == {"nodes": [], "edges": []}


def test_a_store_is_known_by_its_product_and_its_channel() -> None:
    assert store_node("delta://lake/rsvps", "rsvps") == "store:delta/rsvps"


def test_each_stage_reads_its_channels() -> None:
    app = Pipeline("people")
    app.source("ws://feed/rsvps", into="rsvps")
    app.sql_query("by_city", key="city", sql="SELECT city, seen() FROM rsvps GROUP BY city")
    app.store("by_city", "redis://")
    assert stage_inputs(app.describe()) == {"query:by_city": ("rsvps",), "store:redis/by_city": ("by_city",)}
    app.page("by_city", chart={})
    assert stage_inputs(app.describe())["feed:by_city"] == ("by_city",)
