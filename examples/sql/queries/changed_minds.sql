-- Members who answer no within ten minutes after yes, to the same event.
-- key: yes, no
-- watermark: 1 minute
WITH consents AS (SELECT * FROM rsvps WHERE response = 'yes'),
     refusals AS (SELECT * FROM rsvps WHERE response = 'no')
SELECT
    y.rsvp_id AS yes,
    n.rsvp_id AS no,
    n.member.member_name AS member,
    n.event.event_name AS event,
    seen(y, n)
FROM consents y
JOIN refusals n
    ON n.member.member_id = y.member.member_id
    AND n.event.event_id = y.event.event_id
    AND n.event_time BETWEEN y.event_time AND y.event_time + INTERVAL 10 MINUTES
