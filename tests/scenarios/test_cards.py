"""Card transactions: a fraud is rare, has its pattern, and is told by its label alone."""

from collections import defaultdict
from math import log
from statistics import mean, stdev
from typing import Any

import orjson
import pytest
from cards import CARDS, FAR, Cards, kilometres

from penstock.simulate.rsvps import CITIES

START = 1_700_000_000_000_000
SENDERS = 20
PLACES = {city.name: city for city in CITIES}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    cards = Cards(seed=7)
    return [orjson.loads(cards.document(n % SENDERS, n // SENDERS + 1, START + n * 5_000)) for n in range(60_000)]


def bursts(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The frauds of each sender and block of 64 numbers."""
    gathered = defaultdict(list)
    for document in found:
        if document["label"] == "fraud":
            sender, number = map(int, document["transaction"].split("-"))
            gathered[sender, (number - 1) // 64].append(document)
    return list(gathered.values())


def homes(found: list[dict[str, Any]]) -> dict[str, str]:
    """Per card that is used often enough to know, where most of its honest transactions are."""
    cities: dict[str, list[str]] = defaultdict(list)
    for document in found:
        if document["label"] == "ok":
            cities[document["card"]].append(document["city"])
    return {card: max(set(there), key=there.count) for card, there in cities.items() if len(there) >= 5}


def test_a_document_has_the_shape_of_a_transaction(found: list[dict[str, Any]]) -> None:
    for document in found:
        assert list(document) == [
            "transaction", "card", "amount", "category", "merchant", "city", "country", "lat", "lon", "at", "label",
        ]  # fmt: skip
        assert document["amount"] > 0
        assert 0 <= int(document["card"][1:]) < CARDS
        city = PLACES[document["city"]]
        assert city.country == document["country"]
        assert abs(document["lat"] - city.lat) < 0.2
        assert document["label"] in ("ok", "fraud")
    assert len({document["transaction"] for document in found}) == len(found)


def test_fraud_is_rare(found: list[dict[str, Any]]) -> None:
    assert 0.002 < sum(document["label"] == "fraud" for document in found) / len(found) < 0.008


def test_a_fraud_is_a_burst_on_one_card_of_small_amounts_and_then_large_ones(found: list[dict[str, Any]]) -> None:
    assert len(bursts(found)) > 20
    for burst in bursts(found)[:-20]:  # The last ones may be cut off by the end.
        assert len({(document["card"], document["city"]) for document in burst}) == 1
        assert 5 <= len(burst) <= 9
        large = [document["amount"] > 50 for document in burst]
        assert large == sorted(large)
        assert sum(large) >= 2
        assert sum(not one for one in large) >= 3
        assert burst[-1]["at"] - burst[0]["at"] < 3_000


def test_a_fraud_happens_far_away_from_the_home_of_its_card(found: list[dict[str, Any]]) -> None:
    known = homes(found)
    checked = 0
    for burst in bursts(found):
        if home := known.get(burst[0]["card"]):
            assert kilometres(PLACES[home], PLACES[burst[0]["city"]]) >= FAR
            checked += 1
    assert checked > 10


def test_no_single_field_gives_it_away(found: list[dict[str, Any]]) -> None:
    honest = [document for document in found if document["label"] == "ok"]
    known = homes(found)
    assert any(document["amount"] > 400 for document in honest)
    assert any(document["amount"] < 2 for document in honest)
    away = [document for document in honest if document["city"] != known.get(document["card"], document["city"])]
    assert 0.01 < len(away) / len(honest) < 0.1
    for field in ("city", "category", "card"):
        assert {document[field] for burst in bursts(found) for document in burst} <= {
            document[field] for document in honest
        }


def test_who_looks_at_the_last_transactions_of_a_card_finds_it(found: list[dict[str, Any]]) -> None:
    by_card = defaultdict(list)
    for document in found:
        by_card[document["card"]].append(document)
    alarms = [
        third["label"]
        for spent in by_card.values()
        for first, second, third in zip(spent, spent[1:], spent[2:], strict=False)
        if first["city"] == second["city"] == third["city"] and third["at"] - first["at"] < 2_000
        and max(first["amount"], second["amount"]) < 10 and third["amount"] > 100
    ]  # fmt: skip
    assert alarms.count("fraud") >= 0.8 * len(bursts(found))
    assert alarms.count("ok") <= 0.1 * len(alarms)


def test_honest_amounts_are_log_normal(found: list[dict[str, Any]]) -> None:
    logs = [log(document["amount"]) for document in found if document["category"] == "groceries"]
    around, spread = mean(logs), stdev(logs)
    assert 0.66 < sum(abs(one - around) < spread for one in logs) / len(logs) < 0.70
    assert 25 < 2.718**around < 32
