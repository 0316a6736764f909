"""The rest of a path with any characters, written `{name:rest}` in a route."""

from starlette.convertors import Convertor, register_url_convertor


class _Rest(Convertor[str]):
    # Starlette's own `path` ends at a line feed.
    regex = r"[\s\S]*"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


def register_rest_convertor() -> None:
    """Let routes use `{name:rest}`."""
    register_url_convertor("rest", _Rest())
