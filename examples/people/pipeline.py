from pyspark.sql import functions as F

from penstock import Pipeline, seen

app = Pipeline("people")

app.channel(
    "rsvps",
    schema="response STRING NOT NULL, guests BIGINT, mtime BIGINT, `group` STRUCT<group_country: STRING>",
    event_time="timestamp_millis(mtime)",
)
app.source("ws://127.0.0.1:8765/rsvps", into="rsvps", partition_by="group.group_country")


@app.query(into="by_country", key=["window", "country"], where="response = 'yes'", watermark="30 seconds")
def people_by_country(rsvps):
    """People who say yes, their guests included, per country and ten seconds."""
    country = F.col("group.group_country").alias("country")
    return rsvps.groupBy(F.window("event_time", "10 seconds"), country).agg(
        F.sum(F.col("guests") + 1).alias("people"), seen()
    )


app.store("by_country", "redis://", ttl="1 day")
app.store("rsvps", "delta://.penstock/lake/rsvps")
app.page(
    "by_country",
    chart={
        "mark": "bar",
        "encoding": {
            "x": {"field": "country", "type": "nominal"},
            "y": {"field": "people", "type": "quantitative", "aggregate": "sum"},
        },
    },
)
