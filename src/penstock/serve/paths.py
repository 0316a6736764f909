"""The rest of a path, whatever it holds: slashes, line feeds, anything. Written `{name:anything}` in a route."""

from starlette.convertors import Convertor, register_url_convertor


class _Anything(Convertor[str]):
    # Starlette's own `path` ends at a line feed.
    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


def allow_anything() -> None:
    """Let routes use it."""
    register_url_convertor("anything", _Anything())
