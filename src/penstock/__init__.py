"""Streaming data pipelines in Python, on Spark, that account for every record."""
