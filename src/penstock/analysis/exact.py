"""JSON that Spark has written, read without losing a digit. No I/O."""

import json
from decimal import Decimal
from typing import Any

_LEAST, _MOST = -(2**63), 2**64 - 1


def exactly(text: str) -> Any:
    """What a JSON text says; a number that no reader of JSON would tell as it is, such as a long decimal, is a text."""
    return json.loads(text, parse_int=_whole, parse_float=_fraction)


def _whole(text: str) -> int | str:
    # Python refuses to read very long ones; Spark's have 38 digits at most.
    number = Decimal(text)
    return int(text) if _LEAST <= number <= _MOST else text


def _fraction(text: str) -> float | str:
    number = float(text)
    return number if Decimal(text) == Decimal(repr(number)) else text
