from pyspark.sql import functions as F

from penstock import Pipeline, seen

app = Pipeline("approve")

# curl or buyers.py posts transactions.
app.channel(
    "transactions",
    schema="transaction STRING NOT NULL, card STRING NOT NULL, amount DOUBLE NOT NULL, "
    "category STRING NOT NULL, country STRING NOT NULL",
    retention="1 day",
)
app.source("listen+http://127.0.0.1:8700/transactions", into="transactions", partition_by="card", answers="decisions")
app.static("cards", "cards.csv", schema="card STRING NOT NULL, home STRING, blocked BOOLEAN", refresh="5 seconds")
app.static(
    "limits",
    [
        {"category": "coffee", "most": 50.0},
        {"category": "groceries", "most": 400.0},
        {"category": "electronics", "most": 2_000.0},
    ],
    schema="category STRING NOT NULL, most DOUBLE",
)
OTHERWISE, ABROAD = 200.0, 100.0


@app.query(key="transaction", mode="real-time", retention="1 day")
def decisions(transactions, cards, limits):
    """Approve or decline each transaction. By the origin in its row, the answer finds the client that waits for it."""
    amount, most = F.col("amount"), F.coalesce("most", F.lit(OTHERWISE))
    reason = (
        F.when(F.col("home").isNull(), "unknown card")
        .when(F.col("blocked"), "the card is blocked")
        .when((F.col("country") != F.col("home")) & (amount > ABROAD), f"more than {ABROAD:g} abroad")
        .when(amount > most, F.format_string("more than %.0f for %s", most, "category"))
    )
    known = transactions.join(cards, "card", "left").join(limits, "category", "left")
    return known.select(
        "transaction", "card", "amount", reason.isNull().alias("approved"), reason.alias("reason"), "origin"
    )


@app.query(key=["window", "card"], where="NOT approved", watermark="10 seconds", retention="1 hour")
def declined(decisions):
    """Declined transactions per card and minute: many of them may be a fraud."""
    return decisions.groupBy(F.window("event_time", "1 minute"), "card").agg(
        F.count(F.lit(1)).alias("times"), F.sum("amount").alias("amount"), seen()
    )


app.page(
    "declined",
    title="Declined, per card and minute",
    chart={
        "mark": "bar",
        "encoding": {
            "x": {"field": "window_start", "type": "temporal", "timeUnit": "yearmonthdatehoursminutes", "title": None},
            "y": {"field": "times", "type": "quantitative"},
            "color": {"field": "card", "type": "nominal"},
        },
    },
)
