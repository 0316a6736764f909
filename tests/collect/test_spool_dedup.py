"""What waits on disk and is in its channel already."""

from penstock.collect.spool import SpoolDedup
from penstock.core.record import Origin, Record


def waiting(*numbers: int, channel: str = "into") -> list[tuple[str, Record]]:
    return [(channel, Record(b"x", Origin("sender", 1, n, 0))) for n in numbers]


def test_what_was_seen_and_is_sought_is_found() -> None:
    sought = SpoolDedup([*waiting(3, 4, 9), ("into", Record(b"without a number"))])
    for seen in (2, 4, 9, 10):
        sought.observe("into", Origin("sender", 1, seen, 5))
    assert [n for n in range(12) if sought.in_channel("into", Origin("sender", 1, n, 0))] == [4, 9]


def test_another_channel_sender_or_epoch_is_another_record() -> None:
    sought = SpoolDedup(waiting(1))
    for channel, origin in (
        ("dead", Origin("sender", 1, 1, 0)),
        ("into", Origin("other", 1, 1, 0)),
        ("into", Origin("sender", 2, 1, 0)),
    ):
        sought.observe(channel, origin)
        assert not sought.in_channel(channel, origin)
        assert not sought.in_channel("into", Origin("sender", 1, 1, 0))
