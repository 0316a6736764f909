"""What an application writes into its outbox, one row in the transaction of each change, comes into a channel."""

from outbox import Outbox
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock import Pipeline, seen

app = Pipeline("outbox")

app.source(Outbox("outbox.db"), into="orders", partition_by="customer")
app.channel("orders", schema="customer string, amount double")


@app.query(into="spent", key="customer")
def spent(orders: DataFrame) -> DataFrame:
    """What each customer has spent."""
    return orders.groupBy("customer").agg(F.sum("amount").alias("amount"), seen())
