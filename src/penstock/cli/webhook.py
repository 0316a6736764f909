"""`penstock webhook`: to register at a provider that posts what happens, and to try it by hand."""

import json
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import typer

from penstock.cli.options import AsJson
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.signatures import new_secret, parse_secrets, sign
from penstock.core.text import printable

TIMEOUT = 30.0
_LONGEST_ANSWER = 4 << 20
_FIELDS = {"url": "url", "events": "events", "id": "id", "secret": "secret"}
_PRIVATE = re.compile(r"secret|token|password|credential|api_?key", re.IGNORECASE)
"""Fields of an answer that are shown only where they are asked for."""

Api = Annotated[str, typer.Argument(metavar="PROVIDER_URL", help="Where the provider takes registrations.")]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", help="A header of the request, such as 'Authorization: Bearer …'.", show_default=False),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        help="What the provider calls url, events, id or secret, such as url=target.href.",
        show_default=False,
    ),
]
Secret = Annotated[
    str, typer.Option(envvar="PENSTOCK_WEBHOOK_SECRET", help="The secret: whsec_…, or any text.", show_default=False)
]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def webhook() -> None:
    """Register webhooks at a provider, list and remove them; sign and send one by hand."""


@app.command()
def register(
    provider: Api,
    callback: Annotated[str, typer.Option(help="The address that the provider is to post to.", show_default=False)],
    events: Annotated[
        list[str] | None, typer.Option("--events", help="Which events; several, or with commas.", show_default=False)
    ] = None,
    header: Headers = None,
    field: Fields = None,
    as_json: AsJson = False,
) -> None:
    """Register an address at a provider. Prints the id and the secret that it answers, the secret this once."""
    names = _names(field)
    _address("--callback", callback)
    asked: dict[str, Any] = {}
    _set(asked, names["url"], callback)
    if wanted := [one.strip() for some in events or () for one in some.split(",") if one.strip()]:
        _set(asked, names["events"], wanted)
    answer = _asked("POST", provider, _headers(header), asked)
    found = {"id": _get(answer, names["id"]), "secret": _get(answer, names["secret"])}
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, value in found.items():
        typer.echo(f"{name:6}  {printable(str(value)) if value is not None else 'the provider tells none'}")


@app.command("list")
def list_(provider: Api, header: Headers = None, field: Fields = None, as_json: AsJson = False) -> None:
    """List what is registered at a provider, without secrets."""
    names = _names(field)
    answer = _asked("GET", provider, _headers(header))
    rows = [_without_secrets(one) for one in _rows(answer)]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if not rows:
        typer.echo("nothing is registered")
    for row in rows:
        events = _get(row, names["events"])
        told = ", ".join(map(str, events)) if isinstance(events, list) else "all events" if events is None else events
        typer.echo(printable(f"{_get(row, names['id'])}  {_get(row, names['url'])}  {told}"))


@app.command()
def remove(
    provider: Api,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id that registering has told.")],
    header: Headers = None,
) -> None:
    """Remove a registration."""
    _asked("DELETE", f"{provider.rstrip('/')}/{quote(id_, safe='')}", _headers(header))
    typer.echo(f"removed {printable(id_)}")


@app.command()
def secret() -> None:
    """Make a new secret, for both sides to know."""
    typer.echo(new_secret())


@app.command()
def send(
    url: Annotated[str, typer.Argument(help="Where the webhook listens.")],
    file: Annotated[Path, typer.Argument(help="The body; - is the standard input.")],
    secret: Secret,
    id_: Annotated[str | None, typer.Option("--id", help="Its id; a new one otherwise.", show_default=False)] = None,
) -> None:
    """Sign a message and send it once. Exits with 0 when it is taken, 1 when it is not."""
    _address("URL", url)
    known = parse_secrets("--secret", secret)
    if not known:
        raise Misconfigured("--secret", "it is empty", "give the secret of the webhook")
    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise Misconfigured(str(file), error.strerror or str(error), "give a file that can be read") from error
    message = id_ if id_ is not None else f"msg_{uuid.uuid4().hex}"
    headers = {"content-type": "application/json", **sign(known[0], message, int(time.time()), body)}
    answer = _sent("POST", url, headers, body)
    typer.echo(f"{message}  {answer.status_code}  {_said(answer)}")
    raise typer.Exit(0 if answer.is_success else 1)


