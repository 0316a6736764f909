"""examples/approve, as a person runs it: the buyer waits for the decision, also when the collector is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession
from tests.plan.test_plan import planned
from tests.ports import later_port
from tests.running import Run
from tests.test_examples import EXAMPLES, loaded

from penstock.testing.frames import answer, frame, rows

EXAMPLE = EXAMPLES / "approve"
Eventually = Callable[..., None]


class Shop:
    """A pipeline that runs, and a buyer's view of it."""

    def __init__(self, folder: Path) -> None:
        for name in ("pipeline.py", "cards.csv"):
            shutil.copy(EXAMPLE / name, folder)
        self.url = f"http://127.0.0.1:{later_port()}"
        (folder / "penstock.toml").write_text(
            f'[sources]\ntransactions = "listen+{self.url}/transactions"\n'
            f'[spark]\nreal_time_batch = "5 seconds"\nevery = "2 seconds"\n[page]\nport = {later_port()}\n'
        )
        self.run = Run(folder)
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def pays(self, transaction: str, query: str = "", **other: Any) -> httpx.Response:
        return self.client.post(f"/transactions{query}", json=transaction_of(transaction, **other))

    def told(self, posted: httpx.Response) -> dict[str, Any]:
        return dict(self.client.get(posted.headers["location"]).json())

    def close(self) -> None:
        self.client.close()
        self.run.close()


def transaction_of(transaction: str, **other: Any) -> dict[str, Any]:
    return {"transaction": transaction, "card": "c1", "amount": 12.5, "category": "books", "country": "nl", **other}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("approve"))
    shop.run.start()
    try:
        shop.run.is_up(180)
        yield shop
    finally:
        shop.close()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({}, None),
        ({"country": "us", "amount": 100}, None),
        ({"category": "electronics", "amount": 2_000}, None),
        ({"card": "c9"}, "unknown card"),
        ({"card": "c5", "country": "pt"}, "the card is blocked"),
        ({"country": "us", "amount": 100.5}, "more than 100 abroad"),
        ({"amount": 200.5}, "more than 200 for books"),
        ({"category": "coffee", "amount": 51}, "more than 50 for coffee"),
    ],
)
def test_a_transaction_is_approved_or_there_is_a_reason(
    spark: SparkSession, other: dict[str, Any], reason: str | None
) -> None:
    app = loaded("approve/pipeline.py").app
    paid = frame(spark, app.describe().channels["transactions"], transaction_of("t1", **other))
    decided = answer(app, "decisions", paid)
    assert rows(decided, "transaction", "approved", "reason", "origin.seq") == [("t1", reason is None, reason, 1)]


def test_the_plan_tells_what_the_way_in_promises(spark: SparkSession, tmp_path: Path) -> None:
    found = planned(loaded("approve/pipeline.py").app, tmp_path, spark)
    hop = next(hop for hop in found.hops if hop.by == "http")
    assert (hop.start, hop.end) == ("listen+http://127.0.0.1:8700/transactions", "transactions")
    assert hop.guarantee == "at least once"
    assert "unless the sender numbers it" in hop.why
    assert [(query.name, query.mode) for query in found.queries] == [
        ("decisions", "real-time"),
        ("declined", "micro-batch"),
    ]


def test_buyers_without_a_shop_are_told_in_a_sentence() -> None:
    command = [sys.executable, str(EXAMPLE / "buyers.py"), "--url", f"http://127.0.0.1:{later_port()}/transactions"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "start the pipeline first" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_buyer_waits_and_gets_the_decision(shop: Shop) -> None:
    row = {"transaction": "a1", "card": "c1", "amount": 12.5, "approved": True, "reason": None}
    approved = shop.pays("a1", "?answer=60s")
    assert (approved.status_code, approved.json()) == (200, row)
    declined = shop.pays("a2", "?answer=60s", card="c5")
    assert (declined.status_code, declined.json()["reason"]) == (200, "the card is blocked")
    odd = shop.pays("a3", "?answer=60s", amount="much")
    assert (odd.status_code, odd.json()["error"]) == (422, 'the field "amount" is not double')
    assert shop.told(odd)["state"] == "refused"


def test_a_receipt_tells_where_the_transaction_is(shop: Shop, eventually: Eventually) -> None:
    posted = shop.pays("b1")
    assert posted.status_code == 202
    told = shop.told(posted)
    assert (told["state"], told["channel"], told["found"]) == ("safe", "transactions", 1)
    assert shop.client.get(posted.headers["location"], params={"answer": "60s"}).json()["approved"]
    eventually(lambda: {"stage": "query:decisions", "read": True} in shop.told(posted)["stages"])


def test_the_example_buyers_buy(shop: Shop) -> None:
    command = [sys.executable, str(EXAMPLE / "buyers.py"), "--url", f"{shop.url}/transactions"]
    done = subprocess.run(
        [*command, "--limit", "20", "--pause", "0"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 decisions: half of them within " in done.stdout


class Till:
    """Pays one transaction after the other. With a name, it asks again for what was not answered."""

    def __init__(self, shop: Shop, name: str, numbered: bool) -> None:
        self._shop, self._name, self._numbered = shop, name, numbered
        self.acknowledged: list[str] = []
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pay)
        self._thread.start()

    def _pay(self) -> None:
        number = 1
        with httpx.Client(base_url=self._shop.url, timeout=60) as client:
            while not self._stop.is_set():
                named = f"&sender={self._name}&epoch=1&seq={number}" if self._numbered else ""
                body = transaction_of(f"{self._name}-{number}")
                with suppress(httpx.TransportError):
                    answer = client.post(f"/transactions?answer=60s{named}", json=body)
                    if answer.status_code == 200 and answer.json()["transaction"] == body["transaction"]:
                        self.acknowledged.append(body["transaction"])
                    elif answer.status_code != 503:
                        self.wrong.append(f"{answer.status_code} {answer.text}")
                    number += answer.status_code == 200 or not self._numbered
                    continue
                number += not self._numbered
                self._stop.wait(0.05)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def test_what_was_acknowledged_is_decided_although_the_collector_is_killed(shop: Shop, eventually: Eventually) -> None:
    tills = [Till(shop, f"shop{number}", numbered=number < 3) for number in range(4)]
    try:
        for _ in range(2):
            before, paid = shop.run.tier("collect"), [len(till.acknowledged) for till in tills]
            assert before
            eventually(lambda paid=paid: all(len(t.acknowledged) > n + 10 for t, n in zip(tills, paid, strict=True)))
            os.kill(before, signal.SIGKILL)
            eventually(lambda before=before: shop.run.tier("collect") not in {None, before})
        paid = [len(till.acknowledged) for till in tills]
        eventually(lambda: all(len(till.acknowledged) > n + 10 for till, n in zip(tills, paid, strict=True)), 120)
    finally:
        for till in tills:
            till.close()
    assert [till.wrong for till in tills] == [[]] * 4

    acknowledged = {json.dumps([transaction]) for till in tills for transaction in till.acknowledged}
    eventually(lambda: acknowledged <= shop.run.rows("decisions").keys())

    # Each that came is there once, and each that a till has numbered.
    source = shop.run.audit()
    assert (source["missing"], source["duplicates"]) == (0, 0)
    numbered = sum(len(till.acknowledged) for till in tills[:3])
    assert sum(one["distinct"] for one in source["by_sender"] if one["sender"].startswith("shop")) == numbered
    eventually(lambda: shop.run.settled(source["records"]), 120)
    verdict = shop.run.penstock("audit", "--strict")
    assert "Whole: nothing is missing." in verdict.stdout, verdict.stdout + verdict.stderr
    assert verdict.returncode == 0
