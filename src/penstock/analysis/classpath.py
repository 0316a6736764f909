"""Where Spark's own jars lie; found without importing it."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def classpath(jars: Sequence[Path]) -> list[Path]:
    """Our jars and Spark's, one by one: a class-data archive knows no wildcards."""
    return [*jars, *sorted((spark_home() / "jars").glob("*.jar"))]


def spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent
