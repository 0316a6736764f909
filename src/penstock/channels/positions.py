"""What a reader is told whose position lies where its partition holds nothing."""

from penstock.core.errors import Unaccounted


def overtaken(channel: str, partition: int, stands: int, low: int) -> Unaccounted:
    why = (
        f"partition {partition} is to be read from {stands}, and begins at {low}: "
        f"retention was quicker than this reader, and {low - stands} offsets are gone"
    )
    return Unaccounted(channel, (), why)


def another(channel: str) -> Unaccounted:
    return Unaccounted(channel, (), "it was removed while it was read, and another one has its name now")


def beyond(channel: str, partition: int, stands: int, end: int) -> Unaccounted:
    why = (
        f"partition {partition} is to be read from {stands}, and ends at {end}: it is another channel, or it has lost "
        "its end; to begin anew, remove the store or ledger that reads it"
    )
    return Unaccounted(channel, (), why)
