"""What people write, and what the gateway reads: addresses, and JSON that is taken part by part."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

from tests.fuzz.target import Given, target, tried

from penstock.collect.registry import SCHEMES, source_at
from penstock.core.errors import Misconfigured
from penstock.gateway.records import JsonReader, Part

_SCHEMES = sorted(SCHEMES)
# They are imported when they are asked for; that would be too late to be watched.
for _way in SCHEMES.values():
    importlib.import_module(_way.partition(":")[0])


@target(*(bytes([number]) + b"127.0.0.1:8700/in" for number in range(len(_SCHEMES))), b"\x02[::1", b"\x03a@b:70000?c#d")
def addresses(data: bytes) -> None:
    """An address leads to a source, or the user hears what is wrong with it."""
    given = Given(data)
    address = f"{given.among(_SCHEMES)}://{given.rest().decode(errors='replace')}"
    source = tried(lambda: source_at(address, "rsvps"), Misconfigured)
    if isinstance(source, Misconfigured):
        return
    assert source.name == "rsvps"
    assert source.description
    assert source.guarantee


@target(b'{"a": [1, {"b": null}], "c": "\\u00e4"}', b'{"a": 1, "a": 2}', b"[1,]", b" [ ] ", b'{"a":1e400}', b"[NaN]")
def scanning(data: bytes) -> None:
    """Whoever walks over a text takes the parts that it has, each as it stands; or it is not JSON."""
    text = data.decode(errors="replace")
    try:
        expected = json.loads(text, object_pairs_hook=_once, parse_constant=_none)
    except (ValueError, RecursionError):
        expected = None
    found = tried(lambda: _walked(text), json.JSONDecodeError)
    if isinstance(found, json.JSONDecodeError):
        assert 0 <= found.pos <= len(text)
        # Names that are there twice are told of the object that is walked over, not of those within.
        assert not isinstance(expected, dict | list)
    else:
        told = json.loads(text)
        assert found == told
        assert isinstance(found, dict) == isinstance(told, dict)


def _walked(text: str) -> dict[str, Any] | list[Any]:
    reader = JsonReader(text)
    found = dict(_members(reader, text)) if text.lstrip(" \t\r\n").startswith("{") else list(_items(reader, text))
    reader.end()
    return found


def _members(reader: JsonReader, text: str) -> Iterator[tuple[str, Any]]:
    for name in reader.members():
        yield name, _value(reader.part(), text)


def _items(reader: JsonReader, text: str) -> Iterator[Any]:
    for index in reader.items():
        assert index >= 0
        yield _value(reader.part(), text)


def _value(part: Part, text: str) -> Any:
    assert part.text in text
    assert json.loads(part.text) == part.value
    return part.value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _none(word: str) -> Any:
    raise ValueError(word)
