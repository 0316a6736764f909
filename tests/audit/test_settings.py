"""What can be set about the audit."""

from datetime import timedelta
from pathlib import Path

import pytest

from penstock.audit.settings import AuditSettings
from penstock.core.errors import Misconfigured
from penstock.core.settings import load


def loaded(folder: Path, **values: str) -> AuditSettings:
    environ = {f"PENSTOCK_AUDIT_{key.upper()}": value for key, value in values.items()}
    section = load({"audit": AuditSettings}, folder, environ=environ)["audit"]
    assert isinstance(section, AuditSettings)
    return section


def test_nothing_has_to_be_set(tmp_path: Path) -> None:
    settings = loaded(tmp_path)
    assert (settings.engine, settings.behind, settings.grace) == ("auto", 200_000, timedelta(seconds=10))
    assert (settings.webhook, settings.key()) == ("", b"")


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("engine", "java", "'auto', 'python' or 'spark'"),
        ("behind", "0", "greater than or equal to 1"),
        ("silent_after", "0 s", "greater than 0 seconds"),
        ("grace", "-1 s", "not a duration"),
        ("stalled_after", "soon", "not a duration"),
        ("refused_share", "5", "less than or equal to 1"),
        ("refused_share", "nan", "finite number"),
        ("webhook", "example.org/alarms", "give an address such as"),
        ("webhook", "file:///etc/passwd", "give an address such as"),
        ("webhook", "http:///alarms", "give an address such as"),
        ("webhook", "http://example.org:0/", "give an address such as"),
        ("webhook", "http://example.org:99999/", "Port out of range"),
        ("webhook", "http://example.org/\r\nx: y", "in ASCII, without spaces"),
        ("webhook", "http://exämple.org/", "in ASCII, without spaces"),
        ("webhook", "http://user:password@example.org/", "leave out user and password"),
    ],
)
def test_a_wrong_value_is_answered_with_its_place_and_a_hint(tmp_path: Path, key: str, value: str, hint: str) -> None:
    with pytest.raises(Misconfigured, match=hint) as wrong:
        loaded(tmp_path, **{key: value})
    assert wrong.value.location == "environment, [audit]"


def test_every_setting_says_what_it_sets() -> None:
    assert all(field.description for field in AuditSettings.model_fields.values())


def test_a_standard_secret_is_base64(tmp_path: Path) -> None:
    assert loaded(tmp_path, secret="whsec_cGVuc3RvY2s=").key() == b"penstock"


def test_any_other_secret_is_taken_as_it_is(tmp_path: Path) -> None:
    assert loaded(tmp_path, secret="öffne dich").key() == "öffne dich".encode()


@pytest.mark.parametrize("secret", ["whsec_not base64", "whsec_====", "whsec_ü"])
def test_a_broken_secret_is_told_without_showing_it(tmp_path: Path, secret: str) -> None:
    settings = loaded(tmp_path, secret=secret)
    with pytest.raises(Misconfigured, match="not base64") as wrong:
        settings.key()
    assert secret not in str(wrong.value)


def test_the_secret_is_not_shown_with_the_settings(tmp_path: Path) -> None:
    assert "open sesame" not in repr(loaded(tmp_path, secret="open sesame"))
