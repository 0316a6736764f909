from datetime import timedelta
from pathlib import Path

import pytest

from penstock.core.clock import Duration
from penstock.core.errors import Misconfigured
from penstock.core.settings import Section, load


class Kafka(Section):
    servers: str = ""
    brokers: int = 1
    compression: str = "lz4"


class Stores(Section):
    ttl: Duration = timedelta(days=1)


SECTIONS: dict[str, type[Section]] = {"kafka": Kafka, "stores": Stores}


def settings(folder: Path, text: str = "", profile: str | None = None, **environ: str) -> dict[str, Section]:
    (folder / "penstock.toml").write_text(text, encoding="utf-8")
    return load(SECTIONS, folder, profile, environ)


def test_without_a_file_everything_has_its_default(tmp_path: Path) -> None:
    assert load(SECTIONS, tmp_path, environ={}) == {"kafka": Kafka(), "stores": Stores()}


def test_the_environment_stands_over_the_profile_and_the_profile_over_the_file(tmp_path: Path) -> None:
    text = """
        [kafka]
        servers = "file"
        brokers = 2
        compression = "zstd"
        [profiles.big.kafka]
        servers = "profile"
        brokers = 3
    """
    expected = Kafka(servers="environment", brokers=3, compression="zstd")
    assert settings(tmp_path, text, "big", PENSTOCK_KAFKA_SERVERS="environment")["kafka"] == expected
    chosen = settings(tmp_path, text, PENSTOCK_PROFILE="big", PENSTOCK_KAFKA_SERVERS="environment")
    assert chosen["kafka"] == expected
    assert settings(tmp_path, text)["kafka"] == Kafka(servers="file", brokers=2, compression="zstd")


def test_a_duration_is_written_as_text(tmp_path: Path) -> None:
    assert settings(tmp_path, '[stores]\nttl = "10 minutes"')["stores"] == Stores(ttl=timedelta(minutes=10))
    assert settings(tmp_path, PENSTOCK_STORES_TTL="2h")["stores"] == Stores(ttl=timedelta(hours=2))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[kafka]\ncompresion = "lz4"',
            'penstock.toml, [kafka]: "compresion" is not a setting; did you mean "compression"?',
        ),
        (
            "[kafka]\ncolour = 1",
            'penstock.toml, [kafka]: "colour" is not a setting; the settings are brokers, compression, servers',
        ),
        ("[kafak]", 'penstock.toml: "kafak" is not a table; did you mean "kafka"?'),
        (
            '[kafka]\nbrokers = "many"',
            "penstock.toml, [kafka]: \"brokers\" is 'many'; Input should be a valid integer",
        ),
        ('[stores]\nttl = "soon"', 'penstock.toml, [stores]: "ttl" is \'soon\'; "soon" is not a duration'),
        ("[stores]\nttl = '9999999999999 days'", 'penstock.toml, [stores]: "ttl" is '),
        ("kafka = 1", "penstock.toml, [kafka]: this has to be a table"),
        ("[kafka", "penstock.toml: it is not TOML: "),
        ("profiles = 1", "penstock.toml, [profiles]: this has to be a table"),
    ],
)
def test_a_wrong_file_is_answered_with_the_place_and_the_fix(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        settings(tmp_path, text)
    assert str(caught.value).startswith(sentence)


def test_a_file_that_is_not_text_is_answered_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(Misconfigured, match=r"^penstock\.toml: it is not TOML"):
        load(SECTIONS, tmp_path, environ={})


def test_a_folder_in_place_of_the_file_is_answered_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").mkdir()
    with pytest.raises(Misconfigured, match=r"^penstock\.toml: it cannot be read"):
        load(SECTIONS, tmp_path, environ={})


@pytest.mark.parametrize(
    ("text", "profile", "sentence"),
    [
        ("[profiles.big]", "bug", 'penstock.toml: there is no profile "bug"; did you mean "big"?'),
        ("", "big", 'penstock.toml: there is no profile "big"; there are no profiles'),
        (
            "[profiles.big.kafak]",
            "big",
            'penstock.toml, [profiles.big]: "kafak" is not a table; did you mean "kafka"?',
        ),
        (
            "[profiles.big.kafka]\nbroker = 1",
            "big",
            'penstock.toml, profile big, [kafka]: "broker" is not a setting; did you mean "brokers"?',
        ),
        ("[profiles]\nbig = 1", "big", "penstock.toml, [profiles.big]: this has to be a table"),
    ],
)
def test_a_wrong_profile_is_answered_with_the_place(tmp_path: Path, text: str, profile: str, sentence: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        settings(tmp_path, text, profile)
    assert str(caught.value).startswith(sentence)


def test_an_unknown_variable_is_answered_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured) as caught:
        settings(tmp_path, PENSTOCK_KAFKA_BROKER="1")
    assert str(caught.value) == ('environment, PENSTOCK_KAFKA_*: "broker" is not a setting; did you mean "brokers"?')


def test_a_wrong_variable_is_answered_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"^environment, \[kafka\]: \"brokers\" is 'many'"):
        settings(tmp_path, "[kafka]\nbrokers = 2", PENSTOCK_KAFKA_BROKERS="many")


def test_a_secret_that_is_wrong_is_not_shown(tmp_path: Path) -> None:
    class Audit(Section):
        secret: int = 0
        webhook: int = 0

    text = '[audit]\nsecret = "hush"\n', '[audit]\nwebhook = "https://ada:hush@h/?token=hush"\n'
    for one in text:
        (tmp_path / "penstock.toml").write_text(one)
        with pytest.raises(Misconfigured) as told:
            load({"audit": Audit}, tmp_path, environ={})
        assert "hush" not in str(told.value)
