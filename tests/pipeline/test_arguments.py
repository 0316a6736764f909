from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import ClassVar, NamedTuple, NotRequired, Optional, TypedDict

import pytest
from pydantic import BaseModel

from penstock.core.errors import Misconfigured
from penstock.pipeline.arguments import ddl


@dataclass
class Venue:
    lat: float
    name: str | None


@dataclass
class Order:
    number: int
    price: Decimal
    at: datetime
    day: date
    paid: bool
    seal: bytes
    place: Venue
    tags: list[str]
    places: list[Venue]
    counts: dict[str, int]
    note: str | None
    old: Optional[str]  # noqa: UP045 (both spellings are accepted)
    kind: str = "plain"
    extra: list[str] = field(default_factory=list)


def columns(schema: type) -> dict[str, str]:
    """The types by name; no type here holds a comma and a backtick outside of its brackets."""
    found, depth, start = [], 0, 0
    text = ddl(schema)
    for index, sign in enumerate(text):
        depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(sign, 0)
        if sign == "," and depth == 0:
            found.append(text[start:index])
            start = index + 1
    found.append(text[start:])
    return {name: kind for _, name, kind in (column.split("`", 2) for column in found)}


def test_ddl_stays_as_it_is() -> None:
    assert ddl("a BIGINT, b STRING") == "a BIGINT, b STRING"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("number", "BIGINT NOT NULL"),
        ("price", "DECIMAL(38,18) NOT NULL"),
        ("at", "TIMESTAMP NOT NULL"),
        ("day", "DATE NOT NULL"),
        ("paid", "BOOLEAN NOT NULL"),
        ("seal", "BINARY NOT NULL"),
        ("place", "STRUCT<`lat`: DOUBLE, `name`: STRING> NOT NULL"),
        ("tags", "ARRAY<STRING> NOT NULL"),
        ("places", "ARRAY<STRUCT<`lat`: DOUBLE, `name`: STRING>> NOT NULL"),
        ("counts", "MAP<STRING, BIGINT> NOT NULL"),
    ],
)
def test_a_field_becomes_a_column(name: str, kind: str) -> None:
    assert columns(Order)[name] == f" {kind}"


@pytest.mark.parametrize("name", ["note", "old", "kind", "extra"])
def test_a_field_that_may_be_none_or_has_a_default_may_be_absent(name: str) -> None:
    assert "NOT NULL" not in columns(Order)[name]


@dataclass(slots=True)
class Slotted:
    items: bool
    why: str = ""


class Tuple(NamedTuple):
    items: bool
    why: str = ""


class Keys(TypedDict):
    items: bool
    why: NotRequired[str]


class Model(BaseModel):
    items: bool
    why: str = ""


class Plain:
    LIMIT: ClassVar[int] = 3
    items: bool
    why: str = ""


@pytest.mark.parametrize("schema", [Slotted, Tuple, Keys, Model, Plain])
def test_every_kind_of_class_tells_what_may_be_absent(schema: type) -> None:
    assert ddl(schema) == "`items` BOOLEAN NOT NULL, `why` STRING"


def test_a_class_without_fields_is_refused() -> None:
    class Empty:
        pass

    with pytest.raises(Misconfigured, match=r"^schema Empty: it has no annotated field; write fields such as `guests"):
        ddl(Empty)


@dataclass
class Odd:
    ways: complex


@dataclass
class Deep:
    inner: Odd


@dataclass
class Numbered:
    names: dict[int, str]


@dataclass
class Either:
    which: int | str


@pytest.mark.parametrize(
    ("schema", "location"),
    [
        (Odd, "Odd.ways"),
        (Deep, "Odd.ways"),
        (Numbered, "Numbered.names"),
        (Either, "Either.which"),
    ],
)
def test_a_type_that_no_column_has_is_refused_with_its_field_and_the_ones_that_are_known(
    schema: type, location: str
) -> None:
    with pytest.raises(Misconfigured) as caught:
        ddl(schema)
    assert caught.value.location == f"schema {location}"
    assert caught.value.fix.startswith("use int, float, str, bool, bytes, datetime, date, Decimal, list[…]")
