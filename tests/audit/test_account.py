import json

import pytest

from penstock.audit.account import Account, Outcome, Share, is_account
from penstock.core.errors import Refused

ACCOUNT = Account(
    "query:by_country",
    "life 1",
    5,
    {
        "rsvps": Share(
            {0: 1, 1: 0}, {0: 9, 1: 3}, 12, {Outcome.PASSED: 10, Outcome.LATE: 2}, {"kiosk 7": {"2": [(5, 6)]}}
        )
    },
    3,
    {"by_country": {0: 7}},
    True,
    True,
    {"count": 3.0, "mean": 1.5},
    2,
)


def test_what_is_told_is_understood() -> None:
    assert Account.of(ACCOUNT.key, ACCOUNT.dumps()) == ACCOUNT


def test_what_nobody_named_late_is_not_needed() -> None:
    """As in accounts that name none."""
    told = json.loads(ACCOUNT.dumps())
    del told["shares"]["rsvps"]["late"]
    (share,) = Account.of(ACCOUNT.key, json.dumps(told).encode()).shares.values()
    assert (share.late, share.outcomes[Outcome.LATE]) == ({}, 2)


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b"[1]", b'{"life": 1}', ACCOUNT.dumps().replace(b'"passed"', b'"lost"'), b"[" * 100_000],
)
def test_what_is_no_account_is_refused(value: bytes) -> None:
    with pytest.raises(Refused):
        Account.of(b"query:a", value)


def test_the_bookmark_of_a_source_is_no_account() -> None:
    assert is_account(b"query:by_country")
    assert not is_account(b"rsvps")
    assert not is_account(None)
