import pickle

import pytest

from penstock.supervise.events import Event, Kind, last_line, reason


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (Event("redis", Kind.STARTED, pid=7), "redis started as process 7"),
        (Event("redis", Kind.READY, delay=1.234), "redis is ready after 1.2 s"),
        (Event("redis", Kind.DIED, code=-9), "redis died: it was ended by SIGKILL"),
        (Event("redis", Kind.DIED, code=3), "redis died: it ended with code 3"),
        (Event("redis", Kind.DIED), "redis died: it did not become ready"),
        (Event("redis", Kind.RESTARTING, delay=0.5), "redis starts again in 0.5 s"),
        (Event("redis", Kind.FINISHED), "redis finished"),
        (Event("redis", Kind.STOPPED), "redis stopped"),
        (Event("redis", Kind.KILLED), "redis did not stop in time and was killed"),
    ],
)
def test_an_event_is_a_sentence(event: Event, sentence: str) -> None:
    assert str(event) == sentence
    assert pickle.loads(pickle.dumps(event)) == event


def test_an_unknown_signal_is_told_by_its_number() -> None:
    assert reason(-200) == "it was ended by signal 200"


def test_the_last_line_is_our_own_error_if_there_is_one() -> None:
    assert last_line([]) == ""
    assert last_line(["one", "two", "  "]) == "two"
    assert last_line(["penstock: the disk is full", "shutdown hook called"]) == "the disk is full"
    assert len(last_line(["x" * 10_000])) == 500
