from pyspark.sql import functions as F

from penstock import Pipeline, tables

app = Pipeline("clients")

# Write to them with: penstock produce --topic tp_prospects --key-separator :
app.channel("tp_prospects", schema="id BIGINT NOT NULL, name STRING", table=True, partitions=4)
app.channel("tp_accounts", schema="id BIGINT NOT NULL, accountNumber STRING", table=True, partitions=4)
app.channel("tp_enrichment_accounts", schema="id BIGINT NOT NULL, status STRING", table=True, partitions=4)


@app.query(key="key", partitions=4)
def tp_clients(tp_prospects, tp_accounts, tp_enrichment_accounts):
    """A client: a prospect, its account and its enrichment. Deleting one of the three deletes the client."""
    client = tables.join(prospect=tp_prospects, account=tp_accounts, enrichment=tp_enrichment_accounts)
    return client.select(
        "key", F.col("prospect.name").alias("name"), "account.accountNumber", "enrichment.status", "seen"
    )


app.store("tp_clients", "redis://")
app.page(
    "tp_clients",
    title="Clients",
    doc="A row exists while its prospect, account and enrichment exist.",
    chart={
        "transform": [{"fold": ["name", "accountNumber", "status"], "as": ["column", "cell"]}],
        "mark": {"type": "text", "fontSize": 13},
        "encoding": {
            "y": {"field": "key", "type": "nominal", "title": "key"},
            "x": {
                "field": "column",
                "type": "nominal",
                "title": None,
                "sort": ["name", "accountNumber", "status"],
                "axis": {"orient": "top", "labelAngle": 0},
            },
            "text": {"field": "cell", "type": "nominal"},
        },
    },
)
