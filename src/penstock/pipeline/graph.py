"""A pipeline as a graph, for the page and the plan."""

from typing import Any

from penstock.core.text import redact_address
from penstock.pipeline.config import Config
from penstock.pipeline.description import Description


def store_node(url: str, channel: str) -> str:
    return f"store:{url.split(':', 1)[0]}/{channel}"


def graph(description: Description, config: Config) -> dict[str, Any]:
    """Nodes with kind, label and note; edges from node to node."""
    nodes: list[dict[str, str]] = []
    edges: list[list[str]] = []

    def add(node: str, kind: str, label: str, note: str = "") -> None:
        nodes.append({"id": node, "kind": kind, "label": label, "note": note})

    for source in description.sources:
        add(f"source:{source.name}", "source", source.name, redact_address(config.source_address(source)))
        edges.append([f"source:{source.name}", f"channel:{source.into}"])
    for channel in description.channels.values():
        note = f"the result of {channel.result_of}" if channel.result_of else "a channel of records"
        add(f"channel:{channel.name}", "channel", channel.name, note)
        if channel in description.with_dead_letters:
            add(f"channel:{channel.dead}", "channel", channel.dead, f"dead letters of {channel.name}")
            edges.append([f"channel:{channel.name}", f"channel:{channel.dead}"])
    for query in description.queries:
        add(f"query:{query.name}", "query", query.name.replace("_", " "), query.doc)
        edges += [[f"channel:{name}", f"query:{query.name}"] for name in query.inputs]
        edges.append([f"query:{query.name}", f"channel:{query.into}"])
    for store in description.stores:
        node = store_node(store.url, store.channel)
        add(node, "store", store.url.split(":", 1)[0], f"{store.channel} in {redact_address(store.url)}")
        edges.append([f"channel:{store.channel}", node])
    if description.pages:
        add("page", "page", "page", "live, in browsers")
        edges += [[f"channel:{page.channel}", "page"] for page in description.pages]
    return {"nodes": nodes, "edges": edges}


def stage_inputs(description: Description) -> dict[str, tuple[str, ...]]:
    """The channels that each stage reads, by the name of the stage in the accounting."""
    found = {f"query:{query.name}": query.inputs for query in description.queries}
    found |= {store_node(store.url, store.channel): (store.channel,) for store in description.stores}
    if description.pages:
        # Clients can follow every result, also those that the page does not show.
        found |= {f"feed:{name}": (name,) for name, channel in description.channels.items() if channel.result_of}
    return found
