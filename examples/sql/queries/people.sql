-- People who say yes, their guests included, per country and ten seconds.
-- key: window, country
-- where: response = 'yes'
-- watermark: 30 seconds
SELECT
    window(event_time, '10 seconds') AS window,
    `group`.group_country AS country,
    sum(guests + 1) AS people,
    seen()
FROM rsvps
GROUP BY 1, 2
