from pyspark.sql import functions as F

from penstock import Pipeline, interval_join

app = Pipeline("ads")

# visitors.py writes both channels.
app.channel(
    "impressions",
    schema="impression STRING NOT NULL, ad STRING NOT NULL, at BIGINT NOT NULL",
    event_time="timestamp_millis(at)",
    retention="1 day",
)
app.channel(
    "clicks",
    schema="impression STRING NOT NULL, at BIGINT NOT NULL",
    event_time="timestamp_millis(at)",
    retention="1 day",
)
app.static(
    "campaigns", "campaigns.csv", schema="ad STRING NOT NULL, campaign STRING, price DOUBLE", refresh="5 seconds"
)


@app.query(key="impression", watermark="10 seconds", every="1 second", retention="1 hour")
def outcomes(impressions, clicks, campaigns):
    """Each shown ad: with its click when that arrives, or without one after a minute."""
    found = interval_join(shown=impressions, click=clicks, key="impression", within="1 minute", how="left")
    lag = F.unix_millis("click.event_time") - F.unix_millis("shown.event_time")
    return found.join(campaigns, F.col("shown.ad") == campaigns.ad, "left").select(
        "impression",
        "shown.ad",
        F.coalesce("campaign", F.lit("unknown")).alias("campaign"),
        F.col("click").isNotNull().alias("clicked"),
        lag.alias("lag"),
        F.when(F.col("click").isNotNull(), F.col("price")).alias("earned"),
        "seen",
    )


app.store("outcomes", "redis://", ttl="1 hour")
app.page(
    "outcomes",
    title="Shown ads, clicked or not",
    chart={
        "mark": "bar",
        "encoding": {
            "y": {"field": "campaign", "type": "nominal", "title": None},
            "x": {"aggregate": "count", "type": "quantitative", "title": "ads shown"},
            "color": {"field": "clicked", "type": "nominal"},
        },
    },
)
