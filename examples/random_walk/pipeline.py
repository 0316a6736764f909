from pyspark.sql import functions as F

from penstock import Pipeline

app = Pipeline("random-walk")

# Write to it with: penstock produce random-walk
app.channel("random_walk", partitions=1, retention="1 day")


@app.query(into="walk", key=["epoch", "step"], retention="10 minutes")
def steps(random_walk):
    """The position after each step."""
    return random_walk.select(
        F.col("origin.epoch").alias("epoch"),
        F.col("origin.seq").alias("step"),
        F.unix_millis("event_time").alias("time"),
        F.col("value").cast("double").alias("position"),
        "origin",
    )


app.store("walk", "redis://", ttl="1 hour")
app.page(
    "walk",
    title="A random walk",
    doc="One step per second of at most 0.75, in a direction near the previous one.",
    chart={
        "mark": {"type": "line", "point": True},
        "encoding": {
            "x": {"field": "time", "type": "temporal", "title": None},
            "y": {"field": "position", "type": "quantitative", "scale": {"zero": False}},
        },
    },
)
