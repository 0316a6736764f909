"""RSVPs as functions of seed, sender and number, so that every record can be generated again."""

from functools import cached_property
from math import sin, tau
from typing import NamedTuple

import orjson

from penstock.core.clock import Micros
from penstock.simulate.documents import mixed, slots

GROUPS = 800
MEMBERS = 4_000
HOUR = 3_600_000  # in milliseconds, as all times of a document


class City(NamedTuple):
    name: str
    country: str
    lat: float
    lon: float


# The busiest city first. Cities and topics are shown on the page, so their names need only Latin and Greek fonts.
CITIES = (
    City("New York", "us", 40.71, -74.01),
    City("London", "gb", 51.51, -0.13),
    City("San Francisco", "us", 37.77, -122.42),
    City("Paris", "fr", 48.86, 2.35),
    City("Berlin", "de", 52.52, 13.40),
    City("Bengaluru", "in", 12.97, 77.59),
    City("Toronto", "ca", 43.65, -79.38),
    City("Amsterdam", "nl", 52.37, 4.90),
    City("Sydney", "au", -33.87, 151.21),
    City("Tōkyō", "jp", 35.68, 139.69),
    City("Chicago", "us", 41.88, -87.63),
    City("Madrid", "es", 40.42, -3.70),
    City("São Paulo", "br", -23.55, -46.63),
    City("München", "de", 48.14, 11.58),
    City("Singapore", "sg", 1.35, 103.82),
    City("Austin", "us", 30.27, -97.74),
    City("Zürich", "ch", 47.38, 8.54),
    City("Barcelona", "es", 41.39, 2.17),
    City("Seattle", "us", 47.61, -122.33),
    City("Mumbai", "in", 19.08, 72.88),
    City("Melbourne", "au", -37.81, 144.96),
    City("Dublin", "ie", 53.35, -6.26),
    City("Stockholm", "se", 59.33, 18.07),
    City("Milano", "it", 45.46, 9.19),
    City("Ciudad de México", "mx", 19.43, -99.13),
    City("Vancouver", "ca", 49.28, -123.12),
    City("Warszawa", "pl", 52.23, 21.01),
    City("Tel Aviv", "il", 32.09, 34.78),
    City("Buenos Aires", "ar", -34.60, -58.38),
    City("Boston", "us", 42.36, -71.06),
    City("Manchester", "gb", 53.48, -2.24),
    City("København", "dk", 55.68, 12.57),
    City("Lisboa", "pt", 38.72, -9.14),
    City("Wien", "at", 48.21, 16.37),
    City("Praha", "cz", 50.08, 14.44),
    City("Kraków", "pl", 50.06, 19.94),
    City("Hamburg", "de", 53.55, 9.99),
    City("Lyon", "fr", 45.76, 4.84),
    City("Roma", "it", 41.90, 12.50),
    City("Montréal", "ca", 45.50, -73.57),
    City("Oslo", "no", 59.91, 10.75),
    City("Helsinki", "fi", 60.17, 24.94),
    City("Rotterdam", "nl", 51.92, 4.48),
    City("Bogotá", "co", 4.71, -74.07),
    City("Cape Town", "za", -33.92, 18.42),
    City("Nairobi", "ke", -1.29, 36.82),
    City("Seoul", "kr", 37.57, 126.98),
    City("İstanbul", "tr", 41.01, 28.98),
    City("Αθήνα", "gr", 37.98, 23.73),
    City("Auckland", "nz", -36.85, 174.76),
)

