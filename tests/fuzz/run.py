"""Runs a target in libFuzzer, guided by coverage: `python -m tests.fuzz.run TARGET [OPTION…]`; no target: lists all.

Options are those of libFuzzer: `-runs=10000`, `-max_total_time=60`, `-seed=1`, and a folder for inputs that reach new
code. A failing input is written to `tests/fuzz/corpus/TARGET/`; the tests run all inputs of the corpus.
"""

import importlib
import sys
from pathlib import Path

from tests.fuzz.target import TARGETS, Target

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
GENERATED = Path(".penstock/fuzz")
# Modules are imported with their target only, so that they can be instrumented.
MODULES = {
    **dict.fromkeys(("lines", "lengths", "channel_record", "events"), "streams"),
    **dict.fromkeys(("body_lines", "gzip_bodies", "gzip_files"), "bodies"),
    **dict.fromkeys(("hello", "websocket_query", "handshake", "post_options"), "handshakes"),
    **dict.fromkeys(("messages", "trades", "timestamps", "retry_after_header", "record_keys"), "messages"),
    **dict.fromkeys(("pages", "paging"), "pages"),
    **dict.fromkeys(("cursors", "progress", "bookmarks", "origins"), "cursors"),
    **dict.fromkeys(("signatures", "webhooks", "secrets", "receipts"), "signatures"),
    **dict.fromkeys(("addresses", "gateway_values"), "addresses"),
}


def load(name: str) -> Target:
    importlib.import_module(f"tests.fuzz.{MODULES[name]}")
    return TARGETS[name]


def main(name: str = "", *options: str) -> None:
    if not name:
        print(*MODULES)  # noqa: T201
        return
    if name not in MODULES:
        raise SystemExit(f'unknown target "{name}"; the targets are {", ".join(MODULES)}')
    # atheris has no types.
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["penstock", "examples"]):
        target = load(name)
    flags = [option for option in options if option.startswith("-")]
    folders = [Path(option) for option in options if not option.startswith("-")] or [GENERATED / name]
    if not any(flag.startswith("-artifact_prefix=") for flag in flags):
        (CORPUS / name).mkdir(parents=True, exist_ok=True)
        flags.append(f"-artifact_prefix={CORPUS / name}/")
    folders[0].mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (folders[0] / f"seed-{number}").write_bytes(seed)
    if (CORPUS / name).exists():
        folders.append(CORPUS / name)
    defaults = ["-max_len=600", "-timeout=10", "-rss_limit_mb=1024", f"-dict={FOLDER / 'dictionary.txt'}"]
    atheris.Setup([sys.argv[0], *defaults, *flags, *map(str, folders)], target.check)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
