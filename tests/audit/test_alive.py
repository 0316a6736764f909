"""Whether a process is there."""

import pytest

from penstock.audit.alive import SILENT_AFTER, alive


@pytest.mark.parametrize(
    ("at", "there"),
    [
        (100, True),
        (99.5, True),
        (100 - SILENT_AFTER, True),
        (99 - SILENT_AFTER, False),
        (None, False),
        ("100", False),
    ],
)
def test_a_process_is_there_until_it_has_been_silent_for_too_long(at: object, there: bool) -> None:
    assert alive(at, 100) is there
