"""examples/clients, as a person runs it: three tables fed by hand, and a client that comes, goes and comes back."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import later_port
from tests.running import Run

EXAMPLE = Path(__file__).parent.parent / "examples" / "clients" / "pipeline.py"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    shutil.copy(EXAMPLE, tmp_path / "pipeline.py")
    (tmp_path / "penstock.toml").write_text(f'[spark]\nreal_time_batch = "10 seconds"\n[page]\nport = {later_port()}\n')
    running = Run(tmp_path)
    running.start()
    yield running
    running.close()


DELETED = '{"key": "1", "value": null}'


def produce(run: Run, topic: str, line: str, *options: str) -> None:
    command = [sys.executable, "-m", "penstock", "produce", "--topic", topic, "--folder", str(run.folder)]
    layout = options or ("--key-separator", ":")
    subprocess.run([*command, *layout], input=f"{line}\n", text=True, check=True, capture_output=True)


def test_a_client_is_there_while_its_three_records_are(run: Run, eventually: Callable[..., None]) -> None:
    run.is_up(180)

    def client() -> dict[str, Any] | None:
        return run.rows("tp_clients").get('["1"]')

    def told() -> tuple[Any, ...] | None:
        row = client()
        return None if row is None else (row["name"], row["accountNumber"], row["status"], row["seen"]["count"])

    produce(run, "tp_prospects", '1:{"id": 1, "name": "augusto"}')
    produce(run, "tp_accounts", '1:{"id": 1, "accountNumber": "000.000.000-0"}')
    produce(run, "tp_enrichment_accounts", '1:{"id": 1, "status": "REGULAR"}')
    eventually(lambda: told() == ("augusto", "000.000.000-0", "REGULAR", 3), 120)
    produce(run, "tp_accounts", DELETED, "--json")
    eventually(lambda: client() is None, 120)
    produce(run, "tp_accounts", '1:{"id": 1, "accountNumber": "000.000.000-1"}')
    eventually(lambda: told() == ("augusto", "000.000.000-1", "REGULAR", 5), 120)
    produce(run, "tp_prospects", DELETED, "--json")
    eventually(lambda: client() is None, 120)

    # Six records, deletions among them, and each is in a row of the join.
    eventually(lambda: run.settled(6), 120)
    hops = [hop for hop in run.balance()["hops"] if hop["stage"] == "query:tp_clients"]
    assert sorted((hop["reads"], hop["outcomes"]["passed"], hop["note"]) for hop in hops) == [
        ("tp_accounts", 3, ""),
        ("tp_enrichment_accounts", 1, ""),
        ("tp_prospects", 2, ""),
    ]
    again = run.penstock("audit", "--recompute", "tp_clients", "--pipeline", str(run.file), "--json")
    report = json.loads(again.stdout)
    assert (again.returncode, report["equal"], report["conclusive"]) == (0, True, True)
    assert run.stop() == 0
