"""Alarms reach a real HTTP server, and never hold anything up."""

import base64
import hashlib
import hmac
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tests.ports import later_port

from penstock.audit.rules import Alarm
from penstock.audit.settings import AuditSettings
from penstock.core.errors import Misconfigured
from penstock.run.alarm_sender import AlarmSender, sending_alarms


@dataclass
class Receiver:
    """Answers what it is told to, 204 otherwise, and keeps what came."""

    answers: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    came: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    hangs: threading.Event | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/alarms?token=hush"

    @property
    def told(self) -> list[tuple[str, str]]:
        """Type of the message and name of the alarm."""
        bodies = [json.loads(body) for _, body in self.came]
        return [(body["type"], body["data"]["name"]) for body in bodies]


@contextmanager
def receiving(receiver: Receiver) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.came.append(({name.lower(): value for name, value in self.headers.items()}, body))
            if receiver.hangs:
                receiver.hangs.wait()
            status, headers = receiver.answers.pop(0) if receiver.answers else (204, {})
            self.send_response(status)
            for name, value in {"Content-Length": "0", **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            receiver.came.append(({}, b'{"type": "GET", "data": {"name": "redirected"}}'))
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", receiver.port), Handler) as server:
        server.daemon_threads = True
        receiver.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            if receiver.hangs:
                receiver.hangs.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(Receiver()) as one:
        yield one


@contextmanager
def posting(url: str, **options: Any) -> Iterator[AlarmSender]:
    webhook = AlarmSender(url, "rsvps", **options)
    try:
        yield webhook
    finally:
        webhook.close()


def alarm(name: str = "missing", text: str = "source:rsvps misses 1 record.") -> Alarm:
    return Alarm(name, "source:rsvps", text, 1_700_000_000_000_000)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not happen within 20 seconds"
        time.sleep(0.005)


def test_an_alarm_is_posted_when_it_begins_and_when_it_ends(receiver: Receiver) -> None:
    with posting(receiver.url) as webhook:
        for standing in ([alarm()], [alarm(text="more")], [alarm(), alarm("away")], [alarm("away")], []):
            webhook.update(standing)
    assert receiver.told == [
        ("alarm.begun", "missing"),
        ("alarm.begun", "away"),
        ("alarm.ended", "missing"),
        ("alarm.ended", "away"),
    ]
    headers, body = receiver.came[0]
    told = json.loads(body)
    assert told["timestamp"].endswith("Z")
    assert told["data"] == {"pipeline": "rsvps", **alarm().to_json()}
    assert headers["content-type"] == "application/json"
    assert "webhook-signature" not in headers


def test_many_arrive_in_order(receiver: Receiver) -> None:
    with posting(receiver.url) as webhook:
        webhook.update([alarm(f"{number}") for number in range(100)])
        until(lambda: webhook.delivered == 100)
    assert [name for _, name in receiver.told] == [f"{number}" for number in range(100)]


def test_the_receiver_can_verify_who_sent_it(receiver: Receiver) -> None:
    with posting(receiver.url, key=b"a key") as webhook:
        webhook.update([alarm()])
    (headers, body), *_ = receiver.came
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"a key", signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert abs(int(headers["webhook-timestamp"]) - time.time()) < 60


@pytest.mark.parametrize("status", [500, 503, 408, 429])
def test_who_is_busy_gets_the_same_message_again(receiver: Receiver, status: int) -> None:
    receiver.answers = [(status, {}), (status, {})]
    with posting(receiver.url) as webhook:
        webhook.update([alarm("first"), alarm("second")])
        until(lambda: webhook.delivered == 2)
    assert [name for _, name in receiver.told] == ["first", "first", "first", "second"]
    ids = [headers["webhook-id"] for headers, _ in receiver.came]
    assert len(set(ids[:3])) == 1
    assert ids[3] != ids[0]


@pytest.mark.parametrize("asked", ["0", "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_the_receiver_may_say_when_to_come_back(receiver: Receiver, asked: str) -> None:
    receiver.answers = [(503, {"Retry-After": asked})]
    began = time.monotonic()
    with posting(receiver.url) as webhook:
        webhook.update([alarm()])
        until(lambda: webhook.delivered == 1)
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize("asked", ["soon", "-5", "", "1e400", "Thu, 99 Foo 1970"])
def test_a_wrong_word_about_when_to_come_back_is_not_heard(receiver: Receiver, asked: str) -> None:
    receiver.answers = [(503, {"Retry-After": asked})]
    with posting(receiver.url) as webhook:
        webhook.update([alarm()])
        until(lambda: webhook.delivered == 1)


def test_who_is_away_gets_it_later() -> None:
    port = later_port()
    with posting(f"http://127.0.0.1:{port}/") as webhook:
        webhook.update([alarm()])
        webhook.update([])
        with receiving(Receiver(port=port)) as receiver:
            until(lambda: webhook.delivered == 2)
    assert receiver.told == [("alarm.begun", "missing"), ("alarm.ended", "missing")]


def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture, receiver: Receiver) -> None:
    receiver.answers = [(503, {})] * 3
    with caplog.at_level(logging.INFO), posting(receiver.url) as webhook:
        webhook.update([alarm()])
        until(lambda: webhook.delivered == 1)
    first, last = [record.getMessage() for record in caplog.records]
    assert first == f"the webhook at 127.0.0.1:{receiver.port} is unavailable: it answers 503; trying again in 0.1 s"
    assert last == f"the webhook at 127.0.0.1:{receiver.port} takes messages again; 0 were dropped so far"


@pytest.mark.parametrize("status", [400, 401, 404, 410])
def test_what_is_refused_is_not_sent_again(receiver: Receiver, caplog: pytest.LogCaptureFixture, status: int) -> None:
    receiver.answers = [(status, {})]
    with posting(receiver.url) as webhook:
        webhook.update([alarm("first"), alarm("second")])
        until(lambda: webhook.delivered == 1)
    assert webhook.refused == 1
    assert [name for _, name in receiver.told] == ["first", "second"]
    assert f"answers {status}: the message is not retried" in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(receiver: Receiver, caplog: pytest.LogCaptureFixture, status: int) -> None:
    receiver.answers = [
        (status, {"Location": "http://[/"}),
        (status, {"Location": f"http://127.0.0.1:{receiver.port}/"}),
    ]
    with posting(receiver.url) as webhook:
        webhook.update([alarm("first"), alarm("second")])
        until(lambda: webhook.refused == 2)
    assert [name for _, name in receiver.told] == ["first", "second"]
    assert "redirects are not followed" in caplog.text


def test_a_receiver_that_hangs_holds_nothing_up(receiver: Receiver) -> None:
    receiver.hangs = threading.Event()
    webhook = AlarmSender(receiver.url, "rsvps")
    webhook.update([alarm()])
    until(lambda: len(receiver.came) == 1)
    began = time.monotonic()
    for number in range(1_000):
        webhook.update([alarm(f"{number}")])
    assert time.monotonic() - began < 1
    began = time.monotonic()
    webhook.close()
    assert time.monotonic() - began < 3


def test_who_does_not_answer_in_time_gets_it_again(receiver: Receiver) -> None:
    receiver.hangs = threading.Event()
    with posting(receiver.url, timeout=0.05) as webhook:
        webhook.update([alarm()])
        until(lambda: len(receiver.came) == 2)
        receiver.hangs.set()
        until(lambda: webhook.delivered == 1)
    assert len({headers["webhook-id"] for headers, _ in receiver.came}) == 1


def test_when_too_many_wait_the_oldest_are_dropped_and_counted() -> None:
    port = later_port()
    with posting(f"http://127.0.0.1:{port}/", most=3) as webhook:
        webhook.update([alarm(f"{number}") for number in range(10)])
        assert (webhook.dropped, webhook.waiting) == (7, 3)
        with receiving(Receiver(port=port)) as receiver:
            until(lambda: webhook.delivered == 3)
    assert [name for _, name in receiver.told] == ["7", "8", "9"]


def test_what_waits_at_the_end_is_still_posted(receiver: Receiver) -> None:
    with sending_alarms(AuditSettings(webhook=receiver.url), "rsvps") as tell:
        tell([alarm(f"{number}") for number in range(20)])
    assert len(receiver.came) == 20


def test_the_end_waits_for_nobody_who_is_away(caplog: pytest.LogCaptureFixture) -> None:
    began = time.monotonic()
    with sending_alarms(AuditSettings(webhook=f"http://127.0.0.1:{later_port()}/"), "rsvps") as tell:
        tell([alarm()])
    assert time.monotonic() - began < 3
    assert "did not take 1 messages" in caplog.text


def test_hostile_text_arrives_as_it_is(receiver: Receiver) -> None:
    text = 'a\r\nwebhook-id: 7\0\x1b[2J\udc80</script>"\u2028' + "ä" * 100_000
    with posting(receiver.url) as webhook:
        webhook.update([alarm(text=text)])
        until(lambda: webhook.delivered == 1)
    headers, body = receiver.came[0]
    assert json.loads(body)["data"]["text"] == text
    assert body.isascii()
    assert headers["webhook-id"].startswith("msg_")


@pytest.mark.parametrize("url", ["http://a..b/", "http://127.0.0.1:1/", f"http://{'a' * 100}.invalid/"])
def test_an_address_that_leads_nowhere_ends_nothing(url: str, caplog: pytest.LogCaptureFixture) -> None:
    webhook = AlarmSender(url, "rsvps")
    webhook.update([alarm()])
    until(lambda: "is unavailable" in caplog.text)
    webhook.close(drain=0)
    assert webhook.waiting == 1


@pytest.mark.parametrize("answer", [b"", b"\0\xff garbage\r\n\r\n", b"HTTP/1.1 999999 x\r\n\r\n", b"SSH-2.0-x\r\n"])
def test_who_speaks_no_http_ends_nothing(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(65_536)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        webhook = AlarmSender(f"http://127.0.0.1:{server.getsockname()[1]}/", "rsvps", timeout=0.5)
        webhook.update([alarm()])
        until(lambda: "is unavailable" in caplog.text)
        thread.join()
    webhook.close(drain=0)
    assert webhook.delivered == 0


def test_without_a_webhook_nothing_is_told() -> None:
    with sending_alarms(AuditSettings(), "rsvps") as tell:
        tell([alarm()])


def test_a_secret_that_is_none_is_found_before_anything_starts() -> None:
    settings = AuditSettings.model_validate({"webhook": "http://127.0.0.1:1/", "secret": "whsec_?"})
    with pytest.raises(Misconfigured, match="not base64"), sending_alarms(settings, "rsvps"):
        pass


@pytest.mark.parametrize("proxies", [{"ALL_PROXY": "socks5://127.0.0.1:9"}, {"HTTP_PROXY": "nonsense://:x"}])
def test_a_proxy_that_cannot_be_used_does_not_stop_the_auditor(
    monkeypatch: pytest.MonkeyPatch, proxies: dict[str, str]
) -> None:
    for name, address in proxies.items():
        monkeypatch.setenv(name, address)
    AlarmSender("http://127.0.0.1:9/", "rsvps").close()
