"""The RSVP analyzer: who says yes to which meetup, where, live.

Run it with `penstock demo`, or copy this file and run the copy with `penstock run`.
"""

from dataclasses import dataclass

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from penstock import Pipeline, seen
from penstock.demo import charts


@dataclass
class Venue:
    venue_id: int
    venue_name: str
    lat: float
    lon: float


@dataclass
class Member:
    member_id: int
    member_name: str


@dataclass
class Event:
    event_id: str
    event_name: str
    time: int


@dataclass
class Topic:
    urlkey: str
    topic_name: str


@dataclass
class Group:
    group_id: int
    group_name: str
    group_city: str
    group_country: str
    group_lat: float
    group_lon: float
    group_topics: list[Topic]


@dataclass
class Rsvp:
    rsvp_id: int
    response: str
    guests: int
    mtime: int
    member: Member
    event: Event
    group: Group
    visibility: str = "public"
    venue: Venue | None = None


app = Pipeline("rsvps")

app.channel("rsvps", schema=Rsvp, event_time="timestamp_millis(mtime)")
app.source("simulate://rsvps?rate=200&senders=20&seed=7", into="rsvps", partition_by="group.group_id")


YES = "response = 'yes'"


@app.query(into="by_country", key=["window", "country"], where=YES, watermark="30 seconds", retention="5 minutes")
def people_by_country(rsvps: DataFrame) -> DataFrame:
    """People who say yes, their guests included, per country and ten seconds."""
    return rsvps.groupBy(F.window("event_time", "10 seconds"), F.col("group.group_country").alias("country")).agg(
        F.sum(F.col("guests") + 1).alias("people"), seen()
    )


@app.query(into="trending", key=["window", "topic"], where=YES, watermark="30 seconds", retention="3 minutes")
def trending_topics(rsvps: DataFrame) -> DataFrame:
    """Topics of the groups that get a yes, over a minute that slides by ten seconds."""
    return (
        rsvps.select("event_time", "origin", F.explode("group.group_topics.topic_name").alias("topic"))
        .groupBy(F.window("event_time", "60 seconds", "10 seconds"), "topic")
        .agg(F.count(F.lit(1)).alias("yes"), seen())
    )


app.sql_query(
    "answers_by_city",
    into="by_city",
    key=["city", "response"],
    every="10 seconds",
    sql="SELECT group.group_city AS city, response, count(1) AS answers, seen() FROM rsvps GROUP BY 1, 2",
)


@app.query(into="members", key="window", watermark="30 seconds", retention="1 hour", every="10 seconds")
def distinct_members(rsvps: DataFrame) -> DataFrame:
    """Different members who answered, per minute, by HyperLogLog."""
    return rsvps.groupBy(F.window("event_time", "1 minute")).agg(
        F.approx_count_distinct("member.member_id", 0.02).alias("members"), seen()
    )


@app.query(
    into="venues",
    key=["window", "venue_id"],
    where=f"{YES} AND venue.venue_id IS NOT NULL",
    watermark="30 seconds",
    retention="5 minutes",
)
def busy_venues(rsvps: DataFrame) -> DataFrame:
    """Where people will meet: the venues that got some yes in the last minutes."""
    return (
        rsvps.groupBy(F.window("event_time", "1 minute"), F.col("venue.venue_id").alias("venue_id"))
        .agg(
            F.first("venue.venue_name").alias("name"),
            F.first("venue.lat").alias("lat"),
            F.first("venue.lon").alias("lon"),
            F.sum(F.col("guests") + 1).alias("people"),
            seen(),
        )
        .where(F.col("people") >= 8)
    )


for table in ("by_country", "trending", "by_city", "members", "venues"):
    app.store(table, "redis://", ttl="1 day")
app.store("rsvps", "delta://.penstock/lake/rsvps")

app.page("by_country", chart=charts.people_by_country, title="People per country", doc="in windows of ten seconds")
app.page("trending", chart=charts.trending_topics, title="Trending topics", doc="yes answers in the last minute")
app.page("venues", chart=charts.busy_venues, title="Where they will meet", doc="venues of the last five minutes")
app.page("by_city", chart=charts.answers_by_city, title="Yes and no per city", doc="since the beginning")
app.page("members", chart=charts.distinct_members, title="Distinct members", doc="per minute, by HyperLogLog")
