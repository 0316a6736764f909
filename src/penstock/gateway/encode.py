"""Encodes entries as JSON. What does not fit the requested format is base64."""

import base64
from collections.abc import Iterable, Sequence

import orjson

from penstock.core.contracts import ChannelPartition, Entry
from penstock.core.record import Headers, Origin
from penstock.gateway.decode import IDENTITY, Format


def entry_json(entry: Entry, form: Format) -> dict[str, object]:
    """An entry as JSON. `base64` names the parts that are so, when the format alone does not tell."""
    origin = Origin.read(entry.headers)
    extra = [one for one in entry.headers if origin is None or one[0] not in IDENTITY]
    key, key_coded = _text(entry.key, form)
    value, value_coded = _value(entry.value, form)
    headers, headers_coded = _headers(extra, form)
    coded = {"key": key_coded, "value": value_coded, "headers": headers_coded}
    return {
        "channel": entry.channel,
        "partition": entry.partition,
        "offset": entry.offset,
        "appended": entry.appended,
        **({name: getattr(origin, name) for name in IDENTITY} if origin else {}),
        "key": key,
        "value": value,
        "headers": headers,
        **({"base64": [name for name, is_so in coded.items() if is_so]} if any(coded.values()) else {}),
    }


def size(entry: Entry) -> int:
    return len(entry.key or b"") + len(entry.value or b"") + sum(len(name) + len(told) for name, told in entry.headers)


def partitions(given: Iterable[ChannelPartition]) -> list[dict[str, object]]:
    return [{"channel": channel, "partition": partition} for channel, partition in given]


def _value(value: bytes | None, form: Format) -> tuple[object, bool]:
    if value is None or form is not Format.JSON:
        return _text(value, form)
    try:
        # A value that is the word null would look as if there were none.
        if orjson.loads(value) is not None:
            return orjson.Fragment(value), False
    except orjson.JSONDecodeError:
        pass
    return base64.b64encode(value).decode(), True


def _text(value: bytes | None, form: Format) -> tuple[str | None, bool]:
    """A text, and whether it is base64 although that was not asked for."""
    if value is None:
        return None, False
    if form is Format.BASE64:
        return base64.b64encode(value).decode(), False
    try:
        return value.decode(), False
    except UnicodeDecodeError:
        return base64.b64encode(value).decode(), True


def _headers(headers: Headers, form: Format) -> tuple[dict[str, object], bool]:
    told = [(name, *_text(value, form)) for name, value in headers]
    coded = any(is_so for _, _, is_so in told)
    if coded:
        told = [(name, *_text(value, Format.BASE64)) for name, value in headers]
    found: dict[str, list[str | None]] = {}
    for name, text, _ in told:
        found.setdefault(name, []).append(text)
    return {name: _one_or_all(texts) for name, texts in found.items()}, coded


def _one_or_all(texts: Sequence[str | None]) -> object:
    return texts[0] if len(texts) == 1 else texts
