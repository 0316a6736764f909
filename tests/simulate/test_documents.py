"""What holds for everything that is simulated, for a file that is replayed, and for the draws."""

import inspect
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from ads import Ads
from cards import Cards
from carts import Carts
from machines import Machines
from scenario import Scenario
from turbines import Turbines
from vehicles import Vehicles
from views import Views

from penstock.cli.serve import feed
from penstock.core.errors import Misconfigured
from penstock.simulate.documents import (
    KINDS,
    OPTIONS,
    SLOTS,
    Documents,
    Recording,
    check_options,
    drawn,
    kind_of,
    mixed,
    slots,
)
from penstock.simulate.feed import Feed

SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "ads": Ads,
    "cards": Cards,
    "carts": Carts,
    "machines": Machines,
    "turbines": Turbines,
    "vehicles": Vehicles,
    "views": Views,
}
START = 1_700_000_000_000_000
SENDERS = 20
ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "simulate.md").read_text() + (ROOT / "examples" / "scenarios" / "README.md").read_text()

kinds = pytest.mark.parametrize("kind", [*KINDS, *SCENARIOS])


def made(kind: str, seed: int) -> Documents:
    return KINDS[kind].documents(seed) if kind in KINDS else SCENARIOS[kind](seed=seed).document


def called(kind: str) -> str:
    return KINDS[kind].sender if kind in KINDS else SCENARIOS[kind]().sender


