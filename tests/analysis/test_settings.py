"""What a profile sets, and what it leaves to the user."""

import pytest
from pydantic import ValidationError

from penstock.analysis.settings import SparkSettings


@pytest.mark.parametrize("answers", ["127.0.0.1:0", "[::1]:65535", "host:80"])
def test_the_analysis_answers_at_a_port(answers: str) -> None:
    assert SparkSettings(answers=answers).answers == answers


@pytest.mark.parametrize("answers", ["127.0.0.1:70000", "127.0.0.1:65536", "127.0.0.1", "8080", ":"])
def test_what_is_no_port_is_refused(answers: str) -> None:
    with pytest.raises(ValidationError, match="answers"):
        SparkSettings(answers=answers)


def test_a_profile_sets_what_nobody_says() -> None:
    assert SparkSettings(profile="throughput").jit == "thorough"
    assert SparkSettings(profile="throughput", jit="quick").jit == "quick"
    assert SparkSettings().jit == "quick"
