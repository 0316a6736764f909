"""Rules about readers that are slower than the time for which channels keep their records."""

from collections.abc import Iterator

from penstock.audit.alarm import Alarm, lasting, named
from penstock.audit.sight import Sight, mappings, number

WHERE = "retention"
"""Under this the audit tells what it found, see `audit.retention`."""


class Overtaken:
    """Retention has taken records that a reader had not read; or is about to, which is told while there is time."""

    def look(self, sight: Sight) -> Iterator[Alarm]:
        for said in sight.processes.values():
            for one in mappings(said.get(WHERE)) if hasattr(said, "get") else ():
                reader, channel = named(one.get("reader")), named(one.get("channel"))
                if lost := number(one.get("lost")):
                    text = (
                        f"{reader} had not read {lost:,.0f} offsets of {channel} when they were removed: their time "
                        f"was too short. {_way_out(reader)}"
                    )
                    yield Alarm("overtaken", reader, text, sight.now)
                if unread := number(one.get("unread")):
                    left = number(one.get("left"))
                    when = "soon" if left is None else f"in {lasting(left)}"
                    text = (
                        f"{reader} has not read {unread:,.0f} old records of {channel}, and the first of them will be "
                        f"removed {when}: let it catch up, or keep them for longer (keep=)."
                    )
                    yield Alarm("expiring", reader, text, sight.now)


def _way_out(reader: str) -> str:
    if reader.startswith("group:"):
        group = reader.removeprefix("group:")
        return f"To begin where the channel does: penstock groups --reset --group {group} --to beginning."
    return 'It goes on behind them if [channels] lost = "skip".'
