from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, DoubleType, IntegerType, MapType, StringType, StructType

from penstock import Keyed, ListState, MapState, ValueState
from penstock.analysis.operators.variables import Columns, Maps, names
from penstock.testing.keyed import keyed

KNOWN = StructType().add("city", StringType()).add("times", IntegerType()).add("share", DoubleType())


class Kept(Keyed):
    """Gives what its functions say of its state, one after the other."""

    pair = ValueState("city STRING, times INT")
    single = ValueState("STRING")
    some = ListState("n INT")
    by_city = MapState("city STRING", "times INT")
    by_both = MapState("city STRING, year INT", "times INT, share DOUBLE")
    schema = "said STRING"

    def process(self, key: Any, row: Any) -> Any:
        return [(row.do(self),)]


def said(*steps: Any) -> list[Any]:
    driver = keyed(Kept)
    return [driver.feed("key", {"do": step})[0]["said"] for step in steps]


def test_a_value_of_one_column_is_plain_and_one_of_several_a_row() -> None:
    assert said(
        lambda one: (one.single.get(), one.single.get("none"), bool(one.single)),
        lambda one: one.single.set("Oslo"),
        lambda one: (one.single.get(), bool(one.single)),
        lambda one: one.pair.set(city="Rome", times=2),
        lambda one: (one.pair.get(), one.pair.get().times),
        lambda one: one.pair.set(("Bonn", 3)),
        lambda one: one.pair.get().city,
        lambda one: one.pair.clear(),
        lambda one: one.pair.get(),
    ) == [(None, "none", False), None, ("Oslo", True), None, (Row(city="Rome", times=2), 2), None, "Bonn", None, None]


def test_a_list_is_gone_through_as_it_was() -> None:
    assert said(
        lambda one: one.some.extend([1, 2]),
        lambda one: one.some.append(3),
        lambda one: [one.some.append(n * 10) for n in one.some] and list(one.some),
        lambda one: (len(one.some), bool(one.some), sum(one.some)),
        lambda one: one.some.set([7]),
        lambda one: list(one.some),
        lambda one: one.some.set([]),
        lambda one: (list(one.some), len(one.some), bool(one.some)),
    ) == [None, None, [1, 2, 3, 10, 20, 30], (6, True, 66), None, [7], None, ([], 0, False)]


def test_a_map_is_used_as_a_dict() -> None:
    def fill(one: Kept) -> None:
        one.by_city["Oslo"] = 1
        one.by_city["Rome"] = 2
        one.by_both["Rome", 2026] = {"times": 1, "share": 0.5}

    def drop(one: Kept) -> None:
        for city in one.by_city:
            del one.by_city[city]

    assert said(
        fill,
        lambda one: (one.by_city["Oslo"], one.by_city.get("Bonn", 0), "Rome" in one.by_city, "Bonn" in one.by_city),
        lambda one: (one.by_city.keys(), one.by_city.values(), one.by_city.items(), len(one.by_city)),
        lambda one: (list(one.by_both), one.by_both["Rome", 2026].share),
        drop,
        lambda one: (bool(one.by_city), bool(one.by_both)),
    ) == [
        None,
        (1, 0, True, False),
        (["Oslo", "Rome"], [1, 2], [("Oslo", 1), ("Rome", 2)], 2),
        ([Row(city="Rome", year=2026)], 0.5),
        None,
        (False, True),
    ]
    for missing in (lambda one: one.by_city["Bonn"], lambda one: one.by_city.__delitem__("Bonn")):
        with pytest.raises(KeyError, match="Bonn"):
            said(missing)


def test_a_variable_cannot_be_replaced_and_is_there_only_while_something_is_handled() -> None:
    with pytest.raises(AttributeError, match=r"single cannot be assigned"):
        said(lambda one: setattr(one, "single", "Oslo"))
    with pytest.raises(AttributeError, match=r"only in process\(\) and on_timer\(\)"):
        _ = Kept().single


def test_a_value_of_another_type_is_refused_with_its_place() -> None:
    """Spark would take it for null, and say nothing."""
    columns = Columns("Approve.last", KNOWN)
    assert columns.to_spark({"city": "Oslo", "times": 1, "share": 2}) == ("Oslo", 1, 2.0)
    with pytest.raises(ValueError, match=r"^Approve\.last: .*times.*'x'"):
        columns.to_spark(("Oslo", "x", 0.5))


def test_a_map_or_a_struct_that_stands_alone_is_set_by_its_value() -> None:
    counts = StructType().add("counts", MapType(StringType(), IntegerType()))
    columns = Columns("Keyed.counts", counts)
    for value, row in (
        ({"a": 1}, ({"a": 1},)),
        ({"a": 1, "b": 2}, ({"a": 1, "b": 2},)),
        ({}, ({},)),
        ({"counts": {"a": 1}}, ({"a": 1},)),
        ({"counts": None}, (None,)),
    ):
        assert columns.to_spark(value) == row
    assert columns.from_spark(({"a": 1},)) == {"a": 1}
    assert Columns("Keyed.known", StructType().add("known", KNOWN)).to_spark({"city": "Oslo"}) == ({"city": "Oslo"},)
    with pytest.raises(ValueError, match='has no column "a"; it has counts'):
        columns.named({"a": 1})


def test_maps_in_a_record_are_dicts_at_any_depth() -> None:
    inner = MapType(StringType(), IntegerType())
    schema = StructType().add("n", IntegerType()).add("counts", inner)
    schema = schema.add("deep", ArrayType(StructType().add("x", MapType(StringType(), inner)).add("y", StringType())))
    deep = [{"x": [("k", [("a", 1)])], "y": "z"}, None]
    read = Maps(schema).read(Row(n=1, counts=[("a", 1), ("b", None)], deep=deep))
    assert read == Row(n=1, counts={"a": 1, "b": None}, deep=[{"x": {"k": {"a": 1}}, "y": "z"}, None])
    assert read.counts["a"] == 1
    assert Maps(schema).read(Row(n=1, counts=None, deep=None)) == Row(n=1, counts=None, deep=None)


def test_the_names_of_columns_are_read_without_spark() -> None:
    assert names("city STRING, at TIMESTAMP") == ("city", "at")
    assert names("`a, b` STRING NOT NULL, price DECIMAL(9,2), s STRUCT<x: INT, y: MAP<STRING, INT>>") == (
        "a, b",
        "price",
        "s",
    )
    assert names("a: INT, b: INT") == ("a", "b")
    assert names("BIGINT") == names("ARRAY<STRUCT<x: INT, y: INT>>") == names("DECIMAL(9, 2)") == ("value",)
    for wrong in ("", "a INT,", ", ", "a INT, 7"):
        with pytest.raises(ValueError, match="has no columns"):
            names(wrong)
