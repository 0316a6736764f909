"""Page views: who comes in an hour, what trends, and which links are broken."""

from collections import Counter
from typing import Any

import orjson
from views import ARTICLES, BROKEN, FRESH, HOUR, Views

MIDNIGHT = 1_699_920_000_000_000  # UTC


def documents(count: int, start: int = MIDNIGHT, every: int = 5_000, seed: int = 7) -> list[dict[str, Any]]:
    views = Views(seed=seed)
    return [orjson.loads(views.document(n % 20, n // 20 + 1, start + n * every)) for n in range(count)]


def hour(which: int) -> list[dict[str, Any]]:
    return documents(20_000, MIDNIGHT + which * HOUR * 1_000, HOUR * 1_000 // 20_000)


def test_a_document_has_the_shape_of_a_view() -> None:
    for view in documents(5_000):
        assert set(view) == {
            "view", "visitor", "article", "title", "section", "path", "status", "referrer", "took", "at",
        }  # fmt: skip
        assert view["took"] > 0
        assert view["path"].startswith(f"/{view['section']}/")
        assert view["status"] in (200, 404)
        if view["status"] == 200:
            assert 0 <= view["article"] < ARTICLES
            assert view["title"]


def test_some_links_are_broken_always_the_same_and_the_page_that_holds_them_is_told() -> None:
    found = documents(20_000)
    broken = [view for view in found if view["status"] == 404]
    assert 0.01 < len(broken) / len(found) < 0.03
    links = {(view["path"], view["referrer"]) for view in broken}
    assert len(links) == len({path for path, _ in links}) <= BROKEN
    sound = {view["path"] for view in found if view["status"] == 200}
    assert not sound & {path for path, _ in links}
    assert all(view["article"] is None and view["referrer"].startswith("/") for view in broken)


def test_few_articles_have_most_views() -> None:
    views = Counter(view["article"] for view in documents(20_000))
    top = sum(times for _, times in views.most_common(ARTICLES // 10))
    assert top > 20_000 / 2


def test_what_is_trending_moves_on_within_minutes_and_lingers_a_while() -> None:
    def trending(window: int) -> list[int]:
        some = documents(3_000, MIDNIGHT + window * FRESH * 1_000, FRESH * 1_000 // 3_000)
        return [article for article, _ in Counter(view["article"] for view in some if view["article"]).most_common(3)]

    tops = [trending(window) for window in range(8)]
    assert len({top[0] for top in tops}) >= 6
    later = Counter(
        view["article"]
        for view in documents(3_000, MIDNIGHT + FRESH * 1_000, FRESH * 1_000 // 3_000)
    )  # fmt: skip
    assert later[tops[0][0]] > 30


def test_more_people_come_at_noon_than_at_night() -> None:
    night, noon = ({view["visitor"] for view in hour(which)} for which in (3, 12))
    assert len(noon) > 1.5 * len(night)


def test_regulars_come_back_and_passers_by_do_not() -> None:
    one, other = ({view["visitor"] for view in hour(which)} for which in (12, 13))
    assert {visitor[0] for visitor in one & other} == {"r"}
    assert len(one & other) > 1_000
    assert {visitor[0] for visitor in one} == {"r", "p"}
