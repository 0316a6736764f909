"""A delivery on a real port, a made-up pipeline behind it, and a real browser in front of it."""

import asyncio
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from starlette.applications import Starlette

from penstock.deliver.app import build, serve
from penstock.deliver.delivery import FeedSpec
from penstock.deliver.site import ChartSpec
from penstock.testing import MemoryChannels

STATUS = "penstock.demo.status"


@contextmanager
def _served(app: Starlette, port: int = 0) -> Iterator[str]:
    """Serve the app in a thread of its own; the address."""
    loop, stop, up = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    addresses: list[str] = []

    def ready(address: str) -> None:
        addresses.append(address)
        up.set()

    def run() -> None:
        try:
            loop.run_until_complete(serve(app, "127.0.0.1", port, stop, ready))
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()
            up.set()

    thread = threading.Thread(target=run)
    thread.start()
    up.wait()
    try:
        assert addresses, "the server did not come up"
        yield addresses[0]
    finally:
        with suppress(RuntimeError):  # the loop is closed already when the server ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(15)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def served() -> Callable[..., AbstractContextManager[str]]:
    return _served


@pytest.fixture(scope="session")
def vega_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vega")


# --- a made-up pipeline -----------------------------------------------------------------------------------------------

_COUNTRIES = ["us", "gb", "de", "fr", "nl", "in", "jp", "br", "ca", "es", "it", "au"]
_TOPICS = [
    "python",
    "hiking",
    "data science",
    "board games",
    "yoga",
    "photography",
    "startups",
    "jazz",
    "rust",
    "chess",
]
_CITIES = ["Berlin", "London", "New York", "Paris", "Tokyo", "Amsterdam", "São Paulo", "Sydney"]
_COORDINATES = [
    (52.5, 13.4),
    (51.5, -0.1),
    (40.7, -74),
    (48.9, 2.4),
    (35.7, 139.7),
    (52.4, 4.9),
    (-23.5, -46.6),
    (-33.9, 151),
]


