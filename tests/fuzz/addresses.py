"""Addresses of sources, and JSON values that are sent to the gateway."""

import importlib
import json

from tests.fuzz.target import Input, result_or_error, target

from penstock.collect.registry import SCHEMES, source_at
from penstock.core.errors import Misconfigured
from penstock.gateway.records import Decoder, Format
from penstock.gateway.settings import GatewaySettings
from penstock.web.responses import Problem

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


@target(
    b'{"a": [1, {"b": null}], "c": "\\u00e4"}', b'{"a": 1, "a": 2}', b"[1,]", b" [ ] ", b'{"a":1e400}', b"[NaN]", b"-0"
)
def gateway_values(data: bytes) -> None:
    """The gateway stores a JSON value without a change, or refuses the body."""
    decoder = Decoder(GatewaySettings(), lambda: 0)
    found = result_or_error(lambda: decoder.document(b'{"records": [{"value": %b}]}' % data, Format.JSON), Problem)
    result_or_error(lambda: decoder.lines(data, Format.JSON), Problem)
    if isinstance(found, Problem):
        assert found.status in (400, 413)
        return
    try:
        sent = _exact(data)
    except (ValueError, RecursionError):
        return  # It was not one value.
    (record,) = found
    assert sent == (None if record.value is None else _exact(record.value))


def _exact(text: bytes) -> object:
    """A document with all digits of its numbers."""
    return json.loads(text.decode(), parse_float=lambda number: ("number", number))
