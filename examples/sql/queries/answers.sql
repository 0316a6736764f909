-- How often each answer was given, per city.
-- key: city, response
-- every: 10 seconds
SELECT `group`.group_city AS city, response, count(1) AS answers, seen()
FROM rsvps
GROUP BY `group`.group_city, response
