"""What does not fit is said before anything starts."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.pipeline import Pipeline
from penstock.plan.checks import Level, check, unconnected
from penstock.simulate.documents import KINDS


def app(source: str = "ws://host/path", store: str = "redis://", ttl: str | None = None) -> Pipeline:
    made = Pipeline("app")
    made.source(source, into="rsvps")
    made.store("rsvps", store, ttl=ttl)
    return made


def test_what_fits_passes(tmp_path: Path) -> None:
    check(app().describe(), Config.read(tmp_path, environ={"PENSTOCK_SOURCES_RSVPS": "wss://other"}))


def test_whatever_can_be_simulated_passes(tmp_path: Path) -> None:
    for name in KINDS:
        check(
            app(f"simulate://{name}?rate=200&seed=7&senders=20&no-resume").describe(), Config.read(tmp_path, environ={})
        )


@pytest.mark.parametrize("address", ["kafka://", "kafka://broker:9092"])
def test_spark_audits_kafka(address: str, tmp_path: Path) -> None:
    environ = {"PENSTOCK_CHANNELS_ADDRESS": address, "PENSTOCK_AUDIT_ENGINE": "spark"}
    check(app().describe(), Config.read(tmp_path, environ=environ))


@pytest.mark.parametrize(
    ("made", "environ", "said"),
    [
        (
            app(),
            {"PENSTOCK_SOURCES_RSVPZ": "ws://x"},
            r'\[sources\]: app has no source "rsvpz"; did you mean "rsvps"\?',
        ),
        (
            app("ftp://x"),
            {},
            r"source rsvps: the scheme of ftp://x is unknown; .*wss://",
        ),
        (app(), {"PENSTOCK_SOURCES_RSVPS": "nowhere"}, r"source rsvps: .*nowhere"),
        (app("simulate://tides"), {}, r'there is no simulation "tides"; .*rsvps'),
        (app("simulate://update"), {}, r'source rsvps: there is no simulation "update"; did you mean "updates"\?'),
        (app("simulate://rsvps?sed=7"), {}, r'source rsvps: a simulation has no option "sed"; did you mean "seed"\?'),
        (app(store="mysql://x"), {}, r'store mysql://x: .*; write "redis://…"'),
        (app(store="delta://x", ttl="1 day"), {}, r"store delta://x: a lake"),
        (
            app(),
            {"PENSTOCK_CHANNELS_ADDRESS": "tcp://127.0.0.1:7070"},
            r"\[channels\] address = tcp://127.0.0.1:7070: the audit has to read records again .*; use kafka://, redis://",
        ),
        (
            app(),
            {"PENSTOCK_CHANNELS_ADDRESS": "memory://here"},
            r"\[channels\] address = memory://: .*; use kafka://, redis://",
        ),
        (
            app(),
            {"PENSTOCK_CHANNELS_ADDRESS": "redis://", "PENSTOCK_AUDIT_ENGINE": "spark"},
            r"\[audit\] engine: .* at redis://local.*; use auto or python",
        ),
        (app(), {"PENSTOCK_CHANNELS_ADDRESS": "kafak://x"}, r'no binder knows this address; did you mean "kafka://"'),
    ],
)
def test_what_does_not_fit_is_said(made: Pipeline, environ: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=said):
        check(made.describe(), Config.read(tmp_path, environ=environ))


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ("listen+http://127.0.0.1:8700/a", "listen+tcp://127.0.0.1:8700", False),
        ("listen+http://0.0.0.0:8700/a", "listen+ws://127.0.0.1:8700/b", False),
        ("listen+http://127.0.0.1:8700/a", "listen+http://127.0.0.1:8700/b", False),
        ("listen+http://127.0.0.1:8700/a", "listen+http://127.0.0.2:8700/a", True),
        ("listen+http://127.0.0.1:8700/a", "listen+http://127.0.0.1:8701/a", True),
        ("listen+http://127.0.0.1:8700/a", "ws://127.0.0.1:8700/a", True),
    ],
)
def test_each_source_that_listens_has_a_port_of_its_own(one: str, other: str, fits: bool, tmp_path: Path) -> None:
    made = app(one)
    made.source(other, into="others")
    expected = nullcontext() if fits else pytest.raises(Misconfigured, match=r"source others: .*8700.* source rsvps")
    with expected:
        check(made.describe(), Config.read(tmp_path, environ={}))


def test_of_three_sources_any_two_are_apart(tmp_path: Path) -> None:
    made = app("listen+http://127.0.0.1:8700/a")
    made.source("listen+tcp://127.0.0.2:8700", into="second")
    made.source("listen+ws://127.0.0.2:8700/c", into="third")
    with pytest.raises(Misconfigured, match=r"source third: it listens on 127.0.0.2:8700, as source second"):
        check(made.describe(), Config.read(tmp_path, environ={}))


def test_a_secret_that_is_not_there_is_said_where_it_is_needed(tmp_path: Path) -> None:
    made = Pipeline("app")
    made.source("listen+webhook://127.0.0.1:8700/shop", into="events", secret="$SHOP_SECRET")
    described, config = made.describe(), Config.read(tmp_path, environ={})
    check(described, config)
    check(described, config, {"SHOP_SECRET": "whsec_c2VjcmV0"})
    with pytest.raises(Misconfigured, match=r"source events: secret is .SHOP_SECRET.*; export SHOP_SECRET"):
        check(described, config, {})


def test_a_table_whose_file_is_not_there_is_found_before_anything_starts(tmp_path: Path) -> None:
    app = Pipeline("ads")
    app.static("campaigns", str(tmp_path / "campaigns.csv"), schema="ad STRING")
    config = Config.read(tmp_path, environ={})
    with pytest.raises(Misconfigured, match=r"table campaigns: there is no file .*campaigns.csv; put it beside"):
        check(app.describe(), config)
    (tmp_path / "campaigns.csv").touch()
    check(app.describe(), config)


def levels(made: Pipeline) -> list[tuple[Level, str]]:
    return [(finding.level, finding.place) for finding in unconnected(made.describe())]


def test_a_source_that_nothing_reads_is_a_warning_until_a_store_or_a_query_reads_it() -> None:
    made = Pipeline("app")
    made.source("ws://host/path", into="rsvps")
    assert levels(made) == [(Level.WARNING, "source rsvps")]
    made.store("rsvps", "redis://")
    assert levels(made) == []


def test_a_channel_that_nothing_fills_is_a_warning() -> None:
    made = Pipeline("app")
    made.channel("rsvps", schema="city STRING")
    made.channel("unused")
    made.sql_query("by_city", key="city", sql="SELECT city, seen() FROM rsvps GROUP BY city")
    assert levels(made) == [(Level.WARNING, "channel rsvps"), (Level.WARNING, "channel unused")]


def test_both_at_once_are_an_error_that_names_the_other_channel() -> None:
    made = Pipeline("app")
    made.channel("rsvps", schema="city STRING")
    made.source("ws://host/path", into="rsvp")
    made.sql_query("by_city", key="city", sql="SELECT city, seen() FROM rsvps GROUP BY city")
    found = unconnected(made.describe())
    assert [(one.level, one.place) for one in found] == [
        (Level.ERROR, "source rsvp"),
        (Level.ERROR, "channel rsvps"),
    ]
    assert '"rsvps"' in found[0].fix
