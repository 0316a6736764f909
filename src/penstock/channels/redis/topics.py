"""What a channel has to be, as Redis holds it: fields of a hash, times in microseconds."""

from collections.abc import Mapping
from datetime import timedelta

from penstock.channels import differences as shared
from penstock.channels.differences import spelled
from penstock.core.clock import duration
from penstock.core.contracts import Topic
from penstock.core.errors import Misconfigured

WORDS = {"compaction.lag": ("lag", "1 hour"), "deletions.keep": ("deletions", "1 day")}
"""Of a compacted channel: how long a record stays after it was replaced, and how long the deletion of a key does."""


def fields_of(topic: Topic, life: str) -> dict[str, str]:
    found = {"id": life}
    if topic.keep is not None:
        found["keep"] = _micros(topic.keep)
    if topic.compacted:
        for word, (name, usual) in WORDS.items():
            try:
                found[name] = _micros(duration(topic.config.get(word, usual)))
            except ValueError as error:
                raise Misconfigured(f"channel {topic.name}, {word}", str(error)) from error
    return found


def topic_of(name: str, held: Mapping[str, bytes]) -> Topic:
    return Topic(
        name,
        int(held["partitions"]),
        1,
        "lag" in held,
        _span(held["keep"]) if "keep" in held else None,
        {word: spelled(_span(held[of_it])) for word, (of_it, _) in WORDS.items() if of_it in held},
    )


def differences(declared: Topic, there: Topic) -> list[str]:
    """How a channel that is there is not what it should be."""
    found = list(shared.differences(there, declared, "Redis", WORDS))
    for word, value in declared.config.items():
        if word in WORDS and there.compacted and declared.compacted and duration(value) != duration(there.config[word]):
            found.append(f"channel {declared.name} has {word}={there.config[word]}, and {value} is declared")
    return found


def _micros(span: timedelta) -> str:
    return str(round(span.total_seconds() * 1e6))


def _span(micros: bytes) -> timedelta:
    return timedelta(microseconds=int(micros))
