import os
import subprocess
import sys
from collections.abc import Iterator
from io import FileIO
from threading import Event

import pytest

from penstock.cli.standard import Input

WRITE = """
import sys
from penstock.cli.standard import Output
out = Output()
assert not out.closed()
try:
    out.write(b"%d\\n" % n for n in range(100_000))
except BrokenPipeError:
    sys.exit(7)
"""
WAIT = """
from penstock.cli.standard import Output
out = Output()
out.write([b"ready\\n"])
while not out.closed():
    pass
"""
SHARE = """
import sys
from penstock.cli.standard import Output
Output().write([sys.argv[1].encode() * 100 + b"\\n"] * 20_000)
"""


Pipe = tuple[int, FileIO]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """Where to read, and where to write."""
    read, write = os.pipe()
    with FileIO(read), FileIO(write, "w") as into:
        yield read, into


def lines(pipe: Pipe, content: bytes, longest: int = 100) -> list[bytes]:
    pipe[1].write(content)
    pipe[1].close()
    return [line for portion in Input(pipe[0], longest).batches(Event()) for line in portion]


def test_lines_end_with_a_line_feed_or_both(pipe: Pipe) -> None:
    assert lines(pipe, b"a\r\n\nb\rc\nlast") == [b"a", b"", b"b\rc", b"last"]


def test_nothing_is_no_line(pipe: Pipe) -> None:
    assert lines(pipe, b"") == []


def test_a_line_that_is_too_long_stays_too_long_and_hurts_no_other(pipe: Pipe) -> None:
    found = lines(pipe, b"x" * 500 + b"\nab\n", longest=3)
    assert len(found[0]) > 3
    assert found[1:] == [b"ab"]


def test_a_stop_ends_an_input_that_is_open_and_half_a_line_is_none(pipe: Pipe) -> None:
    stop, given = Event(), Input(pipe[0], 100)
    portions = given.batches(stop)
    pipe[1].write(b"whole\nhalf")
    assert next(portions) == [b"whole"]
    stop.set()
    assert list(portions) == []
    assert (given.ended, given.incomplete) == (False, True)


def test_nothing_is_torn_where_lines_are_whole_or_the_input_ends(pipe: Pipe) -> None:
    stop, given = Event(), Input(pipe[0], 100)
    portions = given.batches(stop)
    pipe[1].write(b"whole\n")
    assert next(portions) == [b"whole"]
    stop.set()
    assert (list(portions), given.incomplete) == ([], False)
    pipe[1].write(b"last")
    pipe[1].close()
    assert [line for portion in given.batches(Event()) for line in portion] == [b"last"]
    assert (given.ended, given.incomplete) == (True, False)


def test_a_person_is_asked_before_each_read(pipe: Pipe) -> None:
    asked: list[int] = []
    portions = Input(pipe[0], 100, lambda: asked.append(1)).batches(Event())
    pipe[1].write(b"a\n")
    assert next(portions) == [b"a"]
    assert len(asked) == 1
    pipe[1].write(b"b\n")
    assert next(portions) == [b"b"]
    assert len(asked) == 2


def cut(*chunks: bytes, longest: int = 100) -> list[bytes]:
    """The lines of an input whose chunks are read one by one."""
    read, write = os.pipe()
    with FileIO(read), FileIO(write, "w") as into:
        batches, found = Input(read, longest).batches(Event()), list[bytes]()
        for chunk in chunks:
            into.write(chunk)
            found += next(batches)
        into.close()
        return [*found, *(line for batch in batches for line in batch)]


def test_a_line_may_come_in_pieces() -> None:
    assert cut(b"on", b"e\ntw", b"o", b"\n", b"three\n") == [b"one", b"two", b"three"]


def test_the_end_of_the_stream_ends_the_last_line() -> None:
    assert cut(b"one\ntwo") == [b"one", b"two"]
    assert cut() == []


def test_a_byte_order_mark_is_taken_off_the_first_line_only() -> None:
    mark = b"\xef\xbb\xbf"
    assert cut(mark[:1], mark[1:] + b"one\n" + mark + b"two\n") == [b"one", mark + b"two"]
    assert cut(mark + b"one") == [b"one"]


def test_a_line_without_end_is_held_up_to_the_limit_and_told_by_one_more_byte() -> None:
    found = cut(*[b"x" * 7] * 1_000, b"\nnext\n", longest=10)
    assert (len(found[0]) > 10, len(found[0]) < 30, found[1]) == (True, True, b"next")
    assert 10 < len(cut(*[b"x" * 7] * 1_000, longest=10)[0]) < 30


def test_a_cut_line_stays_too_long_where_a_carriage_return_is_at_the_limit() -> None:
    (found,) = cut(b"x" * 10, b"\r", b"yyy", b"\n", longest=10)
    assert len(found) > 10


def test_a_line_of_exactly_the_limit_is_whole() -> None:
    assert cut(b"x" * 10, b"\n", longest=10) == [b"x" * 10]


def test_whoever_stops_reading_ends_the_writer_without_a_complaint() -> None:
    with subprocess.Popen([sys.executable, "-c", WRITE], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        assert writer.stdout.readline() == b"0\n"
        writer.stdout.close()
        assert writer.stderr.read() == b""
    assert writer.returncode == 7


def test_an_output_that_nobody_reads_any_more_is_noticed_without_writing() -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        writer.stdout.close()
        assert writer.wait(30) == 0


def test_lines_of_two_writers_to_one_pipe_are_never_torn(pipe: Pipe) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", SHARE, letter], stdout=pipe[1]) for letter in "ab"]
    pipe[1].close()
    with os.fdopen(os.dup(pipe[0]), "rb") as out:
        found = out.read().splitlines()
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(found) == 40_000
    assert set(found) == {b"a" * 100, b"b" * 100}