# Ordered by how well they are liked on the whole; what is liked at a moment drifts.
TOPICS = (
    "Technology", "Hiking", "Software Development", "Data Science", "Live Music", "Startups", "Yoga",
    "Machine Learning", "Photography", "Board Games", "Language Exchange", "Running", "Python", "Book Club",
    "Meditation", "Cycling", "Cloud Computing", "Salsa", "Entrepreneurship", "Football", "Vegan", "Travel",
    "JavaScript", "Writing", "Climbing", "Craft Beer", "Data Engineering", "Apache Kafka", "Apache Spark", "Drawing",
    "Improv", "Swimming", "Parents", "Wine", "Open Source", "Volunteering", "Film", "Philosophy", "Singing",
    "Security", "Investing", "Badminton", "Astronomy", "DevOps", "Gardening", "Volleyball", "Robotics", "Pottery",
    "Sailing", "Chess", "Public Speaking", "Karaoke", "Kubernetes", "Rust", "Bouldering", "Tango", "Birdwatching",
    "Café Culture", "Français", "Japanese",
)  # fmt: skip

GATHERINGS = ("Meetup", "Club", "Circle", "Society", "Friends", "Enthusiasts", "Network", "Stammtisch")
OCCASIONS = (
    "Monthly evening", "An introduction for beginners", "Open session", "Summer social", "Hands-on workshop",
    "Lightning talks and drinks", "Saturday outing", "Q&A with the organisers",
)  # fmt: skip
VENUES = ("Café", "Library", "Studio", "Hall", "Brewery", "Garden", "Loft", "Community House")
FIRST_NAMES = (
    "Ana", "Björn", "Chloé", "Diego", "Elif", "Fatima", "Grzegorz", "Hannah", "Ivan", "João", "Kofi", "Lena", "Mehmet",
    "Noor", "Olga", "Priya", "Quentin", "Rosa", "Søren", "Thandiwe", "Uma", "Víctor", "Wei", "Xenia", "Yuki", "Zoë",
    "Łukasz", "美咲", "민준", "Δήμητρα",
)  # fmt: skip


