"""Recent changes of all Wikimedia wikis, over SSE: `app.source(wikimedia(), into="changes", partition_by="wiki")`."""

from penstock.collect.sse import SseSource

ADDRESS = "https://stream.wikimedia.org/v2/stream/recentchange"
AGENT = {"User-Agent": "penstock"}
"""The server refuses clients without one."""


def wikimedia(name: str = "wikimedia", address: str = ADDRESS) -> SseSource:
    """A source that resumes after the id of the last event: a list of offsets, sent as Last-Event-ID."""
    return SseSource(f"sse+{address}", name, headers=AGENT)
