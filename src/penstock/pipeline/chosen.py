"""The query that a person means."""

from penstock.analysis.query import Query
from penstock.core.errors import Misconfigured
from penstock.core.text import did_you_mean
from penstock.pipeline.description import Description


def find_query(description: Description, name: str) -> Query:
    """The query of this name, or the one that makes the result of this name."""
    for query in description.queries:
        if name in (query.name, query.into):
            return query
    names = [query.name for query in description.queries]
    way_out = did_you_mean(name, names, f"its queries are {', '.join(names) or 'none'}")
    raise Misconfigured(f"pipeline {description.name}", f'it has no query "{name}"', way_out)