# --- what is asked ----------------------------------------------------------------------------------------------------


def _headers(given: Sequence[str] | None) -> dict[str, str]:
    found = {}
    for number, one in enumerate(given or (), 1):
        name, colon, value = one.partition(":")
        if not colon or not name.strip().isascii() or not name.strip() or "\n" in one or "\r" in one:
            # What it holds may be a token, and stays out of the sentence.
            raise Misconfigured(f"--header, number {number}", "this is no header", "write 'Name: value'")
        found[name.strip()] = value.strip()
    return found


def _names(given: Sequence[str] | None) -> dict[str, str]:
    found = dict(_FIELDS)
    for one in given or ():
        name, equals, theirs = one.partition("=")
        if name not in _FIELDS or not equals or not all(theirs.split(".")):
            fix = f"write one of {', '.join(_FIELDS)}, =, and what the provider calls it"
            raise Misconfigured(f"--field {printable(one)}", "this names no field", fix)
        found[name] = theirs
    return found


def _address(place: str, text: str) -> None:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
        _ = parts.port
    except ValueError:
        good = False
    if not good:
        raise Misconfigured(place, "this is no address", "write https://host/path, without a password")


def _asked(method: str, url: str, headers: Mapping[str, str], document: object = None) -> Any:
    _address("PROVIDER_URL", url)
    body = None if document is None else json.dumps(document).encode()
    more = {"accept": "application/json"} | ({"content-type": "application/json"} if body is not None else {})
    answer = _sent(method, url, {**more, **headers}, body)
    if not answer.is_success:
        raise Refused("the request", f"{_who(url)} answers {answer.status_code} {_said(answer)}".strip())
    if not answer.content:
        return {}
    try:
        return answer.json()
    except (ValueError, RecursionError):
        raise Refused("the answer", f"{_who(url)} answers something that is not JSON") from None


def _sent(method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> httpx.Response:
    """Redirects are not followed: they would carry tokens to an address that nobody has given."""
    try:
        with httpx.stream(method, url, headers=dict(headers), content=body, timeout=TIMEOUT) as answer:
            found = bytearray()
            for part in answer.iter_bytes():
                found += part
                if len(found) > _LONGEST_ANSWER:
                    raise Refused("the answer", f"{_who(url)} answers more than {_LONGEST_ANSWER} bytes")
            return httpx.Response(answer.status_code, content=bytes(found))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(_who(url), str(error) or type(error).__name__) from error


def _who(url: str) -> str:
    """The path and the query may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


# --- what is told -----------------------------------------------------------------------------------------------------


def _said(answer: httpx.Response) -> str:
    """What an answer says of an error, and of what, and the way out; not all of it, which may repeat what was sent."""
    try:
        told = answer.json()
    except (ValueError, RecursionError):
        return ""
    for name in ("error", "message", "detail"):
        if isinstance(told, dict) and isinstance(said := told.get(name), str):
            place, fix = (told.get(name) for name in ("place", "fix"))
            said = f"{place}: {said}" if isinstance(place, str) else said
            return printable(f"{said}; {fix}"[:300] if isinstance(fix, str) else said[:300])
    return ""


def _rows(answer: Any) -> list[dict[str, Any]]:
    """Those of a list, or of the first list that a document holds."""
    if isinstance(answer, dict):
        answer = next((value for value in answer.values() if isinstance(value, list)), [])
    return [one for one in answer if isinstance(one, dict)] if isinstance(answer, list) else []


def _without_secrets(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _without_secrets(told) for name, told in document.items() if not _PRIVATE.search(name)}
    return [_without_secrets(one) for one in document] if isinstance(document, list) else document


def _set(document: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for name in parents:
        document = document.setdefault(name, {})
    document[last] = value


def _get(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document.get(name) if isinstance(document, dict) else None
    return document
