"""What wraps a source and has its shape."""

from dataclasses import dataclass

from penstock.core.contracts import Guarantee, Source


@dataclass(frozen=True)
class Wrapping:
    """Who a source is and what it promises, unless the wrapper says otherwise. How it is opened, the wrapper says."""

    source: Source

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def guarantee(self) -> Guarantee:
        return self.source.guarantee

    @property
    def description(self) -> str:
        return self.source.description

    @property
    def numbered(self) -> object:
        return getattr(self.source, "numbered", None)
