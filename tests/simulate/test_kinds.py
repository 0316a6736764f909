"""What holds for everything that is simulated."""

import inspect
import pickle
import random
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.cli.feed import feed
from penstock.core.errors import Misconfigured
from penstock.simulate.feed import Documents, Feed
from penstock.simulate.kinds import KINDS, OPTIONS, check_options, kind_of

START = 1_700_000_000_000_000
SENDERS = 20
DOCS = Path(__file__).parents[2] / "docs" / "simulate.md"

kinds = pytest.mark.parametrize("kind", KINDS)


def document(documents: Documents, n: int) -> bytes:
    return documents(n % SENDERS, n // SENDERS + 1, START + n * 5_000)


@kinds
def test_the_same_seed_makes_the_same_bytes(kind: str) -> None:
    one, other = KINDS[kind].documents(7), KINDS[kind].documents(7)
    assert [document(one, n) for n in range(2_000)] == [document(other, n) for n in range(2_000)]


@kinds
def test_another_seed_makes_others(kind: str) -> None:
    one, other = KINDS[kind].documents(7), KINDS[kind].documents(8)
    assert sum(document(one, n) == document(other, n) for n in range(1_000)) < 100


@kinds
@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_any_whole_number_is_a_seed(kind: str, seed: int) -> None:
    assert orjson.loads(document(KINDS[kind].documents(seed), 0))


@kinds
def test_any_order_of_asking_gives_the_same(kind: str) -> None:
    wanted = [*range(500), 10**6 + 3, 10**9 + 7, 10**13]
    straight = {n: document(documents, n) for documents in [KINDS[kind].documents(7)] for n in wanted}
    random.Random(1).shuffle(wanted)
    crooked = KINDS[kind].documents(7)
    assert all(document(crooked, n) == straight[n] for n in wanted)
    assert document(KINDS[kind].documents(7), 10**9 + 7) == straight[10**9 + 7]


@kinds
def test_nothing_is_kept_of_what_was_made(kind: str) -> None:
    documents = KINDS[kind].documents(7)
    for n in range(4_000):
        document(documents, n)
    before = len(pickle.dumps(documents))
    for n in range(4_000, 8_000):
        document(documents, n)
    assert len(pickle.dumps(documents)) == before


@kinds
def test_a_document_is_an_object_without_numbers_of_the_feed(kind: str) -> None:
    documents = KINDS[kind].documents(7)
    for n in range(1_000):
        found = orjson.loads(made := document(documents, n))
        assert isinstance(found, dict)
        assert "feed" not in found
        assert made.startswith(b"{")
        assert made.endswith(b"}")
        assert len(made) < 2_000


@kinds
def test_its_time_is_that_at_which_it_is_due(kind: str) -> None:
    documents = KINDS[kind].documents(7)
    for n in range(200):
        found, due = orjson.loads(document(documents, n)), START + n * 5_000
        told = {"rsvps": ("mtime", due // 1_000), "updates": ("time", due)}.get(kind, ("at", due // 1_000))
        assert found[told[0]] == told[1]


@kinds
def test_its_fields_are_those_that_the_docs_tell(kind: str) -> None:
    rows = re.findall(rf"^\| `{kind}` \|.*\|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    told = set(re.findall(r"`(\w+)`", rows[0]))
    documents = KINDS[kind].documents(7)
    assert {field for n in range(2_000) for field in orjson.loads(document(documents, n))} == told


@kinds
def test_the_docs_tell_what_its_senders_are_called(kind: str) -> None:
    assert f"| `{kind}` | `{KINDS[kind].sender}-00` |" in DOCS.read_text()


@pytest.mark.parametrize(("kind", "field"), [("updates", "sender"), ("walk", "walk"), ("turbines", "turbine")])
def test_where_a_document_names_its_sender_the_feed_does_alike(kind: str, field: str) -> None:
    one = Feed(KINDS[kind].documents(7), 10, 3, 1_700_000_000, called=KINDS[kind].sender)
    message: dict[str, Any] = orjson.loads(one.message(7))
    assert message[field] == message["feed"]["sender"] == f"{KINDS[kind].sender}-01"


def test_no_two_kinds_call_their_senders_the_same() -> None:
    assert len({kind.sender for kind in KINDS.values()}) == len(KINDS)


def test_a_name_that_is_like_one_gets_that() -> None:
    with pytest.raises(Misconfigured, match=r'penstock feed: there is no simulation "cardz"; did you mean "cards"\?'):
        kind_of("cardz", "penstock feed")


def test_a_name_that_is_like_none_gets_the_list() -> None:
    with pytest.raises(Misconfigured, match=r'source x: there is no simulation "tides"; there is rsvps, updates, '):
        kind_of("tides", "source x")


def test_the_options_of_an_address_are_those_of_the_command() -> None:
    told = {name.replace("_", "-") for name in inspect.signature(feed).parameters}
    assert set(OPTIONS) == told - {"name", "host", "port"}


def test_an_option_that_is_none_gets_what_was_meant() -> None:
    check_options(OPTIONS, "source x")
    with pytest.raises(Misconfigured, match=r'source x: a simulation has no option "raet"; did you mean "rate"\?'):
        check_options(["seed", "raet"], "source x")