class Rsvps:
    """RSVP documents with groups, venues and members that depend on the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = mixed(seed)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        """RSVP `number` of `sender` at `time`: compact JSON of 500 to 900 bytes."""
        first = mixed(self._seed ^ (number << 16) ^ sender)
        second = mixed(first)
        mtime = time // 1_000
        topic = self._topic_at(mtime, first)
        of_topic = self._groups_of[topic]
        group = of_topic[(first >> 32 & 0xFFFF) * len(of_topic) >> 16]
        meetings = self._events[group]
        event, every = meetings[(second & 0xFF) % len(meetings)]
        return b"".join(
            (
                b'{"rsvp_id":%d,"response":"' % ((number << 16) + sender),
                b"yes" if second >> 8 & 0xFF < 192 else b"no",
                b'","guests":%d,"mtime":%d,"visibility":"public","venue":' % (_GUESTS[second >> 16 & 0xF], mtime),
                self._venues[group][(second >> 20 & 0xFF) % 2],
                b',"member":',
                self._members[_MEMBER_SLOTS[second >> 28 & 0xFFF]],
                b',"event":{',
                event,
                # The next meeting: the first multiple of the group's interval that is at least half a day from now.
                b',"time":%d},"group":' % ((mtime + 12 * HOUR) // every * every + every),
                self._groups[group],
                b"}",
            )
        )

    def _topic_at(self, mtime: int, bits: int) -> int:
        """Draw a topic by its popularity, which changes periodically."""
        for turn in range(3):
            topic = _TOPIC_SLOTS[bits >> 8 * turn & 0xFFF]
            swing = sin(tau * (mtime / self._periods[topic] + topic / 7))
            if 128 * (1 + swing) > (bits >> (40 + 8 * turn) & 0xFF):
                return topic
        return topic

    @cached_property
    def _periods(self) -> list[float]:
        """Per topic, the period of its popularity in ms: 4 to 20 minutes."""
        return [240_000 + self._draw(1, topic) % 960_000 for topic in range(len(TOPICS))]

    @cached_property
    def _topics(self) -> list[list[int]]:
        """Per group, its two to five topics."""
        topics_of = []
        for group in range(GROUPS):
            count = 2 + self._draw(2, group) % 4
            topics: dict[int, None] = {}
            turn = 0
            while len(topics) < count:
                topics[_TOPIC_SLOTS[self._draw(3, group, turn) & 0xFFF]] = None
                turn += 1
            topics_of.append(list(topics))
        return topics_of

    @cached_property
    def _cities(self) -> list[City]:
        return [CITIES[_CITY_SLOTS[self._draw(4, group) & 0xFFF]] for group in range(GROUPS)]

    @cached_property
    def _groups_of(self) -> list[list[int]]:
        """Per topic, the groups that have it."""
        found: list[list[int]] = [[] for _ in TOPICS]
        for group, topics in enumerate(self._topics):
            for topic in topics:
                found[topic].append(group)
        # With an unlucky seed a topic has no group: then it stands for one that happens to have its number.
        return [groups or [topic] for topic, groups in enumerate(found)]

    @cached_property
    def _groups(self) -> list[bytes]:
        return [
            orjson.dumps(
                {
                    "group_id": 100_000 + group,
                    "group_name": self._name(group),
                    "group_city": city.name,
                    "group_country": city.country,
                    "group_lat": city.lat,
                    "group_lon": city.lon,
                    "group_topics": [
                        {"urlkey": TOPICS[topic].lower().replace(" ", "-"), "topic_name": TOPICS[topic]}
                        for topic in self._topics[group]
                    ],
                }
            )
            for group, city in enumerate(self._cities)
        ]

    @cached_property
    def _venues(self) -> list[tuple[bytes, bytes]]:
        return [(self._venue(group, 0), self._venue(group, 1)) for group in range(GROUPS)]

    def _venue(self, group: int, which: int) -> bytes:
        city, draw = self._cities[group], self._draw(5, group, which)
        return orjson.dumps(
            {
                "venue_id": 200_000 + 2 * group + which,
                "venue_name": f"{FIRST_NAMES[draw % len(FIRST_NAMES)]}'s {VENUES[draw >> 8 & 7]}, {city.name}",
                # Within about ten kilometres of the city's centre.
                "lat": round(city.lat + ((draw >> 16 & 0xFFFF) - 32768) / 330_000, 5),
                "lon": round(city.lon + ((draw >> 32 & 0xFFFF) - 32768) / 330_000, 5),
            }
        )

    @cached_property
    def _events(self) -> list[list[tuple[bytes, int]]]:
        """Per group, its series of meetings: the inside of its event's JSON, and its rhythm in milliseconds."""
        return [
            [
                (
                    orjson.dumps(
                        {
                            "event_id": f"{300_000 + 4 * group + series:x}",
                            "event_name": f"{OCCASIONS[self._draw(6, group, series) & 7]}: {self._name(group)}",
                        }
                    )[1:-1],
                    HOUR * 24 * (1 + self._draw(7, group, series) % 10),
                )
                for series in range(1 + self._draw(8, group) % 4)
            ]
            for group in range(GROUPS)
        ]

    @cached_property
    def _members(self) -> list[bytes]:
        return [
            orjson.dumps(
                {
                    "member_id": 400_000 + member,
                    "member_name": f"{FIRST_NAMES[self._draw(9, member) % len(FIRST_NAMES)]} {chr(65 + member % 26)}.",
                }
            )
            for member in range(MEMBERS)
        ]

    def _name(self, group: int) -> str:
        topic = TOPICS[self._topics[group][0]]
        return f"{self._cities[group].name} {topic} {GATHERINGS[self._draw(10, group) & 7]}"

    def _draw(self, what: int, *which: int) -> int:
        """The bits that decide one thing about the world."""
        bits = self._seed ^ what
        for number in which:
            bits = mixed(bits ^ number << 8)
        return bits


_CITY_SLOTS = slots(len(CITIES), 0.9)
_TOPIC_SLOTS = slots(len(TOPICS), 0.3)
_MEMBER_SLOTS = slots(MEMBERS, 0.5)
_GUESTS = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 4)
