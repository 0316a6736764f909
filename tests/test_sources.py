"""`penstock.sources` has a class for each address scheme, and no other classes."""

import importlib

import pytest

from penstock import Pipeline, sources
from penstock.collect.registry import SCHEMES, source_at


def test_each_scheme_has_its_class_and_each_class_a_scheme() -> None:
    classes = set()
    for factory in SCHEMES.values():
        module, _, name = factory.partition(":")
        classes.add(getattr(importlib.import_module(module), name))
    assert {getattr(sources, name) for name in sources.__all__} == classes


def test_a_source_object_is_the_same_as_its_address() -> None:
    made = sources.SSE("sse+http://host/events", "events", max_size=5)
    by_address = source_at("sse+http://host/events", "events", {"max_size": 5})
    assert type(by_address) is sources.SSE
    assert (made.url, made.name, made.max_size) == (by_address.url, by_address.name, by_address.max_size)


def test_a_pipeline_takes_a_source_object() -> None:
    app = Pipeline("shop")
    app.source(sources.WebSocket("ws://host/feed", "feed"), into="records")
    (source,) = app.describe().sources
    assert (source.name, source.into) == ("feed", "records")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Carrier"):
        sources.Carrier  # noqa: B018
