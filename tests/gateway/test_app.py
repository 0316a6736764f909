"""Addresses, methods, and answers to what is not offered."""

import httpx
import pytest

from penstock.testing import MemoryChannels


async def test_the_front_door_tells_the_addresses(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200
    assert "/channels/NAME/records" in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/nothing", "/channels/one/nothing", "/channels/a%2Fb", "/channels/../../etc/passwd"])
async def test_an_address_that_there_is_not_is_404(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert set(answer.json()) >= {"error", "place", "fix"}


async def test_channels_cannot_be_deleted_and_the_answer_tells_what_can_be_done(
    client: httpx.AsyncClient, channels: MemoryChannels
) -> None:
    answer = await client.delete("/channels/one")
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]
    assert "GET" in answer.json()["fix"]
    assert "one" in channels.names()


async def test_both_methods_of_an_address_are_told(client: httpx.AsyncClient) -> None:
    answer = await client.put("/channels/one/records")
    assert answer.status_code == 405
    assert {"GET", "POST"} <= set(answer.headers["allow"].split(", "))


async def test_the_channels_are_listed_with_what_they_promise(client: httpx.AsyncClient) -> None:
    answer = (await client.get("/channels")).json()
    assert answer["channels"] == ["one", "two"]
    assert answer["promise"]["replay"] is True


async def test_a_channel_is_described(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    channels.append("one", b"x")
    answer = (await client.get("/channels/one")).json()
    assert answer["name"] == "one"
    assert answer["partitions"] == [{"partition": 0, "first": 0, "end": 1}]
    assert answer["compacted"] is False


async def test_a_name_that_is_nearly_right_is_told(client: httpx.AsyncClient, channels: MemoryChannels) -> None:
    answer = await client.get("/channels/onne")
    assert answer.status_code == 404
    assert answer.json() == {
        "error": "channel not found",
        "place": "channel onne",
        "fix": 'did you mean "one"?',
    }
    assert channels.names() == ["one", "two"]


async def test_a_parameter_that_is_nearly_right_is_told(client: httpx.AsyncClient) -> None:
    answer = await client.get("/channels/one/records?ofset=1")
    assert answer.status_code == 400
    assert answer.json()["fix"] == 'did you mean "offset"?'
