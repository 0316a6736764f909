"""The sources of a pipeline, as its settings want them."""

from pathlib import Path

import pytest

from penstock.collect.websocket import WebSocketSource
from penstock.core.contracts import Guarantee
from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.description import SourceSpec
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.sources import make_source

ONCE, MOST = Guarantee.EXACTLY_ONCE, Guarantee.AT_MOST_ONCE


def config(folder: Path, **environ: str) -> Config:
    return Config.read(folder, environ=environ)


def test_an_address_and_options_make_a_source(tmp_path: Path) -> None:
    spec = SourceSpec("rsvps", "ws://feed", "rsvps", (), {"numbered": None, "ping_every": "2 s"})
    source = make_source(spec, config(tmp_path), ONCE)
    assert isinstance(source, WebSocketSource)
    assert (source.name, source.resume, source.ping_every.total_seconds()) == ("rsvps", False, 2)


def test_who_wants_nothing_twice_does_not_ask_for_it_again(tmp_path: Path) -> None:
    spec = SourceSpec("rsvps", "ws://feed", "rsvps", ())
    found = [make_source(spec, config(tmp_path), delivery) for delivery in (ONCE, MOST)]
    assert [source.guarantee for source in found] == ["exactly once", "best effort"]


def test_what_begins_with_a_dollar_is_read_from_the_environment(tmp_path: Path) -> None:
    spec = SourceSpec("rsvps", "ws://feed", "rsvps", (), {"proxy": "$PROXY"})
    source = make_source(spec, config(tmp_path), ONCE, {"PROXY": "http://proxy"})
    assert isinstance(source, WebSocketSource)
    assert source.proxy == "http://proxy"
    with pytest.raises(Misconfigured, match=r"source rsvps: proxy is .PROXY.*; export"):
        make_source(spec, config(tmp_path), ONCE, {})
    assert make_source(spec, config(tmp_path), ONCE).name == "rsvps"


def test_a_source_of_ones_own_is_used_unless_the_settings_give_an_address(tmp_path: Path) -> None:
    app = Pipeline("mine")
    app.source(own := WebSocketSource("ws://own", "rsvps"), into="rsvps", partition_by="id")
    (spec,) = app.describe().sources
    assert (spec.name, spec.partition_by, spec.url) == ("rsvps", ("id",), "websocket")
    assert make_source(spec, config(tmp_path), ONCE) is own
    other = make_source(spec, config(tmp_path, PENSTOCK_SOURCES_RSVPS="ws://other"), ONCE)
    assert isinstance(other, WebSocketSource)
    assert other.url == "ws://other"


def test_answers_are_the_result_of_a_query() -> None:
    def described(answers: str) -> None:
        app = Pipeline("shop")
        app.source("listen+http://127.0.0.1:8700/in", into="payments", answers=answers)
        app.sql_query("decisions", key="value", sql="SELECT value, origin FROM payments")
        app.describe()

    described("decisions")
    with pytest.raises(Misconfigured, match='source payments, answers: there is no channel "decision"; did you mean'):
        described("decision")
    with pytest.raises(Misconfigured, match="source payments, answers: payments is not the result of a query"):
        described("payments")


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("wss//feed", {}, 'the scheme of wss//feed is unknown; did you mean "wss://"?'),
        ("https://feed", {}, 'did you mean "poll+https://" or "sse+https://"?'),
        ("tcp://feed", {}, 'did you mean "listen+tcp://"?'),
        ("gopher://feed?token=1", {}, "the scheme of gopher://feed is unknown"),
        ("ws://feed", {"keey": "customer"}, 'unknown option "keey"; did you mean "key"?'),
        ("ws://feed", {"numberd": "feed"}, 'unknown option "numberd"; did you mean "numbered"?'),
        ("ws://feed", {"ping_every": "soon"}, 'source rsvps, ping_every: "soon" is not a duration'),
    ],
)
def test_what_is_wrong_is_told_when_the_pipeline_is_described(url: str, options: dict[str, str], said: str) -> None:
    app = Pipeline("mine")
    app.source(url, into="rsvps", **options)  # type: ignore[arg-type]
    with pytest.raises(Misconfigured) as error:
        app.describe()
    assert said in str(error.value)
    assert "token" not in str(error.value)
