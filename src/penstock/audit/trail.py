"""What totals did lately, and since when they stand still: the memory of the alarms. No I/O."""

OVER = 300.0


class Trail:
    """How much totals grew in the last minutes: between half of `over` and all of it, once it has been kept so long."""

    __slots__ = ("_at", "_newer", "_older", "_over")

    def __init__(self, over: float = OVER) -> None:
        self._over = over
        self._at = 0.0
        self._older: tuple[float, ...] = ()
        self._newer: tuple[float, ...] = ()

    def reach(self, elapsed: float, *totals: float) -> tuple[float, ...]:
        """Take over the totals of now; their growth. What was there before the first call is none.

        When the first of them shrinks, who counts has begun anew, and so does the trail.
        """
        if not self._older or totals[0] < self._newer[0]:
            self._at, self._older, self._newer = elapsed, totals, totals
        elif elapsed - self._at >= self._over / 2:
            self._at, self._older, self._newer = elapsed, self._newer, totals
        return tuple(now - before for now, before in zip(totals, self._older, strict=True))


class Standstill:
    """Since when something has work to do and gets no further."""

    __slots__ = ("_at", "_input", "_since", "_state")

    SETTLES = 10.0
    """Input that is counted so soon after a step may be what the step has taken: two counts are never of one moment."""

    def __init__(self) -> None:
        self._at = 0.0
        self._state: object = None
        self._input: float | None = None
        self._since: float | None = None

    def look(self, elapsed: float, state: object, waiting: bool, arrived: float | None = None) -> float:
        """For how many seconds there was input while `state` stayed the same.

        There is input when some is said to be `waiting`, or when `arrived`, a total, grew since the last step.
        """
        if self._state is None or state != self._state:
            self._state, self._at, self._since = state, elapsed, None
        if self._input is None or elapsed - self._at < self.SETTLES:
            self._input = arrived
        elif arrived is not None:
            self._input = min(self._input, arrived)
        grew = arrived is not None and self._input is not None and arrived > self._input
        if not waiting and not grew:
            self._since = None
        elif self._since is None:
            self._since = elapsed
        return 0.0 if self._since is None else elapsed - self._since
