"""Runs a target as long as its inputs find new ways through the code: `python -m tests.fuzz.run TARGET [OPTION…]`.

Options are those of libFuzzer: `-runs=10000`, `-max_total_time=60`, `-seed=1`, and a folder for the inputs that found
something new. One that fails is written to `tests/fuzz/found/TARGET/`, from where it is tried in each test.
"""

import importlib
import sys
from pathlib import Path

from tests.fuzz.targets import WHERE, found

FOUND = Path(__file__).parent / "found"
WORDS = Path(__file__).parent / "words.dict"
KEPT = Path(".penstock/fuzz")


def main(name: str, *options: str) -> None:
    if name not in WHERE:
        raise SystemExit(f'"{name}" is no target; there are {", ".join(WHERE)}')
    # It has no types.
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["penstock", "examples"]):
        target = found(name)
    flags = [option for option in options if option.startswith("-")]
    folders = [Path(option) for option in options if not option.startswith("-")] or [KEPT / name]
    if not any(flag.startswith("-artifact_prefix=") for flag in flags):
        (FOUND / name).mkdir(parents=True, exist_ok=True)
        flags.append(f"-artifact_prefix={FOUND / name}/")
    folders[0].mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (folders[0] / f"seed-{number}").write_bytes(seed)
    if (FOUND / name).exists():
        folders.append(FOUND / name)
    usual = ["-max_len=600", "-timeout=10", "-rss_limit_mb=1024", f"-dict={WORDS}"]
    atheris.Setup([sys.argv[0], *usual, *flags, *map(str, folders)], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
