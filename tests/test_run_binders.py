"""The RSVP analyzer on other middleware than Kafka: one setting, and the balance closes."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.ports import later_port
from tests.running import Outside, Run, demo, exposed, readable

RECORDS = 3_000
Eventually = Callable[..., None]


@pytest.mark.parametrize("address", ["redis://", "file://"])
def test_every_hop_accounts_for_every_record(address: str, tmp_path: Path, eventually: Eventually) -> None:
    with closing(Outside(RECORDS, 300, 20)) as outside, closing(Run(tmp_path)) as running:
        (tmp_path / "pipeline.py").write_text(demo())
        beside = f'[sources]\nrsvps = "{outside.url.replace("://", "://ada:hush@")}"\n[page]\nport = {later_port()}\n'
        (tmp_path / "penstock.toml").write_text(f'[channels]\naddress = "{address}"\n{beside}')
        running.start()
        running.is_up(240)
        outside.start()
        eventually(lambda: running.settled(RECORDS), 180)
        assert running.penstock("audit", "--strict").returncode == 0
        told = json.loads(running.penstock("audit", "--json").stdout)
        assert len(told["hops"]) == 17
        for hop in told["hops"]:
            assert hop["due"] == sum(hop["outcomes"].values()), hop
            assert hop["missing"] == hop["in_flight"] == hop["outcomes"]["refused"] == 0, hop
        assert [hop["due"] for hop in told["hops"] if hop["reads"] == "rsvps"] == [RECORDS] * 6
        assert running.rows("by_country")
        shown = [running.said, running.penstock("status").stdout]
        shown += [json.dumps(running.page(path)) for path in ("/status", "/graph")]
        shown += [log.read_text() for log in (tmp_path / ".penstock" / "logs").glob("*.log")]
        assert "hush" not in "".join(shown)
        assert exposed(running.pid) == []
        assert readable(tmp_path / ".penstock") == []
        services = json.loads((tmp_path / ".penstock" / "services.json").read_text())
        assert services["kafka"] is None
