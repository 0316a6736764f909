"""What a comparison of a live result with its recomputation has found. No I/O."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.analysis.replay import Difference, Found, How, Verdict, read
from penstock.core.contracts import Offsets


@dataclass(frozen=True, slots=True)
class Gone:
    """A part of a log that the query has read and that its retention has removed: offsets first–last."""

    channel: str
    partition: int
    first: int
    last: int


@dataclass(frozen=True)
class Judged:
    """What the comparison says about one who holds rows."""

    holder: str
    counts: Counter[Verdict]
    differences: tuple[Difference, ...]
    late: bool = False
    """All differences may be records that came too late, which the stream leaves out: it is not known which."""

    @property
    def compared(self) -> int:
        return self.counts[Verdict.EXACT] + self.counts[Verdict.BOUNDED]


@dataclass(frozen=True)
class Report:
    query: str
    result: str
    covered: Mapping[str, Offsets]
    ends: Mapping[str, Offsets]
    gone: tuple[Gone, ...]
    judged: tuple[Judged, ...]
    records: Mapping[int, Found] = field(default_factory=dict)
    """By mark: the records that make the difference, as far as they were looked for and found."""
    late: int = 0
    """How many records came too late, by the query's own account."""
    late_runs: Mapping[str, Mapping[str, list[tuple[int, int]]]] = field(default_factory=dict)
    """The first of them by sender and epoch, as far as it names them."""
    late_left_out: bool = False
    """It is known where all of them lie, and they were not recomputed: no difference is theirs."""

    @property
    def equal(self) -> bool:
        return not any(one.differences for one in self.judged)

    @property
    def maybe_late(self) -> bool:
        """Rows differ, by no more than what came too late; but it is not known which records these were."""
        return not self.equal and all(one.late or not one.differences for one in self.judged)

    @property
    def told(self) -> bool:
        """Whether anything could be compared, if there was anything, and whatever differs is different for certain."""
        untold = any(one.counts[Verdict.UNTOLD] for one in self.judged)
        return not self.maybe_late and (not untold or any(one.compared or one.differences for one in self.judged))

    @property
    def code(self) -> int:
        """0: equal, 1: rows differ, 2: it cannot be told."""
        return 2 if not self.told else 0 if self.equal else 1

    def record_of(self, difference: Difference) -> str:
        """What is known of the one record that makes a difference, in words; empty when it is not one."""
        record = self._record(difference)
        if record is None:
            return ""
        sender, epoch, seq, copies = record
        verb = "counts once more" if difference.how is How.EXCEEDS else "lacks"
        late = any(first <= seq <= last for first, last in self.late_runs.get(sender, {}).get(str(epoch), ()))
        # Of several copies, one may have come in time.
        why = (
            f", a duplicate: the log holds it {copies} times" if copies > 1 else ", which came too late" if late else ""
        )
        return f"{verb} {sender}/{epoch}: {seq}{why}"

    def _record(self, difference: Difference) -> Found | None:
        return None if difference.mark is None else self.records.get(difference.mark)

    def to_json(self) -> dict[str, Any]:
        return {
            "query": self.query,
            "result": self.result,
            "equal": self.equal,
            "told": self.told,
            "covered": self.covered,
            "ends": self.ends,
            "gone": [{name: getattr(one, name) for name in Gone.__slots__} for one in self.gone],
            "late": self.late,
            "late_left_out": self.late_left_out,
            "holders": [
                {
                    "holder": one.holder,
                    **{verdict: one.counts[verdict] for verdict in Verdict},
                    "maybe_late": one.late,
                    "differences": [self._difference(difference) for difference in one.differences],
                }
                for one in self.judged
            ],
        }

    def _difference(self, one: Difference) -> dict[str, Any]:
        record = self._record(one)
        return {
            "key": read(one.key),
            "how": one.how,
            "held": one.held and read(one.held.value),
            "recomputed": one.recomputed and read(one.recomputed.value),
            "columns": {name: {"held": a, "recomputed": b} for name, (a, b) in one.columns.items()},
            "record": record and record._asdict(),
        }
