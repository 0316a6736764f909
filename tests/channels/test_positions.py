"""What a reader is told that stands where nothing is."""

from collections.abc import Callable

import pytest

from penstock.channels.positions import beyond, overtaken
from penstock.core.errors import Unaccounted


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (overtaken, "x: partition 2 is to be read from 5, and begins at 9: .* 4 offsets are gone"),
        (beyond, "x: partition 2 is to be read from 5, and ends at 9: it is another channel"),
    ],
)
def test_what_is_not_there_is_told_with_its_numbers(
    error: Callable[[str, int, int, int], Unaccounted], words: str
) -> None:
    with pytest.raises(Unaccounted, match=words):
        raise error("x", 2, 5, 9)
