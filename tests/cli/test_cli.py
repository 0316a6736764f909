"""The command line: help, errors, `status` and `doctor` where nothing runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock import __version__
from penstock.cli import COMMANDS, TRACE, app, main, module_of
from penstock.core.errors import Misconfigured

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
HELP = """
import sys
sys.argv = ["penstock", "--help"]
from penstock.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def penstock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def misconfigured(result: Result) -> Misconfigured:
    assert isinstance(result.exception, Misconfigured), result.output
    return result.exception


def test_help_lists_every_command_with_its_whole_sentence_and_without_waiting_for_spark(tmp_path: Path) -> None:
    found = python(tmp_path, "-c", HELP)
    assert found.returncode == 0
    width = max(map(len, COMMANDS))
    for name, sentence in COMMANDS.items():
        assert f"  {name:{width}}  {sentence}\n" in found.stdout
    modules = set(found.stderr.split())
    assert "penstock.cli" in modules
    assert not modules & {"pyspark", "confluent_kafka", "altair", "deltalake", "starlette"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(command: str) -> None:
    found = CliRunner().invoke(app, [command, "--help"], prog_name="penstock")
    assert found.exit_code == 0
    assert f"Usage: penstock {command} [OPTIONS]" in found.stdout
    doc = getattr(module_of(command), command).__doc__
    assert doc.split()[:4] == found.stdout.split("\n\n")[1].split()[:4]


def test_the_version_is_that_of_the_package() -> None:
    found = CliRunner().invoke(app, ["--version"])
    assert (found.exit_code, found.stdout.split()) == (0, ["penstock", version("penstock")])
    assert __version__ == version("penstock")


def test_without_a_command_the_help_is_shown() -> None:
    found = CliRunner().invoke(app, [])
    assert found.exit_code == 2
    assert "Commands:" in found.output


def test_an_unknown_command_is_told() -> None:
    found = CliRunner().invoke(app, ["rnu"])
    assert found.exit_code == 2
    assert "No such command 'rnu'" in found.stderr


def test_an_unknown_option_is_told() -> None:
    found = CliRunner().invoke(app, ["status", "--jsn"])
    assert found.exit_code == 2
    assert "No such option: --jsn" in found.stderr


def test_an_error_is_a_sentence_on_standard_error_and_exits_with_2(tmp_path: Path) -> None:
    found = python(tmp_path, "-m", "penstock", "run", "absent.py")
    assert found.returncode == 2
    assert found.stderr.startswith("penstock: absent.py: ")
    assert len(found.stderr.splitlines()) == 1
    assert not (tmp_path / ".penstock").exists()


@pytest.mark.parametrize("command", [["plan"], ["run"], ["tier", "audit"]])
def test_a_broken_file_is_named_with_its_line(
    tmp_path: Path, penstock: Callable[..., Result], command: list[str]
) -> None:
    (tmp_path / "pipe.py").write_text('from penstock import Pipeline\n\napp = Pipeline("my pipe")\n')
    assert misconfigured(penstock(*command, "pipe.py")).location == "pipe.py:3"


def test_a_wrong_setting_is_answered_with_the_right_one(tmp_path: Path, penstock: Callable[..., Result]) -> None:
    (tmp_path / "penstock.toml").write_text('[kafka]\ncompresion = "lz4"\n')
    error = misconfigured(penstock("status"))
    assert "[kafka]" in error.location
    assert '"compression"' in error.fix


def test_status_says_what_to_do_where_nothing_runs(tmp_path: Path, penstock: Callable[..., Result]) -> None:
    assert "penstock run FILE" in misconfigured(penstock("status")).fix
    assert not (tmp_path / ".penstock").exists()


def test_doctor_prints_its_findings_as_json(tmp_path: Path, penstock: Callable[..., Result]) -> None:
    found = penstock("doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(found.stdout)}
    assert {"Python", "Java", "jars", "Redis", "settings", "state folder", "memory", "disk"} <= set(findings)
    assert str(tmp_path) in findings["settings"]["details"]
    assert f"{tmp_path}/.penstock" in findings["state folder"]["details"]
    assert found.exit_code == (0 if all(finding["ok"] for finding in findings.values()) else 1)


def test_doctor_finds_a_wrong_setting_and_goes_on(tmp_path: Path, penstock: Callable[..., Result]) -> None:
    (tmp_path / "penstock.toml").write_text("[page]\nport = 0\n")
    found = penstock("doctor")
    assert found.exit_code == 1
    assert 'wrong settings: penstock.toml, [page]: "port" is 0' in found.stdout
    assert "processors" in found.stdout


def test_doctor_looks_at_a_folder_that_is_not_there_yet(tmp_path: Path, penstock: Callable[..., Result]) -> None:
    found = penstock("doctor", "--folder", "to/come", "--json")
    findings = {finding["what"]: finding for finding in json.loads(found.stdout)}
    assert "GiB free" in findings["disk"]["details"]
    assert not (tmp_path / "to").exists()


def test_a_fault_of_our_own_is_a_line_and_its_trace_is_there_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("penstock.cli.app", fail)
    # It would stay as it is for all tests that follow in this process.
    monkeypatch.setattr("os.umask", lambda mode: mode)
    monkeypatch.setattr(sys, "argv", ["penstock", "status"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 70
    assert len(capsys.readouterr().err.splitlines()) == 1
    monkeypatch.setenv(TRACE, "1")
    with pytest.raises(ZeroDivisionError):
        main()
