"""The pages: their files, the script that draws charts, and the JSON documents that describe what to draw."""

import asyncio
import gzip
import html
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import orjson
import vl_convert
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

VEGA_VERSION = version("vl-convert-python")
_SNIPPET = "window.vegaEmbed = vegaEmbed;"
_PATHS = {"index.html": "/", "audit.html": "/audit"}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A chart of the page: a Vega-Lite specification whose data is named "rows" and comes from a feed.

    Without a specification, the rows are shown as a table.
    """

    name: str
    feed: str
    title: str
    doc: str
    spec: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the page, also compressed."""

    body: bytes
    gzipped: bytes
    media_type: str
    etag: str
    cache: str

    @classmethod
    def of(cls, body: bytes, media_type: str, cache: str = "no-cache") -> "_File":
        return cls(body, gzip.compress(body, 6), media_type, f'"{blake2b(body, digest_size=12).hexdigest()}"', cache)

    def response(self, request: Request) -> Response:
        headers = {"etag": self.etag, "cache-control": self.cache, "vary": "accept-encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.gzipped, headers={**headers, "content-encoding": "gzip"}, media_type=self.media_type)
        return Response(self.body, headers=headers, media_type=self.media_type)


class Site:
    """All that a browser loads before it follows feeds."""

    def __init__(
        self, charts: Sequence[ChartSpec], graph: Mapping[str, object], title: str, cache: Path | None
    ) -> None:
        self._cache = cache
        self._vega: asyncio.Future[_File] | None = None
        replacements = {"{{title}}": html.escape(title), "{{vega}}": VEGA_VERSION}
        self._files = {
            _PATHS.get(file.name, f"/{file.name}"): _page_file(file, replacements)
            for file in (files("penstock.deliver") / "page").iterdir()
        }
        for path, document in (("/charts", [asdict(chart) for chart in charts]), ("/graph", graph)):
            self._files[path] = _File.of(orjson.dumps(document), "application/json")

    @asynccontextmanager
    async def preparing(self) -> AsyncIterator[None]:
        """Build the script of the charts, while other files are served already."""
        self._vega = asyncio.ensure_future(asyncio.to_thread(self._build_vega))
        try:
            yield
        finally:
            await self._vega

    def routes(self) -> list[Route]:
        return [*(Route(path, self._file) for path in self._files), Route("/vega.js", self._script)]

    async def _file(self, request: Request) -> Response:
        # Starlette's routes also match an address with a line feed at its end.
        return self._files[request.scope["path"].removesuffix("\n")].response(request)

    async def _script(self, request: Request) -> Response:
        assert self._vega is not None, "outside of the lifespan of the app"
        # Shielded: a browser that disconnects must not cancel it for others.
        return (await asyncio.shield(self._vega)).response(request)

    def _build_vega(self) -> _File:
        # The address on the page contains the version.
        return _File.of(vega_script(self._cache), "text/javascript", "public, max-age=31536000, immutable")


def _page_file(file: Traversable, replacements: Mapping[str, str]) -> _File:
    text = file.read_text(encoding="utf-8")
    if file.name.endswith(".html"):
        for placeholder, value in replacements.items():
            text = text.replace(placeholder, value)
    return _File.of(text.encode(), _TYPES[Path(file.name).suffix])


def vega_script(cache: Path | None) -> bytes:
    """The script that draws the charts: Vega, Vega-Lite and Embed, cached by version because bundling takes seconds."""
    path = cache and cache / f"vega-{VEGA_VERSION}.js"
    if path and path.is_file():
        return path.read_bytes()
    script = vl_convert.javascript_bundle(_SNIPPET).encode()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed, so that no process reads a part of it.
        handle, draft = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(script)
        Path(draft).replace(path)
    return script
