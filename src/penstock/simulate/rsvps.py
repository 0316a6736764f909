"""RSVPs as a function of seed, sender and number: nothing is kept, and any past one can be made again."""

from functools import cached_property
from math import sin, tau

import orjson

from penstock.core.clock import Micros
from penstock.simulate.draws import mixed, slots
from penstock.simulate.world import CITIES, FIRST_NAMES, GATHERINGS, OCCASIONS, TOPICS, VENUES, City

GROUPS = 800
MEMBERS = 4_000
HOUR = 3_600_000  # in milliseconds, as all times of a document


class Rsvps:
    """RSVP documents of a world that the seed makes: its groups, where they meet, and who comes."""

    def __init__(self, seed: int) -> None:
        self._seed = mixed(seed)

    def __call__(self, sender: int, number: int, time: Micros) -> bytes:
        """The RSVP `number` of `sender`, given at `time`: compact JSON of 500 to 900 bytes."""
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
                # The next meeting: the first whole multiple of the group's rhythm, half a day or more from now.
                b',"time":%d},"group":' % ((mtime + 12 * HOUR) // every * every + every),
                self._groups[group],
                b"}",
            )
        )

    def _topic_at(self, mtime: int, bits: int) -> int:
        """A topic by its popularity, which swings: what is liked now is drawn more often than what was liked before."""
        for turn in range(3):
            topic = _TOPIC_SLOTS[bits >> 8 * turn & 0xFFF]
            swing = sin(tau * (mtime / self._periods[topic] + topic / 7))
            if 128 * (1 + swing) > (bits >> (40 + 8 * turn) & 0xFF):
                return topic
        return topic

    @cached_property
    def _periods(self) -> list[float]:
        """Per topic, how long (in ms) it takes from one height of its popularity to the next: 4 to 20 minutes."""
        return [240_000 + self._draw(1, topic) % 960_000 for topic in range(len(TOPICS))]

    @cached_property
    def _topics(self) -> list[list[int]]:
        """Per group, its two to five topics."""
        chosen = []
        for group in range(GROUPS):
            wanted = 2 + self._draw(2, group) % 4
            topics: dict[int, None] = {}
            turn = 0
            while len(topics) < wanted:
                topics[_TOPIC_SLOTS[self._draw(3, group, turn) & 0xFFF]] = None
                turn += 1
            chosen.append(list(topics))
        return chosen

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
