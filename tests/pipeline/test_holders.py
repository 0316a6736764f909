"""The rows of a result, as those hold them who read it. Who holds what is shown in test_recompute.py."""

from penstock.pipeline.holders import entries
from penstock.testing.channels import MemoryChannels


def test_a_channel_is_read_up_to_its_end_and_no_further() -> None:
    channels = MemoryChannels(partitions=3)
    for n in range(20):
        channels.append("totals", b"{}", b"%d" % n)
    some = entries(channels, "totals")
    found = [next(some)]
    channels.append("other", b"{}")
    found += some
    assert sorted(entry.key or b"" for entry in found) == sorted(b"%d" % n for n in range(20))


def test_an_empty_channel_holds_nothing() -> None:
    assert list(entries(MemoryChannels(), "totals")) == []
