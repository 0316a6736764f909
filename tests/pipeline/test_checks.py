"""What does not fit is said before anything starts."""

from pathlib import Path

import pytest

from penstock.errors import Misconfigured
from penstock.pipeline.checks import check
from penstock.pipeline.description import Pipeline
from penstock.pipeline.wiring import Wiring


def app(source: str = "ws://host/path", store: str = "redis://", ttl: str | None = None) -> Pipeline:
    made = Pipeline("app")
    made.source(source, into="rsvps")
    made.store("rsvps", store, ttl=ttl)
    return made


def test_what_fits_passes(tmp_path: Path) -> None:
    check(app().describe(), Wiring.read(tmp_path, environ={"PENSTOCK_SOURCES_RSVPS": "wss://other"}))


@pytest.mark.parametrize("address", ["kafka://", "kafka://broker:9092"])
def test_spark_audits_kafka(address: str, tmp_path: Path) -> None:
    environ = {"PENSTOCK_CHANNELS_ADDRESS": address, "PENSTOCK_AUDIT_ENGINE": "spark"}
    check(app().describe(), Wiring.read(tmp_path, environ=environ))


@pytest.mark.parametrize(
    ("made", "environ", "said"),
    [
        (
            app(),
            {"PENSTOCK_SOURCES_RSVPZ": "ws://x"},
            r'\[sources\]: app has no source "rsvpz"; did you mean "rsvps"\?',
        ),
        (app("ftp://x"), {}, r'source rsvps: ftp://x is no address that is known here; write "ws://…", "wss://…"'),
        (app(), {"PENSTOCK_SOURCES_RSVPS": "nowhere"}, r"source rsvps: nowhere is no address"),
        (app("simulate://tides"), {}, r'there is no simulation "tides"; there is rsvps'),
        (app(store="mysql://x"), {}, r'store mysql://x: mysql://x is no address that is known here; write "redis://…"'),
        (app(store="delta://x", ttl="1 day"), {}, r"store delta://x: a lake keeps everything"),
        (
            app(),
            {"PENSTOCK_CHANNELS_ADDRESS": "tcp://127.0.0.1:7070"},
            r"\[channels\] address = tcp://127.0.0.1:7070: the audit has to read records again .*; use kafka://, redis://",
        ),
        (
            app(),
            {"PENSTOCK_CHANNELS_ADDRESS": "memory://here"},
            r"\[channels\] address = memory://: each tier of a pipeline is a process of its own.*; use kafka://, redis://",
        ),
        (
            app(),
            {"PENSTOCK_CHANNELS_ADDRESS": "redis://", "PENSTOCK_AUDIT_ENGINE": "spark"},
            r"\[audit\] engine: Spark audits Kafka, and the channels are at redis://local.*; use auto or python",
        ),
        (app(), {"PENSTOCK_CHANNELS_ADDRESS": "kafak://x"}, r'no binder knows this address; did you mean "kafka://"'),
    ],
)
def test_what_does_not_fit_is_said(made: Pipeline, environ: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=said):
        check(made.describe(), Wiring.read(tmp_path, environ=environ))


def test_a_table_whose_file_is_not_there_is_found_before_anything_starts(tmp_path: Path) -> None:
    app = Pipeline("ads")
    app.static("campaigns", str(tmp_path / "campaigns.csv"), schema="ad STRING")
    wiring = Wiring.read(tmp_path, environ={})
    with pytest.raises(Misconfigured, match=r"table campaigns: there is no file .*campaigns.csv; put it beside"):
        check(app.describe(), wiring)
    (tmp_path / "campaigns.csv").touch()
    check(app.describe(), wiring)
