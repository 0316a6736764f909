"""Addresses of sources, and the JSON scanner of the gateway."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

from tests.fuzz.target import Input, result_or_error, target

from penstock.collect.registry import SCHEMES, source_at
from penstock.core.errors import Misconfigured
from penstock.gateway.records import JsonReader, Part

_SCHEMES = sorted(SCHEMES)
# Imported here: the fuzzer instruments a module only if it is imported with the target.
for _module in SCHEMES.values():
    importlib.import_module(_module.partition(":")[0])


@target(*(bytes([number]) + b"127.0.0.1:8700/in" for number in range(len(_SCHEMES))), b"\x02[::1", b"\x03a@b:70000?c#d")
def addresses(data: bytes) -> None:
    """An address gives a source, or Misconfigured."""
    inputs = Input(data)
    address = f"{inputs.choose(_SCHEMES)}://{inputs.rest().decode(errors='replace')}"
    source = result_or_error(lambda: source_at(address, "rsvps"), Misconfigured)
    if isinstance(source, Misconfigured):
        return
    assert source.name == "rsvps"
    assert source.description
    assert source.guarantee


@target(b'{"a": [1, {"b": null}], "c": "\\u00e4"}', b'{"a": 1, "a": 2}', b"[1,]", b" [ ] ", b'{"a":1e400}', b"[NaN]")
def json_scanner(data: bytes) -> None:
    """The scanner gives the parts of a JSON text unchanged, or Unreadable."""
    text = data.decode(errors="replace")
    try:
        expected = json.loads(text, object_pairs_hook=_once, parse_constant=_none)
    except (ValueError, RecursionError):
        expected = None
    found = result_or_error(lambda: _scanned(text), json.JSONDecodeError)
    if isinstance(found, json.JSONDecodeError):
        assert 0 <= found.pos <= len(text)
        # Duplicate names are an error only in the outer object.
        assert not isinstance(expected, dict | list)
    else:
        document = json.loads(text)
        assert found == document
        assert isinstance(found, dict) == isinstance(document, dict)


def _scanned(text: str) -> dict[str, Any] | list[Any]:
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
        raise ValueError("duplicate name")
    return dict(pairs)


def _none(word: str) -> Any:
    raise ValueError(word)
