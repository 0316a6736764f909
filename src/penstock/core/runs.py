"""Sets of integers, stored as ranges: memory grows with the gaps, not with the numbers."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise


class Runs:
    """A set of integers as sorted, disjoint ranges (first, last) that are not adjacent."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def add(self, first: int, last: int | None = None) -> int:
        """Add the range first–last, or one number; return how many numbers were new."""
        last = first if last is None else last
        if self._lasts and first == self._lasts[-1] + 1 and last >= first:
            # The usual case: the next number of a sequence.
            self._lasts[-1] = last
            return last - first + 1
        if last < first:
            raise ValueError(f"a range ends before it begins: {first}–{last}")
        # The ranges low..high-1 overlap or touch first–last. They become one range.
        low = bisect_left(self._lasts, first - 1)
        high = bisect_right(self._firsts, last + 1)
        present = sum(
            max(0, min(end, last) - max(start, first) + 1)
            for start, end in zip(self._firsts[low:high], self._lasts[low:high], strict=True)
        )
        new = last - first + 1 - present
        if low < high:
            first, last = min(first, self._firsts[low]), max(last, self._lasts[high - 1])
        self._firsts[low:high] = [first]
        self._lasts[low:high] = [last]
        return new

    def missing(self) -> list[tuple[int, int]]:
        """The gaps between the first number and the last."""
        return [(a + 1, b - 1) for (_, a), (b, _) in pairwise(self)]

    def between(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges within first–last."""
        low, high = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        some = zip(self._firsts[low:high], self._lasts[low:high], strict=True)
        return [(max(one, first), min(other, last)) for one, other in some]

    def without(self, other: "Runs") -> list[tuple[int, int]]:
        """The ranges of this set that are not in the other."""
        found = []
        for first, last in self:
            # With the numbers before and after the range, the gaps between them are what the other lacks.
            found += Runs([(first - 1, first - 1), *other.between(first, last), (last + 1, last + 1)]).missing()
        return found

    @property
    def first(self) -> int | None:
        return self._firsts[0] if self._firsts else None

    @property
    def last(self) -> int | None:
        return self._lasts[-1] if self._lasts else None

    @property
    def whole_until(self) -> int | None:
        """The last number before the first gap."""
        return self._lasts[0] if self._lasts else None

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._firsts, self._lasts, strict=True))

    @property
    def size(self) -> int:
        """How many numbers the set has. It is not `__len__`: `list()` would allocate as many elements."""
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Runs) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Runs({list(self)})"
