"""A pipeline at a broker, with an engine for its queries: what tests of whole pipelines have in common."""

from pathlib import Path

from pyspark.sql import SparkSession

from penstock.analysis.connectors import KafkaConnector
from penstock.analysis.engine import Engine
from penstock.analysis.settings import SparkSettings
from penstock.channels.kafka import Kafka
from penstock.pipeline.config import Config, topics
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline


def set_up(
    app: Pipeline, kafka: Kafka, redis_url: str, folder: Path, spark: SparkSession, settings: SparkSettings
) -> tuple[Description, Config, Engine]:
    """Create the channels of a pipeline, and an engine that reads them."""
    description = app.describe()
    kafka.ensure(topics(description))
    environ = {"PENSTOCK_CHANNELS_ADDRESS": kafka.where, "PENSTOCK_REDIS_URL": redis_url}
    shapes = {name: channel.shape for name, channel in description.channels.items()}
    engine = Engine(spark, settings, KafkaConnector(kafka.servers), str(folder / "checkpoints"), shapes)
    return description, Config.read(folder, environ=environ), engine
