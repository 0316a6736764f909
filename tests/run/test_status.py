from collections.abc import Callable

import orjson

from penstock.run.status import Status, follow_status
from penstock.testing import MemoryChannels

SECOND = 1_000_000


def test_the_last_word_of_each_process_counts() -> None:
    channels = MemoryChannels(partitions=2)
    for process, at in [("collect", 1), ("audit", 2), ("collect", 3)]:
        said = {"at": at, "nodes": {f"part:{process}": {"count": at}}}
        channels.append("status", orjson.dumps(said), process.encode())
    channels.append("status", b"{}")
    channels.append("status", None, b"collect")
    found = Status.read(channels, "status")
    assert {process: said["at"] for process, said in found.processes.items()} == {"collect": 3, "audit": 2}
    assert found.nodes == {"part:collect": {"count": 3}, "part:audit": {"count": 2}}


def test_a_channel_in_which_nobody_spoke_is_not_waited_for() -> None:
    assert Status.read(MemoryChannels(), "status").processes == {}


def test_it_is_told_as_json() -> None:
    usage = {"kafka": {"memory": 100, "deaths": 0}, "load": {"memory": 20, "deaths": 1}}
    found = Status(
        {
            "run": {"at": 1, "nodes": {}, "usage": usage},
            "audit": {"at": 1, "nodes": {"channel:a": {"count": 1}}, "balance": {"whole": True}},
        }
    )
    assert found.to_json() == {
        "nodes": {"channel:a": {"count": 1}},
        "balance": {"whole": True},
        "usage": usage,
        "memory": 120,
    }


NOW = 60 * SECOND


def test_the_verdict_is_that_of_the_audit_while_every_process_reports() -> None:
    def verdict(late: int, verdict: str) -> str:
        said = {"load": {"at": NOW - late, "nodes": {}}}
        audit = {"audit": {"at": NOW, "nodes": {}, "balance": {"verdict": verdict}}}
        return Status({**said, **audit}).verdict(NOW)

    assert verdict(10 * SECOND, "whole") == "whole"
    assert verdict(10 * SECOND + 1, "whole") == "not known"
    assert verdict(0, "not known") == "not known"
    assert verdict(0, "missing") == verdict(11 * SECOND, "missing") == "missing"


def test_before_the_first_balance_the_verdict_is_not_known() -> None:
    assert Status({}).verdict(0) == Status({"load": {"at": 0, "nodes": {}}}).verdict(0) == "not known"


def test_a_process_that_is_no_part_of_the_run_any_more_is_not_waited_for() -> None:
    run = {"at": NOW, "nodes": {}, "usage": {"load": {"memory": 1}, "audit": {"memory": 1}}}
    audit = {"at": NOW, "nodes": {}, "balance": {"verdict": "whole"}}
    said = {"run": run, "audit": audit, "load": {"at": NOW, "nodes": {}}, "deliver": {"at": 0, "nodes": {}}}
    assert Status(said).verdict(NOW) == "whole"
    assert Status({**said, "load": {"at": 0, "nodes": {}}}).verdict(NOW) == "not known"


def test_who_listens_hears_the_last_word_of_each(eventually: Callable[..., None]) -> None:
    channels = MemoryChannels(partitions=2)
    channels.append("status", orjson.dumps({"at": 1}), b"audit")
    with follow_status(channels, "status") as said:
        eventually(lambda: said.get("audit") == {"at": 1})
        channels.append("status", orjson.dumps({"at": 2}), b"audit")
        eventually(lambda: said.get("audit") == {"at": 2})


def test_alarms_are_told() -> None:
    alarm = {"text": "it is slow"}
    found = Status({"audit": {"at": 5, "nodes": {}, "balance": {"whole": True, "alarms": [alarm]}}})
    assert found.alarms == [alarm]
    assert Status({"audit": {"at": 5, "nodes": {}}}).alarms == []
