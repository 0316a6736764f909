"""The query that a person means."""

import difflib

from penstock.analysis.query import Query
from penstock.errors import Misconfigured
from penstock.pipeline.description import Description


def find_query(description: Description, name: str) -> Query:
    """The query of this name, or the one that makes the result of this name."""
    for query in description.queries:
        if name in (query.name, query.into):
            return query
    names = [query.name for query in description.queries]
    close = difflib.get_close_matches(name, names, n=1)
    way_out = f'did you mean "{close[0]}"?' if close else f"its queries are {', '.join(names) or 'none'}"
    raise Misconfigured(f"pipeline {description.name}", f'it has no query "{name}"', way_out)
