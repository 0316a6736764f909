import pickle

import pytest

from penstock.errors import Misconfigured, PenstockError, Refused, Unaccounted, Unavailable

SENTENCES = [
    (Misconfigured("penstock.toml", "it is empty", "write a table"), "penstock.toml: it is empty; write a table"),
    (Misconfigured("penstock.toml", "it is empty"), "penstock.toml: it is empty"),
    (Unavailable("Redis", "it is loading", 0.5), "Redis is unavailable: it is loading; trying again in 0.5 s"),
    (Unavailable("Redis", "it is loading"), "Redis is unavailable: it is loading"),
    (Refused("an RSVP", "it has no id"), "an RSVP is refused: it has no id"),
    (Unaccounted("rsvps", (("a", 1, 3, 5), ("b", 2, 9, 9))), "rsvps misses a/1: 3–5, b/2: 9–9"),
]


@pytest.mark.parametrize(("error", "sentence"), SENTENCES)
def test_an_error_makes_its_sentence_from_its_facts(error: PenstockError, sentence: str) -> None:
    assert str(error) == sentence


@pytest.mark.parametrize("error", [error for error, _ in SENTENCES], ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way_between_processes(error: PenstockError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert str(again) == str(error)
