"""The command, at a provider that is a server of its own."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.webhook import app
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.signatures import parse_secrets, verify

TOKEN = "Authorization: Bearer s3cr3t-token"


class Provider(ThreadingHTTPServer):
    """Keeps what is registered, for who has the token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hooks: dict[str, dict[str, Any]] = {}
        self.messages: list[tuple[dict[str, str], bytes]] = []
        self.answer: bytes | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/hooks"


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _reply(self, status: int, document: object) -> None:
        body = self.server.answer or (b"" if document is None else json.dumps(document).encode())
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _known(self) -> bool:
        if f"Authorization: {self.headers['Authorization']}" == TOKEN:
            return True
        self._reply(401, {"error": "who are \x1b[31myou", "place": "the door", "fix": "knock"})
        return False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/in":
            self.server.messages.append(({name.lower(): told for name, told in self.headers.items()}, body))
            self._reply(202, {"id": 1})
        elif self.path == "/moved":
            self.send_response(307)
            self.send_header("location", "/hooks")
            self.send_header("content-length", "0")
            self.end_headers()
        elif self._known():
            number = f"wh/{len(self.server.hooks) + 1}"
            self.server.hooks[number] = json.loads(body)
            self._reply(201, {"id": number, "data": {"secret": "whsec_abcd"}, "secret": "whsec_AAAA"})

    def do_GET(self) -> None:
        if self._known():
            rows = [{"id": number, "secret": "whsec_AAAA", **hook} for number, hook in self.server.hooks.items()]
            self._reply(200, {"data": rows})

    def do_DELETE(self) -> None:
        if self._known():
            number = self.path.removeprefix("/hooks/").replace("%2F", "/")
            self._reply(204 if self.server.hooks.pop(number, None) else 404, None)


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


def test_to_register_tells_the_id_and_the_secret_and_never_the_token(provider: Provider) -> None:
    found = run(
        "register", provider.url, "--callback", "https://me.example/in", "--events", "a,b", "--header", TOKEN, "--json"
    )
    assert found.exit_code == 0, found.exception
    assert json.loads(found.stdout) == {"id": "wh/1", "secret": "whsec_AAAA"}
    assert provider.hooks == {"wh/1": {"url": "https://me.example/in", "events": ["a", "b"]}}
    assert "s3cr3t" not in found.output
    people = run("register", provider.url, "--callback", "https://me.example/in", "--header", TOKEN)
    assert people.stdout == "id      wh/2\nsecret  whsec_AAAA\n"
    assert provider.hooks["wh/2"] == {"url": "https://me.example/in"}


def test_a_provider_may_call_things_by_other_names(provider: Provider) -> None:
    fields = ("--field", "url=config.target", "--field", "secret=data.secret")
    asked = ("register", provider.url, "--callback", "https://me.example/in", "--header", TOKEN, *fields)
    assert "whsec_abcd" in run(*asked).stdout
    assert provider.hooks == {"wh/1": {"config": {"target": "https://me.example/in"}}}


def test_what_is_registered_is_listed_without_secrets_and_removed(provider: Provider) -> None:
    provider.hooks = {"wh/1": {"url": "https://a.example", "events": ["x"]}, "wh/2": {"url": "https://b.example"}}
    listed = run("list", provider.url, "--header", TOKEN)
    assert listed.stdout == "wh/1  https://a.example  x\nwh/2  https://b.example  all events\n"
    told = run("list", provider.url, "--header", TOKEN, "--json")
    assert json.loads(told.stdout)[0] == {"id": "wh/1", "url": "https://a.example", "events": ["x"]}
    assert run("remove", provider.url, "wh/1", "--header", TOKEN).stdout == "removed wh/1\n"
    assert list(provider.hooks) == ["wh/2"]
    assert isinstance(run("remove", provider.url, "wh/1", "--header", TOKEN).exception, Refused)


def test_what_the_provider_refuses_is_told_in_its_words_made_harmless(provider: Provider) -> None:
    error = run("list", provider.url).exception
    assert isinstance(error, Refused)
    assert "answers 401 the door: who are" in str(error)
    assert "\x1b" not in str(error)


def test_redirects_are_not_followed(provider: Provider) -> None:
    moved = provider.url.replace("/hooks", "/moved")
    error = run("register", moved, "--callback", "https://me.example/in", "--header", TOKEN).exception
    assert isinstance(error, Refused)
    assert "307" in str(error)
    assert provider.hooks == {}


@pytest.mark.parametrize("answer", [b"<html>", b"[" * 100_000, b"1", b"[1, null]", b'{"data": "x"}'])
def test_an_answer_that_makes_no_sense_breaks_nothing(provider: Provider, answer: bytes) -> None:
    provider.answer = answer
    listed = run("list", provider.url, "--header", TOKEN)
    assert listed.stdout == "no webhooks are registered\n" or isinstance(listed.exception, Refused)


def test_a_message_is_signed_and_sent(provider: Provider, tmp_path: Path) -> None:
    made = run("secret").stdout.strip()
    assert made.startswith("whsec_")
    (tmp_path / "body.json").write_bytes(b'{"a": 1}')
    inlet = provider.url.replace("/hooks", "/in")
    found = run("send", inlet, str(tmp_path / "body.json"), "--secret", made, "--id", "msg_7")
    assert (found.exit_code, found.stdout.strip()) == (0, "msg_7: accepted")
    assert run("send", inlet, "-", "--secret", "text", stdin=b"piped").exit_code == 0
    for (headers, body), key in zip(provider.messages, (made, "text"), strict=True):
        asked = headers["webhook-signature"], headers["webhook-id"], headers["webhook-timestamp"]
        assert verify(parse_secrets("", key), *asked, body)
    assert [body for _, body in provider.messages] == [b'{"a": 1}', b"piped"]
    refused = run("send", provider.url, str(tmp_path / "body.json"), "--secret", made)
    assert refused.exit_code == 1
    assert "401" in refused.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("register", "nowhere", "--callback", "https://me.example"), "PROVIDER_URL: "),
        (("register", "http://127.0.0.1:9/", "--callback", "me"), "--callback: "),
        (("list", "http://127.0.0.1:9/", "--header", "s3cr3t"), "--header, number 1: "),
        (("list", "http://127.0.0.1:9/", "--field", "uri=x"), "--field uri=x: "),
        (("send", "http://127.0.0.1:9/", "absent", "--secret", "x"), "absent: No such file"),
        (("send", "http://127.0.0.1:9/", "absent", "--secret", "whsec_!"), "not base64"),
        (("send", "http://127.0.0.1:9/", "absent", "--secret", ""), "--secret: "),
    ],
)
def test_what_cannot_be_is_misconfigured(arguments: tuple[str, ...], said: str) -> None:
    error = run(*arguments).exception
    assert isinstance(error, Misconfigured)
    assert said in str(error)
    assert "s3cr3t" not in str(error)


def test_a_provider_that_is_away_is_unavailable() -> None:
    error = run("list", "http://127.0.0.1:9/hooks?token=s3cr3t").exception
    assert isinstance(error, Unavailable)
    assert "s3cr3t" not in str(error)
