"""The report of a comparison of a live result with its recomputation. No I/O."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.analysis.replay import Difference, Found, How, Verdict, read
from penstock.core.contracts import Offsets


@dataclass(frozen=True, slots=True)
class Gone:
    """Offsets first–last of a log that the query has read and that retention has removed."""

    channel: str
    partition: int
    first: int
    last: int


@dataclass(frozen=True)
class Judged:
    """The result of the comparison for one copy of the rows."""

    holder: str
    counts: Counter[Verdict]
    differences: tuple[Difference, ...]
    late: bool = False
    """All differences can be late records, which the stream drops: it is not known which."""

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
    """By checksum: the records that make the difference, if they were searched and found."""
    late: int = 0
    """How many records were late, by the account of the query."""
    late_runs: Mapping[str, Mapping[str, list[tuple[int, int]]]] = field(default_factory=dict)
    """The first of them by sender and epoch."""
    late_left_out: bool = False
    """The offsets of all late records are known, and they were not recomputed: they explain no difference."""

    @property
    def equal(self) -> bool:
        return not any(one.differences for one in self.judged)

    @property
    def maybe_late(self) -> bool:
        """Rows differ by no more than the late records; but it is not known which records these were."""
        return not self.equal and all(one.late or not one.differences for one in self.judged)

    @property
    def conclusive(self) -> bool:
        """Whether rows could be compared, if there are any, and each difference is certain."""
        skipped = any(one.counts[Verdict.UNKNOWN] for one in self.judged)
        return not self.maybe_late and (not skipped or any(one.compared or one.differences for one in self.judged))

    @property
    def code(self) -> int:
        """0: equal, 1: rows differ, 2: not conclusive."""
        return 2 if not self.conclusive else 0 if self.equal else 1

    def record_of(self, difference: Difference) -> str:
        """Describe the one record that makes a difference; empty if it is not a single known record."""
        record = self._record(difference)
        if record is None:
            return ""
        sender, epoch, seq, copies = record
        verb = "counts twice" if difference.how is How.EXCEEDS else "lacks"
        late = any(first <= seq <= last for first, last in self.late_runs.get(sender, {}).get(str(epoch), ()))
        # Of several copies, one may not have been late.
        why = f", a duplicate: the log holds it {copies} times" if copies > 1 else ", which was late" if late else ""
        return f"{verb} {sender}/{epoch}: {seq}{why}"

    def _record(self, difference: Difference) -> Found | None:
        return None if difference.mark is None else self.records.get(difference.mark)

    def to_json(self) -> dict[str, Any]:
        return {
            "query": self.query,
            "result": self.result,
            "equal": self.equal,
            "conclusive": self.conclusive,
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
