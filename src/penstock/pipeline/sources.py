"""The sources of a pipeline, as its settings want them."""

from collections.abc import Mapping

from penstock.collect.overlapping import overlapping
from penstock.collect.registry import has_option, source_at
from penstock.core.contracts import NeedsContext, Source, SourceContext
from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.description import Delivery, SourceSpec

SECRET = "$"
"""What begins so is read from the environment: a secret stands neither in a pipeline nor in its settings."""


def made(
    spec: SourceSpec,
    config: Config,
    delivery: Delivery,
    environ: Mapping[str, str] | None = None,
    home: SourceContext | None = None,
    name: str | None = None,
) -> Source:
    """The source; Misconfigured when its address or one of its options is wrong.

    Without `environ` secrets are left as they are said, and without `home` it belongs to nothing, which is enough to
    look at it. `name`: by which this process calls it, where several listen.
    """
    address = config.address(spec)
    if spec.custom is not None and address == spec.url:
        source = spec.custom
    else:
        options = dict(spec.options)
        if delivery is Delivery.AT_MOST_ONCE and has_option(address, "resume"):
            # Who wants nothing twice asks for nothing again.
            options["resume"] = False
        if config.collect.workers > 1 and has_option(address, "shared"):
            options["shared"] = True
        if environ is not None:
            options = {option: _told(spec, option, value, environ) for option, value in options.items()}
        source = source_at(address, name or spec.name, options)
    if home is not None and isinstance(source, NeedsContext):
        source = source.with_context(home)
    return source if spec.overlap == 1 else overlapping(source, spec.overlap_by, spec.overlap)


def shareable(spec: SourceSpec, config: Config) -> bool:
    """Whether several processes can listen for it."""
    return spec.custom is None and has_option(config.address(spec), "shared")


def of_worker(name: str, worker: int) -> str:
    """By which name another worker goes than the first. No name that a user gives has a dot in it."""
    return f"{name}.{worker}" if worker else name


def _told(spec: SourceSpec, option: str, value: object, environ: Mapping[str, str]) -> object:
    if isinstance(value, Mapping):
        return {name: _told(spec, f"{option}.{name}", one, environ) for name, one in value.items()}
    if not isinstance(value, str) or not value.startswith(SECRET):
        return value
    if (found := environ.get(value[1:])) is None:
        raise Misconfigured(
            f"source {spec.name}", f"{option} is in {value[1:]}, which the environment lacks", f"export {value[1:]}=…"
        )
    return found
