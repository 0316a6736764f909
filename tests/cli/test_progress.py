import pytest

from penstock.cli.progress import Screen
from penstock.supervise.supervisor import Event, EventKind


def test_the_reason_of_a_restart_loop_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    for pid in range(3):
        screen.event(Event("audit", EventKind.DIED, pid, 2, lines=(f"started as {pid}", "penstock: the disk is full")))
    screen.event(Event("audit", EventKind.DIED, 9, 2, lines=("penstock: it is something else",)))
    said = capsys.readouterr().out
    assert said.count("audit died") == 4
    assert said.count("the disk is full") == 1
    assert said.count("it is something else") == 1
