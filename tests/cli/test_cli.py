"""The command line as a person meets it: in a process of its own."""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import __version__
from penstock.cli import COMMANDS, TRACE, app, main

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


def penstock(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "penstock", *arguments)


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
    doc = getattr(import_module(f"penstock.cli.{command}"), command).__doc__
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


def test_to_run_an_absent_file_is_answered_with_a_sentence(tmp_path: Path) -> None:
    found = penstock(tmp_path, "run", "absent.py")
    assert found.returncode == 2
    assert found.stderr == (
        "penstock: absent.py: there is no such file; give the path of a Python file that makes a Pipeline\n"
    )
    assert not (tmp_path / ".penstock").exists()


@pytest.mark.parametrize("command", [["plan"], ["run"], ["tier", "audit"]])
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "pipe.py").write_text('from penstock import Pipeline\n\napp = Pipeline("my pipe")\n')
    found = penstock(tmp_path, *command, "pipe.py")
    assert found.returncode == 2
    assert found.stderr.startswith("penstock: pipe.py:3: pipeline 'my pipe': this is not a name; begin with a letter")
    assert "Traceback" not in found.stderr


def test_a_wrong_setting_is_answered_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[kafka]\ncompresion = "lz4"\n')
    found = penstock(tmp_path, "status")
    assert found.returncode == 2
    said = 'penstock: penstock.toml, [kafka]: "compresion" is not a setting; did you mean "compression"?\n'
    assert found.stderr == said


def test_status_says_what_to_do_where_nothing_runs(tmp_path: Path) -> None:
    found = penstock(tmp_path, "status")
    assert found.returncode == 2
    assert found.stderr == f"penstock: {tmp_path}: nothing runs here; start it: penstock run FILE, or penstock demo\n"
    assert not (tmp_path / ".penstock").exists()


def test_doctor_tells_its_findings_as_json(tmp_path: Path) -> None:
    found = penstock(tmp_path, "doctor", "--json")
    findings = {finding["what"]: finding for finding in json.loads(found.stdout)}
    assert {"Python", "Java", "jars", "Redis", "settings", "state folder", "memory", "disk"} <= set(findings)
    assert findings["settings"]["told"] == f"{tmp_path} is in order"
    assert findings["state folder"]["told"] == f"{tmp_path}/.penstock is free"
    assert found.returncode == (0 if all(finding["good"] for finding in findings.values()) else 1)


def test_doctor_finds_a_wrong_setting_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text("[page]\nport = 0\n")
    found = penstock(tmp_path, "doctor")
    assert found.returncode == 1
    assert 'wrong settings: penstock.toml, [page]: "port" is 0' in found.stdout
    assert "processors" in found.stdout


def test_doctor_looks_at_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    found = penstock(tmp_path, "doctor", "--folder", "to/come", "--json")
    findings = {finding["what"]: finding for finding in json.loads(found.stdout)}
    assert "GiB free" in findings["disk"]["told"]
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
