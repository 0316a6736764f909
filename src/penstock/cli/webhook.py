"""`penstock webhook`: register webhooks at a provider, and send one."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import httpx
import typer

from penstock.cli.options import AsJson
from penstock.cli.standard import print_result
from penstock.core.errors import Misconfigured, Refused, Unavailable
from penstock.core.signatures import new_secret, parse_secrets
from penstock.core.text import printable
from penstock.web.webhook import TIMEOUT, Message, Rejected, Webhook, new_id

_MAX_RESPONSE = 4 << 20
_FIELDS = ("url", "events", "id", "secret")
_PRIVATE = re.compile(r"secret|token|password|credential|api_?key", re.IGNORECASE)
"""Fields of a response that `list` does not show."""

Api = Annotated[str, typer.Argument(metavar="PROVIDER_URL", help="The address of the provider's webhook API.")]
Headers = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        help="A header of the request, such as 'Authorization: Bearer …'. May be repeated.",
        show_default=False,
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        help="The provider's name for url, events, id or secret, such as url=target.href. May be repeated.",
        show_default=False,
    ),
]
Secret = Annotated[
    str, typer.Option(envvar="PENSTOCK_WEBHOOK_SECRET", help="The secret: whsec_…, or any text.", show_default=False)
]

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def webhook() -> None:
    """Register, list and remove webhooks at a provider; sign and send a message."""


@app.command()
def register(
    provider: Api,
    callback: Annotated[
        str, typer.Option(help="The address to which the provider sends its messages.", show_default=False)
    ],
    events: Annotated[
        list[str] | None,
        typer.Option(
            "--events", help="The events to receive, separated by commas. May be repeated.", show_default=False
        ),
    ] = None,
    header: Headers = None,
    field: Fields = None,
    as_json: AsJson = False,
) -> None:
    """Register a webhook, and print its id and secret.

    The secret is shown only this time.
    """
    names = _names(field)
    _require_url("--callback", callback)
    document: dict[str, Any] = {}
    _set(document, names["url"], callback)
    if selected := [one.strip() for some in events or () for one in some.split(",") if one.strip()]:
        _set(document, names["events"], selected)
    response = _request("POST", provider, _headers(header), document)
    found = {"id": _get(response, names["id"]), "secret": _get(response, names["secret"])}
    shown = {name: "(not in the response)" if value is None else printable(str(value)) for name, value in found.items()}
    print_result(as_json, found, [f"{name:6}  {value}" for name, value in shown.items()])


@app.command("list")
def list_(provider: Api, header: Headers = None, field: Fields = None, as_json: AsJson = False) -> None:
    """List the webhooks at a provider, without their secrets."""
    names = _names(field)
    response = _request("GET", provider, _headers(header))
    rows = [_without_secrets(one) for one in _rows(response)]
    lines = []
    for row in rows:
        events = _get(row, names["events"])
        listed = ", ".join(map(str, events)) if isinstance(events, list) else "all events" if events is None else events
        lines.append(printable(f"{_get(row, names['id'])}  {_get(row, names['url'])}  {listed}"))
    print_result(as_json, rows, lines or ["no webhooks are registered"])


@app.command()
def remove(
    provider: Api,
    id_: Annotated[str, typer.Argument(metavar="ID", help="The id of the webhook.")],
    header: Headers = None,
) -> None:
    """Remove a webhook from a provider."""
    _request("DELETE", f"{provider.rstrip('/')}/{quote(id_, safe='')}", _headers(header))
    typer.echo(f"removed {printable(id_)}")


@app.command()
def secret() -> None:
    """Print a new secret, for the sender and the receiver of a webhook."""
    typer.echo(new_secret())


@app.command()
def send(
    url: Annotated[str, typer.Argument(help="The address of the webhook.")],
    file: Annotated[Path, typer.Argument(help="The file with the body; - is standard input.")],
    secret: Secret,
    id_: Annotated[str | None, typer.Option("--id", help="The id of the message.", show_default="a new one")] = None,
) -> None:
    """Sign a message and send it once.

    Exit code: 0 when the receiver accepts it, 1 when it rejects it, 2 on an error.
    """
    _require_url("URL", url)
    secrets = parse_secrets("--secret", secret)
    if not secrets:
        raise Misconfigured("--secret", "it is empty", "give the secret of the webhook")
    try:
        body = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise Misconfigured(str(file), error.strerror or str(error), "give a file that can be read") from error
    message = Message(id_ if id_ is not None else new_id(), body)
    with httpx.Client(timeout=TIMEOUT) as client:
        try:
            Webhook(url, secrets[0]).post(client, message)
        except Rejected as error:
            typer.echo(f"{message.id}: {error}")
            raise typer.Exit(1) from error
    typer.echo(f"{message.id}: accepted")


# --- options ----------------------------------------------------------------------------------------------------------


def _headers(options: Sequence[str] | None) -> dict[str, str]:
    found = {}
    for number, one in enumerate(options or (), 1):
        name, colon, value = one.partition(":")
        if not colon or not name.strip().isascii() or not name.strip() or "\n" in one or "\r" in one:
            # The text may be a token, so the message does not repeat it.
            raise Misconfigured(f"--header, number {number}", "it is not a header", "write 'Name: value'")
        found[name.strip()] = value.strip()
    return found


def _names(options: Sequence[str] | None) -> dict[str, str]:
    found = {name: name for name in _FIELDS}
    for one in options or ():
        name, equals, path = one.partition("=")
        if name not in _FIELDS or not equals or not all(path.split(".")):
            fix = f"write NAME=PATH, where NAME is one of {', '.join(_FIELDS)}"
            raise Misconfigured(f"--field {printable(one)}", "it is not a field", fix)
        found[name] = path
    return found


def _require_url(where: str, text: str) -> None:
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.username is None
        _ = parts.port
    except ValueError:
        valid = False
    if not valid:
        raise Misconfigured(where, "it is not an address", "write https://host/path, without a password")


# --- requests to a provider -------------------------------------------------------------------------------------------


def _request(method: str, url: str, headers: Mapping[str, str], document: object = None) -> Any:
    """The response of the provider. Redirects are not followed: they would send tokens to another address."""
    _require_url("PROVIDER_URL", url)
    body = None if document is None else json.dumps(document).encode()
    more = {"accept": "application/json"} | ({"content-type": "application/json"} if body is not None else {})
    content = bytearray()
    try:
        with httpx.stream(method, url, headers={**more, **headers}, content=body, timeout=TIMEOUT) as response:
            for part in response.iter_bytes():
                content += part
                if len(content) > _MAX_RESPONSE:
                    raise Refused("the response", f"{_host(url)} sends more than {_MAX_RESPONSE} bytes")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(_host(url), str(error) or type(error).__name__) from error
    try:
        found = json.loads(content) if content else {}
    except (ValueError, RecursionError):
        found = None
    if not response.is_success:
        raise Refused("the request", f"{_host(url)} answers {response.status_code} {_error_text(found)}".strip())
    if found is None:
        raise Refused("the response", f"{_host(url)} answers with text that is not JSON")
    return found


def _host(url: str) -> str:
    """The path and the query may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _error_text(document: Any) -> str:
    """The error in a response: problem, place and fix. Other fields may repeat what was sent."""
    for name in ("error", "message", "detail"):
        if isinstance(document, dict) and isinstance(problem := document.get(name), str):
            where, fix = (document.get(name) for name in ("place", "fix"))
            problem = f"{where}: {problem}" if isinstance(where, str) else problem
            return printable(f"{problem}; {fix}"[:300] if isinstance(fix, str) else problem[:300])
    return ""


def _rows(document: Any) -> list[dict[str, Any]]:
    """The objects of a list, or of the first list in an object."""
    if isinstance(document, dict):
        document = next((value for value in document.values() if isinstance(value, list)), [])
    return [one for one in document if isinstance(one, dict)] if isinstance(document, list) else []


def _without_secrets(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _without_secrets(value) for name, value in document.items() if not _PRIVATE.search(name)}
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
