"""The members that sit here, and how groups stand."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from penstock.audit.lag import GroupLag
from penstock.core.clock import Clock
from penstock.core.contracts import Channels, Group
from penstock.core.errors import Unavailable
from penstock.gateway.giving import places
from penstock.gateway.seats import Seat
from penstock.gateway.settings import GatewaySettings
from penstock.serve.problems import Problem

_REMEMBERED = 1_000
"""So many members that have ended can still be told why."""


class Groups:
    def __init__(self, channels: Channels, settings: GatewaySettings, clock: Clock) -> None:
        self._channels, self._settings, self._clock = channels, settings, clock
        self._seats: dict[str, Seat] = {}
        self._ended: OrderedDict[str, Problem] = OrderedDict()

    async def join(self, group: str, names: Sequence[str], beginning: bool) -> Seat:
        if len(self._seats) >= self._settings.members:
            raise Unavailable("the gateway", f"{self._settings.members} members sit here already", 5.0)
        silence = self._settings.silence.total_seconds()
        seat = Seat(self._channels, group, names, beginning, silence, self._clock)
        self._seats[seat.id] = seat
        loop = asyncio.get_running_loop()
        seat.ended.add_done_callback(partial(self._tell, loop, seat))
        try:
            async with asyncio.timeout(self._settings.acknowledged.total_seconds()):
                await asyncio.wrap_future(seat.joined)
        except TimeoutError:
            seat.leave()
            raise Unavailable(f"group {group}", "it could not be joined in time") from None
        return seat

    def seat(self, group: str, member: str) -> Seat:
        seat = self._seats.get(member)
        if seat is not None and seat.group == group:
            return seat
        if seat is None and member in self._ended:
            raise self._ended[member]
        way_out = f"POST /groups/{group}/members makes one"
        raise Problem(404, f"group {group}", f'no member "{member}" sits here', way_out)

    async def leave(self, seat: Seat, patience: float) -> None:
        seat.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await asyncio.wrap_future(seat.ended)

    async def close(self, patience: float) -> None:
        await asyncio.gather(*(self.leave(seat, patience) for seat in list(self._seats.values())))

    def _tell(self, loop: asyncio.AbstractEventLoop, seat: Seat, _: object) -> None:
        with suppress(RuntimeError):  # The loop is closed: nobody is left who could ask.
            loop.call_soon_threadsafe(self._forget, seat)

    def _forget(self, seat: Seat) -> None:
        self._seats.pop(seat.id, None)
        self._ended[seat.id] = seat.ended.result()
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)


def described(channels: Channels, group: Group) -> dict[str, object]:
    """How a group stands, with how far it is behind in each partition."""
    standing = GroupLag.of(channels, group)
    return {
        "name": group.name,
        "state": group.state,
        "members": [{"member": name, "partitions": places(own)} for name, own in sorted(group.members.items())],
        "partitions": [row.to_json() for row in standing.rows],
        "lag": standing.lag,
    }
