"""Finds the binder for an address."""

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from penstock.channels.kafka.settings import KafkaSettings
from penstock.core.contracts import Channels
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean, redact_address

BINDERS = {
    "kafka": "penstock.channels.kafka:at",
    "redis": "penstock.channels.redis:at",
    "rediss": "penstock.channels.redis:at",
    "file": "penstock.channels.sqlite:at",
    "tcp": "penstock.channels.tcp:at",
    "memory": "penstock.channels.memory:at",
}
"""For each scheme of an address, the function that makes the binder. It is imported when it is used."""

OUTSIDE = "penstock.binders"
"""The entry points for binders of other packages."""


def bind(address: str, kafka: KafkaSettings | None = None) -> Channels:
    """The channels at an address; Misconfigured if its scheme is not known."""
    scheme, mark, rest = address.partition("://")
    scheme = scheme.lower() if mark else ""
    maker = _maker(address, scheme)
    try:
        return maker(f"{scheme}://{rest}", kafka or KafkaSettings())
    except ValueError as error:
        raise Misconfigured(
            f"channels at {redact_address(address)}", str(error), "check the spelling of the address"
        ) from error


def _maker(address: str, scheme: str) -> Callable[[str, KafkaSettings], Channels]:
    if scheme in BINDERS:
        module, _, name = BINDERS[scheme].partition(":")
        made: Callable[[str, KafkaSettings], Channels] = getattr(importlib.import_module(module), name)
        return made
    for point in entry_points(group=OUTSIDE, name=scheme):
        loaded: Callable[[str, KafkaSettings], Channels] = point.load()
        return loaded
    schemes = sorted({*BINDERS, *(point.name for point in entry_points(group=OUTSIDE))})
    others = f"an address begins with {', '.join(f'{name}://' for name in schemes)}"
    fix = did_you_mean(scheme, schemes, others, '"{}://"')
    raise Misconfigured(f"channels at {redact_address(address)}", "no binder knows this address", fix)