def document(documents: Documents, n: int) -> bytes:
    return documents(n % SENDERS, n // SENDERS + 1, START + n * 5_000)


@kinds
def test_the_same_seed_makes_the_same_bytes(kind: str) -> None:
    one, other = made(kind, 7), made(kind, 7)
    assert [document(one, n) for n in range(2_000)] == [document(other, n) for n in range(2_000)]


@kinds
def test_another_seed_makes_others(kind: str) -> None:
    one, other = made(kind, 7), made(kind, 8)
    assert sum(document(one, n) == document(other, n) for n in range(1_000)) < 100


@kinds
@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_any_whole_number_is_a_seed(kind: str, seed: int) -> None:
    assert orjson.loads(document(made(kind, seed), 0))


@kinds
def test_any_order_of_asking_gives_the_same(kind: str) -> None:
    wanted = [*range(500), 10**6 + 3, 10**9 + 7, 10**13]
    straight = {n: document(documents, n) for documents in [made(kind, 7)] for n in wanted}
    random.Random(1).shuffle(wanted)
    crooked = made(kind, 7)
    assert all(document(crooked, n) == straight[n] for n in wanted)
    assert document(made(kind, 7), 10**9 + 7) == straight[10**9 + 7]


@kinds
def test_nothing_is_kept_of_what_was_made(kind: str) -> None:
    documents = made(kind, 7)
    for n in range(4_000):
        document(documents, n)
    before = len(pickle.dumps(documents))
    for n in range(4_000, 8_000):
        document(documents, n)
    assert len(pickle.dumps(documents)) == before


@kinds
def test_a_document_is_an_object_without_numbers_of_the_feed(kind: str) -> None:
    documents = made(kind, 7)
    for n in range(1_000):
        found = orjson.loads(text := document(documents, n))
        assert isinstance(found, dict)
        assert "feed" not in found
        assert text.startswith(b"{")
        assert text.endswith(b"}")
        assert len(text) < 2_000


@kinds
def test_its_time_is_that_at_which_it_is_due(kind: str) -> None:
    documents = made(kind, 7)
    for n in range(200):
        found, due = orjson.loads(document(documents, n)), START + n * 5_000
        told = {"rsvps": ("mtime", due // 1_000), "updates": ("time", due)}.get(kind, ("at", due // 1_000))
        assert found[told[0]] == told[1]


@kinds
def test_its_fields_are_those_that_the_docs_tell(kind: str) -> None:
    rows = re.findall(rf"^\| `{kind}` \|.*\|(.*)\|$", DOCS, re.MULTILINE)
    told = set(re.findall(r"`(\w+)`", rows[0]))
    documents = made(kind, 7)
    assert {field for n in range(2_000) for field in orjson.loads(document(documents, n))} == told


@kinds
def test_the_docs_tell_what_its_senders_are_called(kind: str) -> None:
    assert f"| `{kind}` | `{called(kind)}-00` |" in DOCS


@pytest.mark.parametrize(("kind", "field"), [("updates", "sender"), ("random-walk", "walk"), ("turbines", "turbine")])
def test_where_a_document_names_its_sender_the_feed_does_alike(kind: str, field: str) -> None:
    one = Feed(made(kind, 7), 10, 3, 1_700_000_000, sender=called(kind))
    message: dict[str, Any] = orjson.loads(one.message(7))
    assert message[field] == message["feed"]["sender"] == f"{called(kind)}-01"


def test_no_two_call_their_senders_the_same() -> None:
    assert len({called(kind) for kind in (*KINDS, *SCENARIOS)}) == len(KINDS) + len(SCENARIOS)


def test_a_name_that_is_like_one_gets_that() -> None:
    with pytest.raises(Misconfigured, match=r'penstock feed: there is no simulation "rsvpz"; did you mean "rsvps"\?'):
        kind_of("rsvpz", "penstock feed")


def test_a_name_that_is_like_none_gets_the_list() -> None:
    with pytest.raises(Misconfigured, match=r'source x: there is no simulation "tides"; .*rsvps, updates, '):
        kind_of("tides", "source x")


def test_the_options_of_an_address_are_those_of_the_command() -> None:
    told = {name.replace("_", "-") for name in inspect.signature(feed).parameters}
    assert set(OPTIONS) == told - {"name", "host", "port"}


def test_an_option_that_is_none_gets_what_was_meant() -> None:
    check_options(OPTIONS, "source x")
    with pytest.raises(Misconfigured, match=r'source x: a simulation has no option "raet"; did you mean "rate"\?'):
        check_options(["seed", "raet"], "source x")


def written(folder: Path, content: bytes) -> Path:
    path = folder / "rsvps.jsonl"
    path.write_bytes(content)
    return path


def test_lines_are_replayed_in_order_and_numbered(tmp_path: Path) -> None:
    recording = Recording(written(tmp_path, b'{"n":0}\n\n {"n":1}\r\n{"n":2}\n{"n":3}'), senders=2)
    feed = Feed(recording, 1, 2, 100, len(recording))
    messages = [orjson.loads(feed.message(n)) for n in range(4)]
    recording.close()
    assert [message["n"] for message in messages] == [0, 1, 2, 3]
    assert [(message["feed"]["sender"], message["feed"]["seq"]) for message in messages] == [
        ("meetup-00", 1),
        ("meetup-01", 1),
        ("meetup-00", 2),
        ("meetup-01", 2),
    ]


def test_the_numbers_of_a_recorded_feed_give_way_to_new_ones(tmp_path: Path) -> None:
    recording = Recording(written(tmp_path, b'{"n":0,"feed":{"sender":"old","seq":99}}'), senders=1)
    assert recording(0, 1, 0) == b'{"n":0}'
    recording.close()


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, b'{"n":0}\n\n{"n":\n')
    with pytest.raises(Misconfigured, match=r"rsvps\.jsonl, line 3: it is not JSON"):
        Recording(path, senders=1)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="line 2: it is JSON, but not an object"):
        Recording(written(tmp_path, b"{}\n[1]\n"), senders=1)


def test_an_empty_file_is_misconfigured(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no documents"):
        Recording(written(tmp_path, b"\n"), senders=1)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"none\.jsonl: it cannot be read"):
        Recording(tmp_path / "none.jsonl", senders=1)


def test_a_draw_is_the_same_whenever_it_is_asked_for_and_another_one_is_another() -> None:
    assert drawn(7, 1, 2) == drawn(7, 1, 2)
    assert len({drawn(7, one, other) for one in range(100) for other in range(100)}) == 10_000


def test_every_bit_is_set_in_half_of_the_draws() -> None:
    draws = [mixed(number) for number in range(10_000)]
    assert all(0.47 < sum(draw >> bit & 1 for draw in draws) / 10_000 < 0.53 for bit in range(64))


def test_slots_follow_the_law_of_zipf() -> None:
    shares = Counter(slots(100, 1.0))
    assert len(slots(100, 1.0)) == SLOTS
    assert shares[0] == pytest.approx(2 * shares[1], rel=0.02)
    assert shares[0] == pytest.approx(10 * shares[9], rel=0.05)
