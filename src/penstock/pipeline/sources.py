"""Makes the sources of a pipeline, with the addresses and options of its settings."""

from collections.abc import Mapping

from penstock.collect.overlapping import Overlapping
from penstock.collect.registry import has_option, source_at
from penstock.core.contracts import Guarantee, NeedsContext, Source, SourceContext
from penstock.core.errors import Misconfigured
from penstock.pipeline.config import Config
from penstock.pipeline.description import SourceSpec

SECRET = "$"
"""The prefix of options that are read from the environment, such as secrets."""


def make_source(
    spec: SourceSpec,
    config: Config,
    delivery: Guarantee,
    environ: Mapping[str, str] | None = None,
    context: SourceContext | None = None,
    name: str | None = None,
) -> Source:
    """Make a source; Misconfigured if its address or an option is wrong.

    `environ`: replaces options such as `$TOKEN`. Without `environ` and `context` the source can be inspected, but not
    opened. `name`: its name in this process, if several workers have the source.
    """
    address = config.source_address(spec)
    if spec.custom is not None and address == spec.url:
        source = spec.custom
    else:
        options = dict(spec.options)
        if delivery is Guarantee.AT_MOST_ONCE and has_option(address, "resume"):
            # A resumed source may send records again.
            options["resume"] = False
        if config.collect.workers > 1 and has_option(address, "shared"):
            options["shared"] = True
        if environ is not None:
            options = {option: _resolve(spec, option, value, environ) for option, value in options.items()}
        source = source_at(address, name or spec.name, options)
    if context is not None and isinstance(source, NeedsContext):
        source = source.with_context(context)
    return source if spec.overlap == 1 else Overlapping(source, spec.overlap_by, spec.overlap)


def can_be_shared(spec: SourceSpec, config: Config) -> bool:
    """Whether several processes can listen for it."""
    return spec.custom is None and has_option(config.source_address(spec), "shared")


def worker_name(name: str, worker: int) -> str:
    """The name of a source in a worker. Names of users have no dot."""
    return f"{name}.{worker}" if worker else name


def _resolve(spec: SourceSpec, option: str, value: object, environ: Mapping[str, str]) -> object:
    if isinstance(value, Mapping):
        return {name: _resolve(spec, f"{option}.{name}", one, environ) for name, one in value.items()}
    if not isinstance(value, str) or not value.startswith(SECRET):
        return value
    if (found := environ.get(value[1:])) is None:
        raise Misconfigured(
            f"source {spec.name}", f"{option} is {value}, but that variable is not set", f"export {value[1:]}=…"
        )
    return found