class Demo:
    """A thread that writes results and status as a running pipeline does."""

    def __init__(self) -> None:
        self.channels = MemoryChannels(partitions=2)
        self.missing = 0
        self._dice = random.Random(7)
        self._stop = threading.Event()
        self._versions: dict[tuple[str, str], int] = {}
        self._taken = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Demo":
        for _ in range(150):
            self._step()
        self._report_status()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def app(self, cache: Path, charts: Sequence[ChartSpec] | None = None, names: Sequence[str] = ()) -> Starlette:
        keep = timedelta(minutes=5)
        names = names or ["by_country", "trending", "answers", "members", "venues"]
        feeds = [FeedSpec(name, name, f"id of {name}", keep) for name in names]
        return build(self.channels, feeds, charts or _CHARTS, _GRAPH, STATUS, "RSVPs, live", cache=cache)

    def _run(self) -> None:
        reported = time.monotonic()
        while not self._stop.wait(0.02):
            self._step()
            if time.monotonic() - reported > 0.5:
                reported = time.monotonic()
                self._report_status()

    def _result(self, channel: str, key: list[object], row: dict[str, object]) -> None:
        text = json.dumps(key)
        version = self._versions[channel, text] = self._versions.get((channel, text), 0) + 1
        now = time.time_ns() // 1_000
        row = {**row, "seen": {"count": version, "newest": now}}
        headers = [("version", b"%d" % version), ("time", b"%d" % (now - self._dice.randrange(2_000, 25_000)))]
        self.channels.append(channel, json.dumps(row).encode(), text.encode(), headers)

    def _step(self) -> None:
        dice = self._dice
        self._taken += 4
        second = int(time.time()) // 10 * 10
        start, end = (datetime.fromtimestamp(at, UTC).isoformat() for at in (second, second + 10))
        country = dice.choices(_COUNTRIES, [1 / (n + 1) for n in range(len(_COUNTRIES))])[0]
        people = self._versions.get(("by_country", json.dumps([second, country])), 0) + dice.randrange(1, 4)
        window = {"start": start, "end": end}
        self._result("by_country", [second, country], {"window": window, "country": country, "people": people})
        topic = dice.choices(_TOPICS, [1 / (n + 1) for n in range(len(_TOPICS))])[0]
        self._result(
            "trending", [topic], {"topic": topic, "score": self._versions.get(("trending", f'["{topic}"]'), 0) + 1}
        )
        at = dice.randrange(len(_CITIES))
        city, answer = _CITIES[at], dice.choices(["yes", "no"], [3, 1 + at / 4])[0]
        n = self._versions.get(("answers", json.dumps([city, answer])), 0) + 1
        self._result("answers", [city, answer], {"city": city, "response": answer, "n": n})
        self._result(
            "members",
            [second],
            {"window": window, "members": 400 + round(90 * math.sin(second / 37)) + dice.randrange(9)},
        )
        lat, lon = _COORDINATES[at]
        venue = dice.randrange(400)
        spot = {
            "venue": f"venue {venue}",
            "lat": lat + venue % 17 - 8,
            "lon": lon + venue % 23 - 11,
            "people": 1 + venue % 9,
        }
        self._result("venues", [venue], spot)

    def _report_status(self) -> None:
        now = time.time_ns() // 1_000
        latency = {"count": self._taken, "min": 0.4, "mean": 5.1, "p50": 4.0, "p95": 9.6, "p99": 11.2, "max": 31.0}
        slow = {**latency, "p50": 174.0, "p95": 420.0, "p99": 638.0, "max": 690.0}

        def node(rate: float, **more: object) -> dict[str, object]:
            jitter = 1 + self._dice.uniform(-0.06, 0.06)
            return {
                "count": self._taken,
                "rate": rate * jitter,
                "lag": None,
                "latency": None,
                "state": "running",
                **more,
            }

        processes: dict[str, dict[str, object]] = {
            "collect": {
                "source:rsvps": node(200, state="connected", note="20 senders, resumed after 0 gaps"),
                "channel:rsvps": node(200, latency=latency, lag=0),
            },
            "analysis": {
                "query:by_country": node(160, latency=latency, lag=2, **_batch(now, "real-time", 60_000)),
                "query:trending": node(40, latency=slow, lag=14, **_batch(now, "micro-batch", 840)),
                "query:answers": node(50, latency=slow, lag=9),
                "query:members": node(1, latency=slow, lag=9),
                "query:venues": node(60, latency=slow, lag=12),
                **{f"channel:{name}": node(50) for name in ("by_country", "trending", "answers", "members", "venues")},
            },
            "stores": {"store:redis": node(300, latency=latency, lag=0), "store:lake": node(200, lag=120)},
            "audit": {},
        }
        gaps = [{"sender": "sender-7", "epoch": 1, "first": 120, "last": 119 + self.missing}] if self.missing else []
        channel = {
            "channel": "rsvps",
            "senders": 20,
            "records": self._taken + 12,
            "distinct": self._taken,
            "duplicates": 12,
            "missing": self.missing,
            "claimed": self._taken,
            "refused": 3,
            "unknown_seconds": 0,
            "gaps": gaps,
        }
        result = {**channel, "channel": "rsvps.dead", "senders": 4, "records": 3, "distinct": 3, "duplicates": 0}
        result |= {"missing": 0, "claimed": None, "refused": 0, "gaps": []}
        for process, nodes in processes.items():
            status: dict[str, object] = {"process": process, "at": now, "pid": 1, "memory": 10**8, "nodes": nodes}
            if process == "audit":
                verdict = "missing" if self.missing else "whole"
                status["balance"] = {"verdict": verdict, "channels": [channel, result]}
            self.channels.append(STATUS, json.dumps(status).encode(), process.encode())


def _batch(now: int, mode: str, took: int) -> dict[str, object]:
    """Spark's report of a batch that ended 21 seconds ago."""
    times = {"all": took, "planning": 90, "work": took - 200, "commit": 55}
    store = {"rows": None, "memory": 300 << 10, "disk": 3 << 20, "load": 4, "restored": 212, "hits": 90, "misses": 10}
    seen = {"watermark": now - 52_000_000, "behind": 30_000, "skew": 1_400, "late": 3}
    return {"mode": mode, "at": now - 21_000_000, "rate_in": 198.6, "times": times, "store": store, **seen}


@pytest.fixture
def demo() -> Iterator[Demo]:
    with Demo() as running:
        yield running


