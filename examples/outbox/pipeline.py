"""Read the outbox of an application: it writes a row in the transaction of each change."""

from outbox import Outbox
from pyspark.sql import functions as F

from penstock import Pipeline, seen

app = Pipeline("outbox")

app.channel("orders", schema="customer STRING, amount DOUBLE")
app.source(Outbox("outbox.db"), into="orders", partition_by="customer")


@app.query(key="customer")
def spent(orders):
    """The amount that each customer has spent."""
    return orders.groupBy("customer").agg(F.sum("amount").alias("amount"), seen())
