"""Buyers at a till: each posts a transaction, waits for the decision, and prints how long that took."""

import argparse
import logging
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import httpx

say = logging.getLogger("buyers").info

HOMES = {"c1": "nl", "c2": "nl", "c3": "de", "c4": "pt", "c5": "pt"}
USUAL = {"coffee": 4.0, "groceries": 30.0, "electronics": 250.0, "books": 20.0}
"""A category, and the usual amount."""


def purchases(chance: random.Random, generation: int) -> Iterator[dict[str, object]]:
    """Most are usual; one in ten is abroad, and some amounts are too high."""
    number = 0
    while True:
        number += 1
        card, category = chance.choice(list(HOMES)), chance.choice(list(USUAL))
        country = HOMES[card] if chance.random() < 0.9 else chance.choice(["br", "us"])
        amount = round(USUAL[category] * chance.lognormvariate(0, 0.8), 2)
        yield {
            "transaction": f"{generation}-{number}",
            "card": card,
            "amount": amount,
            "category": category,
            "country": country,
        }


def request(client: httpx.Client, url: str, key: str, purchase: dict[str, object]) -> httpx.Response:
    """Post until there is an answer. The key makes repeated posts one transaction."""
    while True:
        try:
            answer = client.post(url, params={"answer": "10s"}, headers={"idempotency-key": key}, json=purchase)
            if answer.status_code != 503:
                return answer.raise_for_status()
            say("the server is busy; trying again")
        except httpx.TransportError as error:
            if key.endswith("/1"):
                # The first request: the address is probably wrong.
                raise
            say(f"no answer ({error}); trying again")
        time.sleep(0.5)


def buy(url: str, limit: int | None, pause: float, took: list[float]) -> None:
    generation = time.time_ns() // 1_000
    with httpx.Client(timeout=20) as client:
        for number, purchase in enumerate(purchases(random.Random(generation), generation), start=1):
            began = time.perf_counter()
            # The name of the sender, its epoch, and the number of the record.
            answer = request(client, url, f"till/{generation}/{number}", purchase)
            what = f"{purchase['card']} {purchase['amount']:8.2f} {purchase['category']:12}"
            if answer.status_code == 200:
                took.append((time.perf_counter() - began) * 1_000)
                row = answer.json()
                say(f"{what} {'approved' if row['approved'] else row['reason']:32} {took[-1]:6.1f} ms")
            else:
                say(f"{what} no decision yet; it will be at {answer.headers['location']}")
            if number == limit:
                return
            time.sleep(pause)


def summary(took: Sequence[float]) -> str:
    if not took:
        return "no decisions"
    ordered = sorted(took)
    half, most = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return f"{len(ordered)} decisions: half of them within {half:.1f} ms, 99 % within {most:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description="Buy, and wait for each decision.")
    parser.add_argument("--url", default="http://127.0.0.1:8700/transactions")
    parser.add_argument("--limit", type=int, help="stop after so many transactions")
    parser.add_argument("--pause", type=float, default=0.2, metavar="SECONDS", help="between two of them")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("buyers").setLevel(logging.INFO)
    took: list[float] = []
    try:
        with suppress(KeyboardInterrupt):
            buy(options.url, options.limit, options.pause, took)
    except httpx.HTTPStatusError as error:
        parser.exit(2, f"{options.url}: {error.response.text}\n")
    except httpx.TransportError as error:
        parser.exit(2, f"{options.url}: {error}; start the pipeline first: penstock run pipeline.py\n")
    say(summary(took))


if __name__ == "__main__":
    main()
