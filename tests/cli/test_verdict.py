from io import StringIO

import pytest
from rich.console import Console

from penstock.audit.updates import Update
from penstock.audit.verify import Verifier
from penstock.cli.verdict import show
from penstock.testing.clock import ManualClock

EPOCH = 1_794_764_958_116_230


def shown(sender: str, last: int, width: int) -> list[str]:
    verifier = Verifier(ManualClock())
    for seq in (last - 1, last):
        verifier.take(Update(seq, sender, EPOCH, 0), None)
    screen = Console(file=StringIO(), width=width)
    show(verifier.end(), screen)
    assert isinstance(screen.file, StringIO)
    return screen.file.getvalue().splitlines()


@pytest.mark.parametrize("sender", ["sender", "a.rather.long.name"])
def test_names_and_numbers_are_whole_on_a_narrow_terminal(sender: str) -> None:
    told = shown(sender, 12_345, 80)
    row = next(at for at, line in enumerate(told) if str(EPOCH) in line)
    assert told[row].split()[1:] == [str(EPOCH), "2", "12344", "12345", "0", "0", "0"]
    # A long name goes on in the line below.
    assert "".join(line.split()[0] for line in told[row : row + 2] if line.strip()) == sender
    assert all(len(line) <= 80 for line in told[: row + 2])


def test_a_table_that_does_not_fit_at_all_is_wider_than_the_terminal() -> None:
    (row,) = [line.split() for line in shown("sender", 12_345, 40) if str(EPOCH) in line]
    assert row == ["sender", str(EPOCH), "2", "12344", "12345", "0", "0", "0"]
