"""A member at a console, on channels in memory."""

from contextlib import ExitStack, suppress
from datetime import timedelta

from penstock.channels.memory import MemoryChannels
from penstock.cli.membership import Membership
from penstock.core.contracts import Entry, Topic
from penstock.testing.clock import ManualClock


class Console:
    """Some records, and members whose clock stands unless it is moved."""

    def __init__(self, records: int = 4, partitions: int = 1) -> None:
        self.clock = ManualClock()
        self.channels = MemoryChannels(None, self.clock, timedelta(seconds=10))
        self.channels.ensure([Topic("c", partitions)])
        for number in range(records):
            self.channels.append("c", b"%d" % number, b"%d" % number)
        self.said: list[str] = []

    def join(self, stack: ExitStack, beginning: bool = True) -> Membership:
        member = Membership(self.said.append, self.clock)
        return stack.enter_context(member.joined(self.channels, "g", ["c"], beginning=beginning))

    @property
    def committed(self) -> int | None:
        return self.channels.group("g").committed.get(("c", 0))


def values(entries: object) -> list[bytes | None]:
    assert isinstance(entries, list)
    return [entry.value for entry in entries if isinstance(entry, Entry)]


def test_a_member_tells_what_it_is_given_and_from_where() -> None:
    console = Console()
    with ExitStack() as stack:
        member = console.join(stack)
        assert values(member.read(2, 0)) == [b"0", b"1"]
        assert console.said == ["given c/0 from 0"]
    assert console.said == ["given c/0 from 0", "gave back c/0"]


def test_what_a_member_read_is_committed_only_when_it_asks_for_more() -> None:
    console = Console()
    with ExitStack() as stack:
        member = console.join(stack)
        member.read(2, 0)
        console.clock.move(2)
        assert console.committed is None
        member.read(1, 0)
        assert console.committed == 2


def test_all_is_committed_at_a_good_end() -> None:
    console = Console()
    with ExitStack() as stack:
        console.join(stack).read(3, 0)
    assert console.committed == 3
    with ExitStack() as stack:
        assert values(console.join(stack).read(9, 0)) == [b"3"]
    assert console.said[2] == "given c/0 from 3"


def test_what_was_not_dealt_with_is_not_committed_and_nothing_more_is_said() -> None:
    console = Console()
    with suppress(BrokenPipeError), ExitStack() as stack:
        member = console.join(stack)
        member.read(2, 0)
        member.read(1, 0)
        raise BrokenPipeError
    assert console.said == ["given c/0 from 0"]
    with ExitStack() as stack:
        assert values(console.join(stack).read(1, 0)) == [b"0"]


def test_a_member_gives_back_what_another_gets_after_it_was_committed() -> None:
    console = Console(partitions=2, records=0)
    with ExitStack() as stack:
        one, other = console.join(stack), console.join(stack)
        one.read(9, 0)
        for number in range(20):
            console.channels.append("c", b"x", b"%d" % number)
        assert len(one.read(99, 0)) == 20
        for _ in range(4):
            console.clock.move(1)
            other.read(9, 0)
            one.read(9, 0)
        gave = [said for said in console.said if said.startswith("gave back")]
        assert len(gave) == 1
        assert sum(console.channels.group("g").committed.values()) == 20


def test_a_member_that_was_silent_for_too_long_says_what_it_lost() -> None:
    console = Console()
    with ExitStack() as stack:
        member = console.join(stack)
        member.read(9, 0)
        console.clock.move(60)
        member.read(9, 0)
    assert console.said[0] == "given c/0 from 0"
    assert any(said.startswith("not committed, and so perhaps printed again by others") for said in console.said)
    assert "lost c/0" in console.said


def test_from_now_on_is_where_nothing_is_committed() -> None:
    console = Console()
    with ExitStack() as stack:
        member = console.join(stack, beginning=False)
        assert values(member.read(9, 0)) == []
        console.channels.append("c", b"new")
        assert values(member.read(9, 0)) == [b"new"]
    assert console.said[0] == "given c/0 from 4"
