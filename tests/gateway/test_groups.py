"""Groups over HTTP."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
from tests.gateway.conftest import Opened, until

from penstock.core.contracts import ChannelPartition, Entry, Member, RebalanceListener, Topic
from penstock.core.errors import Unavailable
from penstock.testing import ManualClock, MemoryChannels

MEMBERS = "/groups/g/members"


async def join(client: httpx.AsyncClient, *channels: str, start: str = "beginning") -> str:
    answer = await client.post(MEMBERS, json={"channels": list(channels) or ["two"], "from": start})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == answer.json()["url"]
    return str(answer.json()["url"])


async def poll(client: httpx.AsyncClient, url: str, query: str = "wait=1s") -> dict[str, Any]:
    answer = await client.get(f"{url}/records?{query}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def commit(client: httpx.AsyncClient, answer: dict[str, Any]) -> httpx.Response:
    return await client.post(answer["commit"])


def values(answer: dict[str, Any]) -> list[int]:
    return [record["value"] for record in answer["records"]]


def fill(channels: MemoryChannels, numbers: Sequence[int]) -> None:
    for number in numbers:
        channels.append("two", b"%d" % number, b"%d" % number)


async def test_a_member_reads_commits_and_the_next_one_goes_on(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    fill(channels, range(10))
    url = await join(client)
    answer = await poll(client, url)
    assert sorted(values(answer)) == list(range(10))
    both = [{"channel": "two", "partition": 0}, {"channel": "two", "partition": 1}]
    assert (answer["assigned"], answer["revoked"]) == (both, [])
    assert sum(one["next"] for one in answer["held"]) == 10
    assert (await commit(client, answer)).status_code == 204
    assert (await client.delete(url)).status_code == 204
    fill(channels, [10])
    assert values(await poll(client, await join(client))) == [10]


async def test_records_are_given_again_until_they_are_committed(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    fill(channels, range(4))
    url = await join(client)
    first = await poll(client, url, "wait=1s&max=2")
    assert len(first["records"]) == 2
    assert (await poll(client, url))["records"] == first["records"]
    for _ in range(2):  # The answer to the first may have been lost.
        assert (await commit(client, first)).status_code == 204
    second = await poll(client, url)
    assert sorted(values(first) + values(second)) == list(range(4))
    late = await commit(client, first)
    assert (late.status_code, "not the last one" in late.json()["error"]) == (409, True)
    assert (await poll(client, url))["records"] == second["records"]
    assert (await commit(client, second)).status_code == 204


@pytest.mark.parametrize("query", ["", "?answer=", "?answer=x", "?answer=-1", "?answer=1&answer=1", "?answers=1"])
async def test_a_commit_that_does_not_say_of_what_is_400(client: httpx.AsyncClient, query: str) -> None:
    url = await join(client)
    await poll(client, url, "wait=0s")
    answer = await client.post(f"{url}/commit{query}")
    assert (answer.status_code, answer.json()["place"][:7]) == (400, "?answer")
    assert answer.json()["fix"]


async def test_what_was_not_committed_goes_to_the_next_member(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    fill(channels, range(4))
    url = await join(client)
    assert len(values(await poll(client, url))) == 4
    await client.delete(url)
    assert len(values(await poll(client, await join(client)))) == 4


async def test_a_group_may_begin_at_the_end(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    fill(channels, range(4))
    url = await join(client, start="end")
    assert values(await poll(client, url, "wait=50ms")) == []
    fill(channels, [4])
    assert values(await poll(client, url)) == [4]


async def test_two_members_share_and_a_commit_after_a_loss_is_409(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    fill(channels, range(10))
    first = await join(client)
    all_of_it = await poll(client, first)
    assert len(values(all_of_it)) == 10
    second = await join(client)
    answer = await poll(client, second, "wait=5s")
    assert [len(answer["assigned"]), len(answer["held"])] == [1, 1]
    conflict = await commit(client, all_of_it)
    assert conflict.status_code == 409
    assert conflict.json()["revoked"] == answer["assigned"]
    assert (await commit(client, all_of_it)).status_code == 204
    assert (await commit(client, answer)).status_code == 204
    assert (await poll(client, first, "wait=0s"))["revoked"] == answer["assigned"]
    told = (await client.get("/groups/g")).json()
    assert (len(told["members"]), told["lag"]) == (2, 0)


async def test_a_member_that_is_not_heard_of_has_left(channels: MemoryChannels, opened: Opened) -> None:
    fill(channels, range(4))
    async with opened(channels, session_timeout="100 ms") as client:
        gone = await join(client)
        assert len(values(await poll(client, gone))) == 4
        await until(lambda: "g" not in channels.groups())
        answer = await client.post(f"{gone}/commit?answer=1")
        assert answer.status_code == 410
        assert "no request for" in answer.json()["error"]
        assert len(values(await poll(client, await join(client)))) == 4


async def test_members_are_bounded(channels: MemoryChannels, opened: Opened) -> None:
    async with opened(channels, members=1) as client:
        url = await join(client)
        answer = await client.post(MEMBERS, json={"channels": ["two"]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        await client.delete(url)
        await join(client)


async def test_members_leave_when_the_gateway_closes(channels: MemoryChannels, opened: Opened) -> None:
    async with opened(channels) as client:
        await poll(client, await join(client), "wait=0s")
        assert channels.group("g").members
    assert "g" not in channels.groups()


class Moody(MemoryChannels):
    """Channels whose groups can be away. How often their members have read, and have only beaten, is counted."""

    away = False
    reads = beats = 0

    @contextmanager
    def join(  # type: ignore[override]  # its member has the shape of the one that it wraps
        self, group: str, channels: Sequence[str], listener: RebalanceListener, *, beginning: bool = True
    ) -> Iterator[Member]:
        with super().join(group, channels, listener, beginning=beginning) as member:
            yield MoodyMember(self, member)


class MoodyMember:
    def __init__(self, channels: Moody, member: Member) -> None:
        self._channels, self._member = channels, member

    def read(self, most: int, wait: float) -> Sequence[Entry]:
        self._unless_away()
        self._channels.reads += most > 0
        self._channels.beats += most == 0
        return self._member.read(most, wait)

    def held(self) -> Mapping[ChannelPartition, int]:
        return self._member.held()

    def commit(self) -> None:
        self._unless_away()
        self._member.commit()

    def _unless_away(self) -> None:
        if self._channels.away:
            raise Unavailable("the middleware", "it is away")


async def test_one_request_moves_a_member_at_a_time_and_leaving_ends_its_poll(opened: Opened) -> None:
    channels = Moody(None)
    channels.ensure([Topic("two", partitions=2)])
    async with opened(channels) as client:
        url = await join(client)
        polling = asyncio.create_task(client.get(f"{url}/records?wait=30s"))
        await until(lambda: channels.reads)
        assert (await client.get(f"{url}/records")).status_code == 409
        assert (await client.post(f"{url}/commit?answer=1")).status_code == 409
        assert (await client.delete(url)).status_code == 204
        assert (await polling).json()["records"] == []
        assert (await client.get(f"{url}/records")).status_code == 410


async def test_a_member_that_is_slow_to_commit_keeps_its_partitions(opened: Opened) -> None:
    """For longer than the lease of the group: its thread beats meanwhile, and reads nothing."""
    channels = Moody(None, lease=timedelta(seconds=1.5))
    channels.ensure([Topic("two", partitions=2)])
    fill(channels, range(4))
    async with opened(channels) as client:
        url = await join(client)
        answer = await poll(client, url, "wait=1s&max=2")
        before = channels.beats
        await until(lambda: channels.beats >= before + 4)
        assert len(channels.group("g").members) == 1
        assert (await commit(client, answer)).status_code == 204
        assert sorted(values(answer) + values(await poll(client, url))) == list(range(4))


async def test_a_member_outlives_middleware_that_is_away_for_a_while(opened: Opened) -> None:
    channels = Moody(None)
    channels.ensure([Topic("two", partitions=2)])
    fill(channels, range(4))
    async with opened(channels) as client:
        url = await join(client)
        answer = await poll(client, url, "wait=1s&max=2")
        channels.away = True
        away = await commit(client, answer)
        assert (away.status_code, away.headers["retry-after"]) == (503, "1")
        channels.away = False
        assert (await commit(client, answer)).status_code == 204
        channels.away = True
        assert (await client.get(f"{url}/records")).status_code == 503
        channels.away = False
        assert sorted(values(answer) + values(await poll(client, url))) == list(range(4))


async def test_a_member_whose_records_retention_took_hears_it_and_has_left(opened: Opened) -> None:
    clock = ManualClock()
    channels = MemoryChannels(None, clock)
    channels.ensure([Topic("two", partitions=2, retention=timedelta(minutes=1))])
    channels.move("g", {"two": {0: 0, 1: 0}})
    fill(channels, range(10))
    clock.move(120)
    fill(channels, range(10))
    async with opened(channels, clock) as client:
        url = await join(client)
        answer = await client.get(f"{url}/records")
        assert answer.status_code == 410
        assert "retention" in answer.json()["error"]
        answer = await client.get(f"{url}/records")
        assert answer.status_code == 410
        assert "has left its group" in answer.json()["error"]


async def test_groups_are_listed_and_described_with_their_lag(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    fill(channels, range(10))
    url = await join(client)
    first = await poll(client, url)
    assert (await client.get("/groups/g")).json()["lag"] == 0, "nobody knows where reading begins"
    await commit(client, first)
    fill(channels, range(5))
    assert (await client.get("/groups")).json() == {"groups": ["g"]}
    told = (await client.get("/groups/g")).json()
    assert (told["name"], told["state"], told["lag"]) == ("g", "stable", 5)
    (member,) = told["members"]
    assert len(member["partitions"]) == 2
    assert sum(one["committed"] for one in told["partitions"]) == 10
    assert {one["member"] for one in told["partitions"]} == {member["member"]}


async def test_a_channel_that_is_gone_leaves_the_group_to_be_described(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    fill(channels, range(4))
    channels.append("one", b"1")
    url, seen = await join(client, "one", "two"), 0
    while seen < 5:
        answer = await poll(client, url)
        await commit(client, answer)
        seen += len(answer["records"])
    await client.delete(url)
    channels.remove("two")
    told = (await client.get("/groups/g")).json()
    assert [(one["channel"], one["committed"], one["lag"]) for one in told["partitions"]] == [("one", 1, 0)]


async def test_an_unknown_group_is_404_with_those_that_are_near(client: httpx.AsyncClient) -> None:
    await poll(client, await join(client), "wait=0s")
    answer = await client.get("/groups/gg")
    assert (answer.status_code, answer.json()["fix"]) == (404, 'did you mean "g"?')


async def test_a_member_sits_in_its_own_group_only(client: httpx.AsyncClient) -> None:
    url = await join(client)
    assert (await client.get(url.replace("/g/", "/h/") + "/records")).status_code == 404
    assert (await client.get(f"{MEMBERS}/nobody/records")).status_code == 404
    assert (await client.delete(f"{MEMBERS}/nobody")).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"{}",
        b'{"channels": []}',
        b'{"channels": "two"}',
        b'{"channels": [1]}',
        b'{"channels": ["two", "two"]}',
        b'{"channels": ["two"], "from": "middle"}',
        b'{"channels": ["two"], "form": "end"}',
        b'{"channels": ["\\ud800"]}',
        b"[" * 100_000,
    ],
)
async def test_a_wrong_wish_to_join_is_400(client: httpx.AsyncClient, channels: MemoryChannels, body: bytes) -> None:
    answer = await client.post(MEMBERS, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert not channels.groups()


async def test_joining_needs_channels_that_are_there_and_a_name_that_is_one(client: httpx.AsyncClient) -> None:
    assert (await client.post(MEMBERS, json={"channels": ["tow"]})).status_code == 404
    assert (await client.post("/groups/a%20b/members", json={"channels": ["two"]})).status_code == 400
    assert (await client.post(MEMBERS, content=b"{}", headers={"content-type": "text/plain"})).status_code == 415
