import orjson
import pytest

from penstock.analysis.exact import exactly


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        (f"{2**64 - 1}", 2**64 - 1),
        (f"{-(2**63)}", -(2**63)),
        (f"{2**64}", f"{2**64}"),
        (f"{-(2**63) - 1}", f"{-(2**63) - 1}"),
        ("1.5", 1.5),
        ("1.0E10", 1e10),
        ("0.10", 0.1),
        ("1E-7", 1e-7),
        ("1E400", "1E400"),
        ("12345678901234567890.123456789", "12345678901234567890.123456789"),
        ("99999999999999.999", "99999999999999.999"),
    ],
)
def test_a_number_is_told_to_the_last_digit(text: str, value: object) -> None:
    assert exactly(text) == value
    assert exactly(f'{{"a": [{text}]}}') == {"a": [value]}
    assert orjson.loads(orjson.dumps(exactly(text))) == value
