"""The RSVP analyzer on other middleware than Kafka: one setting, and the balance closes."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from tests.running import Outside, Run, demo, later_port

RECORDS = 3_000
ADDRESSES = ["redis://", "file://"]
Eventually = Callable[..., None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Side by side: most of their time is that of coming up."""
    with ExitStack() as stack:
        found = {}
        for address in ADDRESSES:
            folder, outside = tmp_path_factory.mktemp("run"), stack.enter_context(closing(Outside(RECORDS, 300, 20)))
            (folder / "pipeline.py").write_text(demo())
            settings = f'[sources]\nrsvps = "{outside.url}"\n[page]\nport = {later_port()}\n'
            (folder / "penstock.toml").write_text(f'[channels]\naddress = "{address}"\n{settings}')
            running = stack.enter_context(closing(Run(folder)))
            running.start()
            found[address] = running, outside
        for running, outside in found.values():
            running.is_up(240)
            outside.start()
        yield {address: running for address, (running, _) in found.items()}


@pytest.mark.parametrize("address", ADDRESSES)
def test_every_hop_accounts_for_every_record(address: str, runs: dict[str, Run], eventually: Eventually) -> None:
    running = runs[address]
    eventually(lambda: running.settled(RECORDS), 180)
    assert running.penstock("audit", "--strict").returncode == 0
    told = json.loads(running.penstock("audit", "--json").stdout)
    assert len(told["hops"]) == 17
    for hop in told["hops"]:
        assert hop["due"] == sum(hop["outcomes"].values()), hop
        assert hop["missing"] == hop["in_flight"] == hop["outcomes"]["refused"] == 0, hop
    assert [hop["due"] for hop in told["hops"] if hop["reads"] == "rsvps"] == [RECORDS] * 6
    assert running.rows("by_country")
    services = json.loads((running.folder / ".penstock" / "services.json").read_text())
    assert services["kafka"] is None
