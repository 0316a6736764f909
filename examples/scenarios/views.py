"""Page views of a news site: regular and passing visitors, articles that trend for minutes, links that are broken."""

from dataclasses import dataclass
from functools import cached_property

import orjson
from scenario import Scenario, normals

from penstock.core.clock import Micros
from penstock.simulate.documents import drawn, slots
from penstock.simulate.rsvps import CITIES

ARTICLES = 1_500
BROKEN = 60
REGULARS = 2_000
HOUR = 3_600_000  # in milliseconds, as all times of a document
FRESH = 180_000
"""For so long the same articles are the news; then others are, and these are forgotten little by little."""

SECTIONS = ("world", "politics", "economy", "science", "sport", "culture", "travel", "local")
REFERRERS = ("", "", "", "search", "search", "social", "social", "mail")
# Passers-by in each hour of the day (UTC), of which a few come more than once: few at night, most at noon and evening.
PASSERS = (400, 300, 200, 200, 300, 500, 900, 1500, 2000, 2200, 2400, 2800, 3200, 2800, 2400, 2200, 2200, 2500, 2900,
           3200, 3200, 2500, 1500, 800)  # fmt: skip

_SUBJECTS = ("Trams", "Bees", "Teachers", "Rents", "Goalkeepers", "Orchestras", "Glaciers", "Bakers", "Robots",
             "Rivers", "Voters", "Bridges")  # fmt: skip
_VERBS = ("return to", "leave", "surprise", "divide", "delight", "worry", "change", "wait for")


@dataclass(kw_only=True)
class Views(Scenario):
    """Page views of a site that the seed makes: its articles, its broken links, and what is news when."""

    name: str = "views"
    sender: str = "server"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._views, self._news, self._articles, self._links, self._passers = (
            drawn(self.seed, 2, what) for what in range(5)
        )

    def document(self, sender: int, number: int, time: Micros) -> bytes:
        """The view `number` that `sender` answered, at `time`."""
        first = drawn(self._views, sender, number)
        second = drawn(first, 1)
        at = time // 1_000
        document: dict[str, object] = {"view": f"{sender}-{number}", "visitor": self._visitor(first, at)}
        if second & 0x3FF < 20:
            document |= self._broken[_LINK_SLOTS[first >> 32 & 0xFFF]]
        else:
            article = self._article(first >> 32, second >> 10, at)
            document |= self._pages[article]
            inside = second >> 40 & 3 == 0
            document["referrer"] = (
                self._pages[_ARTICLE_SLOTS[second >> 42 & 0xFFF]]["path"] if inside else REFERRERS[second >> 42 & 7]
            )
        document["took"] = round(40 * 2 ** normals()[second >> 52], 1)
        document["at"] = at
        return orjson.dumps(document)

    def _visitor(self, bits: int, at: int) -> str:
        """Half of the views are of regulars, the others of people who are here in this hour only."""
        if bits & 1:
            return f"r{_REGULAR_SLOTS[bits >> 1 & 0xFFF]}"
        hour = at // HOUR
        passer = (bits >> 1 & 0xFFFF) * PASSERS[hour % 24] >> 16
        return f"p{drawn(self._passers, hour, passer) >> 24:010x}"

    def _article(self, bits: int, chance: int, at: int) -> int:
        """One view in three goes to what is news now or was a while ago, the others where views always go."""
        if chance & 0xFF < 86:
            age, which = _AGES[chance >> 8 & 7], _RANKS[chance >> 11 & 7]
            return drawn(self._news, at // FRESH - age, which) % ARTICLES
        return _ARTICLE_SLOTS[bits & 0xFFF]

    @cached_property
    def _pages(self) -> list[dict[str, object]]:
        return [self._page(article) for article in range(ARTICLES)]

    def _page(self, article: int) -> dict[str, object]:
        bits = drawn(self._articles, article)
        section = SECTIONS[bits & 7]
        subject, verb = _SUBJECTS[(bits >> 3 & 0xFF) % len(_SUBJECTS)], _VERBS[bits >> 11 & 7]
        return {
            "article": article,
            "title": f"{subject} {verb} {CITIES[(bits >> 14 & 0xFFFF) % len(CITIES)].name}",
            "section": section,
            "path": f"/{section}/{article:04d}",
            "status": 200,
        }

    @cached_property
    def _broken(self) -> list[dict[str, object]]:
        """Links to where nothing is, each on the page of an article that holds it."""
        found: list[dict[str, object]] = []
        for link in range(BROKEN):
            bits = drawn(self._links, link)
            target, holder = self._pages[bits % ARTICLES], self._pages[(bits >> 20) % ARTICLES]
            found.append(
                {
                    "article": None,
                    "title": None,
                    "section": target["section"],
                    "path": f"{target['path']}/photos-{link}",
                    "status": 404,
                    "referrer": holder["path"],
                }
            )
        return found


_REGULAR_SLOTS = slots(REGULARS, 0.6)
_ARTICLE_SLOTS = slots(ARTICLES, 0.7)
_LINK_SLOTS = slots(BROKEN, 0.8)
_AGES = (0, 0, 0, 0, 1, 1, 2, 3)
_RANKS = (0, 0, 0, 0, 1, 1, 2, 3)
