from penstock import Pipeline

app = Pipeline("sql")

app.channel(
    "rsvps",
    schema="""
        rsvp_id BIGINT NOT NULL, response STRING NOT NULL, guests BIGINT, mtime BIGINT NOT NULL,
        member STRUCT<member_id: BIGINT, member_name: STRING>, event STRUCT<event_id: STRING, event_name: STRING>,
        `group` STRUCT<group_city: STRING, group_country: STRING>
    """,
    event_time="timestamp_millis(mtime)",
)
app.source("simulate://rsvps?rate=100&seed=7", into="rsvps", partition_by="group.group_country")

# Each file is a query with the name of the file.
app.sql_queries("queries")

app.store("people", "redis://", ttl="1 day")
app.page(
    "people",
    title="People per country",
    chart={
        "mark": "bar",
        "encoding": {
            "x": {"field": "country", "type": "nominal"},
            "y": {"field": "people", "type": "quantitative", "aggregate": "sum"},
        },
    },
)
