"""Reads `penstock.toml`, its profiles, and the environment.

Each package has its own class of settings; this module only reads them. A table of the file has the name of its
section. With a profile, `[profiles.NAME.SECTION]` overrides it. The environment variable `PENSTOCK_SECTION_KEY`
overrides both.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.core.errors import Misconfigured
from penstock.core.text import HIDDEN, did_you_mean, is_secret

FILE = "penstock.toml"
PREFIX = "PENSTOCK_"


class Section(BaseModel):
    """The base of every settings class: frozen, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def load(
    sections: Mapping[str, type[Section]],
    folder: Path,
    profile: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Section]:
    """Read every section from its defaults, the file in `folder`, the profile and the environment, in this order."""
    environ = os.environ if environ is None else environ
    profile = profile or environ.get(f"{PREFIX}PROFILE") or None
    document = _read(folder / FILE)
    profiles = _table(f"{FILE}, [profiles]", "profiles", document.pop("profiles", {}))
    _refuse_unknown(FILE, "table", document, sections)
    layers = [(FILE, document)]
    if profile is not None:
        if profile not in profiles:
            raise Misconfigured(FILE, f'there is no profile "{profile}"', _choices(profile, profiles, "profile"))
        location = f"{FILE}, [profiles.{profile}]"
        overrides = _table(location, f"profiles.{profile}", profiles[profile])
        _refuse_unknown(location, "table", overrides, sections)
        layers.append((f"{FILE}, profile {profile}", overrides))
    layers.append(("environment", _from_environment(sections, environ)))
    return {name: _section(name, model, layers) for name, model in sections.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Misconfigured(FILE, f"it is not TOML: {error}") from error
    except OSError as error:
        raise Misconfigured(FILE, f"it cannot be read: {error.strerror}") from error


def _from_environment(sections: Mapping[str, type[Section]], environ: Mapping[str, str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, model in sections.items():
        start = f"{PREFIX}{name.upper()}_"
        found[name] = {
            variable.removeprefix(start).lower(): value
            for variable, value in environ.items()
            if variable.startswith(start)
        }
        _refuse_unknown(f"environment, {start}*", "setting", found[name], _keys(model, found[name]))
    return found


def _section(name: str, model: type[Section], layers: Iterable[tuple[str, Mapping[str, Any]]]) -> Section:
    values: dict[str, Any] = {}
    locations: dict[str, str] = {}
    for location, tables in layers:
        where = f"{location}, [{name}]"
        table = _table(where, name, tables.get(name, {}))
        _refuse_unknown(where, "setting", table, _keys(model, table))
        for key, value in table.items():
            values[key], locations[key] = value, where
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or name
        where = locations.get(str(first["loc"][0]) if first["loc"] else "", f"[{name}]")
        raise Misconfigured(
            where,
            f'"{key}" is {HIDDEN if is_secret(key) else repr(first["input"])}',
            first["msg"].removeprefix("Value error, "),
        ) from error


def _table(location: str, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Misconfigured(
            location, "this has to be a table", f'write "[{name}]" on its own line and the settings below it'
        )
    return value


def _keys(model: type[Section], keys: Iterable[str]) -> Iterable[str]:
    """The keys of a section. An open section accepts all `keys`."""
    return keys if model.model_config.get("extra") == "allow" else model.model_fields


def _refuse_unknown(location: str, kind: str, keys: Iterable[str], accepted: Iterable[str]) -> None:
    for key in keys:
        if key not in accepted:
            raise Misconfigured(location, f'"{key}" is not a {kind}', _choices(key, accepted, kind))


def _choices(name: str, accepted: Iterable[str], kind: str) -> str:
    accepted = sorted(accepted)
    others = f"the {kind}s are {', '.join(accepted)}" if accepted else f"there are no {kind}s"
    return did_you_mean(name, accepted, others)