_ROWS = {"name": "rows"}
_CHARTS = [
    ChartSpec(
        "by_country",
        "by_country",
        "People per country",
        "Yes answers with their guests, in windows of ten seconds.",
        {
            "data": _ROWS,
            "mark": {"type": "bar", "tooltip": True},
            "encoding": {
                "x": {"field": "people", "type": "quantitative", "aggregate": "sum", "title": "people"},
                "y": {"field": "country", "type": "nominal", "sort": "-x", "title": None},
            },
        },
    ),
    ChartSpec(
        "trending",
        "trending",
        "Trending topics",
        "What the groups of the last minutes are about.",
        {
            "data": _ROWS,
            "mark": "bar",
            "encoding": {
                "x": {"field": "topic", "type": "nominal", "sort": "-y", "title": None, "axis": {"labelAngle": -35}},
                "y": {"field": "score", "type": "quantitative", "title": None},
                "color": {"field": "score", "type": "quantitative", "legend": None},
            },
        },
    ),
    ChartSpec(
        "answers",
        "answers",
        "Yes and no per city",
        "The share of each answer.",
        {
            "data": _ROWS,
            "mark": "bar",
            "encoding": {
                "y": {"field": "city", "type": "nominal", "title": None},
                "x": {
                    "field": "n",
                    "type": "quantitative",
                    "stack": "normalize",
                    "axis": {"format": "%"},
                    "title": None,
                },
                "color": {"field": "response", "type": "nominal", "title": None, "legend": {"orient": "top"}},
            },
        },
    ),
    ChartSpec(
        "members",
        "members",
        "Distinct members",
        "By HyperLogLog, in windows of ten seconds.",
        {
            "data": _ROWS,
            "mark": {"type": "area", "line": True, "interpolate": "monotone", "opacity": 0.3},
            "encoding": {
                "x": {"field": "window_start", "type": "temporal", "title": None},
                "y": {"field": "members", "type": "quantitative", "title": None},
            },
        },
    ),
    ChartSpec(
        "venues",
        "venues",
        "Where people meet",
        "The venues of the last minutes.",
        {
            "projection": {"type": "equalEarth"},
            "layer": [
                {"data": {"sphere": True}, "mark": {"type": "geoshape"}},
                {"data": {"graticule": {"step": [20, 20]}}, "mark": {"type": "geoshape", "filled": False}},
                {
                    "data": _ROWS,
                    "mark": {"type": "circle", "opacity": 0.6},
                    "encoding": {
                        "longitude": {"field": "lon", "type": "quantitative"},
                        "latitude": {"field": "lat", "type": "quantitative"},
                        "size": {"field": "people", "type": "quantitative", "legend": None},
                        "tooltip": {"field": "venue"},
                    },
                },
            ],
        },
    ),
]
_QUERIES = ["by_country", "trending", "answers", "members", "venues"]
_WHY = "in real-time mode: Kafka in and out, update mode, an aggregation with a watermark"
_GRAPH: dict[str, object] = {
    "nodes": [
        {"id": "source:rsvps", "kind": "source", "label": "rsvps", "note": "ws://127.0.0.1:8765/rsvps, exactly once"},
        {"id": "channel:rsvps", "kind": "channel", "label": "rsvps", "note": "4 partitions, 1 replica"},
        *({"id": f"query:{name}", "kind": "query", "label": name, "note": _WHY} for name in _QUERIES),
        *({"id": f"channel:{name}", "kind": "channel", "label": name, "note": "compacted"} for name in _QUERIES),
        {"id": "store:redis", "kind": "store", "label": "redis", "note": "the live tables"},
        {"id": "store:lake", "kind": "store", "label": "lake", "note": "all RSVPs, Delta"},
        {"id": "page", "kind": "page", "label": "this page", "note": ""},
    ],
    "edges": [
        ["source:rsvps", "channel:rsvps"],
        *(["channel:rsvps", f"query:{name}"] for name in _QUERIES),
        *([f"query:{name}", f"channel:{name}"] for name in _QUERIES),
        *([f"channel:{name}", "page"] for name in _QUERIES),
        ["channel:by_country", "store:redis"],
        ["channel:rsvps", "store:lake"],
    ],
}
