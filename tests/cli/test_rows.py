import json

import pytest

from penstock.cli.rows import Shown


@pytest.mark.parametrize(
    ("row", "keys", "text"),
    [
        ({"city": "Oslo", "n": 3}, (), "city=Oslo, n=3"),
        ({"city": "Oslo", "n": 3, "x": None}, ("city",), "Oslo → n=3, x=null"),
        ({"n": 3, "city": "Oslo", "ok": True}, ("city", "ok"), "Oslo, true → n=3"),
        ({"city": "Oslo"}, ("city",), "Oslo → "),
        (
            {"window": {"start": "2026-11-15T10:00:00.000Z", "end": "2026-11-15T10:00:10.500Z"}, "n": 1},
            ("window",),
            "2026-11-15T10:00:00Z – 2026-11-15T10:00:10.500Z → n=1",
        ),
        ({"a": {"b": [1, "x"]}, "f": 1.5}, (), 'a={"b":[1,"x"]}, f=1.5'),
        ({"n": 10**30, "a": [10**30]}, (), f'n={10**30}, a=["{10**30}"]'),
        ({"a\n": "red \x1b[31m\nand\u202e"}, (), "a\\n=red \\x1b[31m\\nand\\u202e"),
    ],
)
def test_a_row_is_a_line(row: dict[str, object], keys: tuple[str, ...], text: str) -> None:
    assert Shown().line(json.dumps(row), keys).decode() == text + "\n"


def test_json_stays_as_it_is() -> None:
    assert Shown(as_json=True, terminal=True).line('{"a":1}', ("a",)) == b'{"a":1}\n'


def test_a_wide_row_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    row = json.dumps({"x": "寿司寿司寿司"})
    assert Shown(terminal=True).line(row).decode() == "x=寿司寿 …\n"
    assert Shown(terminal=True).line('{"x": "12345678"}').decode() == "x=12345678\n"
    assert Shown().line(row).decode() == "x=寿司寿司寿司\n"
