-- Bursts of answers per country, without a pause of more than two seconds. A row is written when its burst ends.
-- key: session, country
-- watermark: 10 seconds
SELECT
    session_window(event_time, '2 seconds') AS session,
    `group`.group_country AS country,
    count(1) AS answers,
    seen()
FROM rsvps
GROUP BY 1, 2
