import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured
from penstock.pipeline.load import load

Written = Callable[..., Path]
BEGIN = 'from penstock import Pipeline\napp = Pipeline("meetups")\n'


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Written]:
    """A file with a text; what loading leaves in the interpreter is taken back."""
    path, modules = list(sys.path), set(sys.modules)

    def write(text: str, name: str = "pipe.py") -> Path:
        file = tmp_path / name
        file.write_text(text)
        return file

    yield write
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def refusal(path: Path) -> str:
    with pytest.raises(Misconfigured) as caught:
        load(path)
    return str(caught.value)


def test_a_file_is_run_and_its_pipeline_described(written: Written) -> None:
    found = load(written(BEGIN + 'app.source("ws://x", into="rsvps")\n'))
    assert (found.name, set(found.channels)) == ("meetups", {"rsvps"})


def test_a_pipeline_may_import_what_lies_beside_it(written: Written) -> None:
    written('NAME = "beside"\n', "beside_it.py")
    assert (
        load(written("from penstock import Pipeline\nimport beside_it\nx = Pipeline(beside_it.NAME)\n")).name
        == "beside"
    )


def test_an_absent_file_is_told(tmp_path: Path) -> None:
    said = "there is no such file; name a Python file that creates a Pipeline"
    assert refusal(tmp_path / "absent.py") == f"{tmp_path}/absent.py: {said}"
    assert refusal(tmp_path) == f"{tmp_path}: {said}"


def test_another_kind_of_file_is_told(written: Written) -> None:
    assert refusal(written("", "pipe.toml")).endswith(
        "pipe.toml: this is not a Python file; its name has to end in .py"
    )


def test_a_syntax_error_is_told_with_its_line(written: Written) -> None:
    assert refusal(written("x = 1\ny = (\n")) == "pipe.py:2: SyntaxError: '(' was never closed"


def test_a_syntax_error_beside_it_is_told_with_that_file(written: Written) -> None:
    written("\n\nx = (\n", "broken_beside.py")
    assert refusal(written("import broken_beside\n")) == "broken_beside.py:3: SyntaxError: '(' was never closed"


def test_a_file_that_is_not_text_is_told(written: Written, tmp_path: Path) -> None:
    (tmp_path / "raw.py").write_bytes(b"x = '\xff'\n")
    assert refusal(tmp_path / "raw.py").startswith("raw.py:1: SyntaxError: (unicode error)")
    (tmp_path / "null.py").write_bytes(b"\0")
    assert refusal(tmp_path / "null.py") == "null.py: SyntaxError: source code string cannot contain null bytes"


def test_an_exception_is_told_with_its_line(written: Written) -> None:
    assert refusal(written("x = 1\n\nx / 0\n")) == "pipe.py:3: ZeroDivisionError: division by zero"


def test_the_line_is_that_of_the_file_itself_however_deep_it_happens(written: Written) -> None:
    text = "import json\n\ndef read():\n    return json.loads('?')\n\nread()\n"
    assert refusal(written(text)).startswith("pipe.py:4: JSONDecodeError: Expecting value")


def test_a_relative_path_does_not_lose_the_line(written: Written) -> None:
    with chdir(written("x / 0\n").parent):
        assert refusal(Path("pipe.py")).startswith("pipe.py:1: NameError")


def test_a_mistake_in_a_part_is_told_with_its_line(written: Written) -> None:
    said = refusal(written(BEGIN + '\napp.channel("a", partitions=0)\n'))
    assert said == "pipe.py:4: channel a: partitions= is 0; set 1 or more"


def test_parts_that_do_not_fit_are_told_with_the_line_of_their_declaration(written: Written) -> None:
    said = refusal(written(BEGIN + 'app.store("rsvps", "redis://")\n'))
    assert said == 'pipe.py:3, store redis://: there is no channel "rsvps"; declare it: app.channel(…)'


def test_a_file_without_a_pipeline_is_told(written: Written) -> None:
    assert refusal(written("x = 1\n")) == 'pipe.py: it creates no Pipeline; create one: app = Pipeline("name")'


def test_a_file_with_two_pipelines_is_told(written: Written) -> None:
    said = refusal(written(BEGIN + 'other = Pipeline("other")\n'))
    assert said == 'pipe.py: it creates 2 pipelines; create one: app = Pipeline("name")'


def test_a_pipeline_with_two_names_is_one(written: Written) -> None:
    assert load(written(BEGIN + "same = app\n")).name == "meetups"


@pytest.mark.parametrize(
    "line",
    [
        'app.source("listen+http://127.0.0.1:8080/in", into="hits", partition_by=5)',
        'app.source("listen+http://127.0.0.1:8080/in", into="hits", maxsize=5)',
        'app.channel("hits", retention=7)',
        'app.channel("hits", schema={"url": "string"})',
        'app.channel("hits", partitions="2")',
        'app.channel("hits", event_time=5)',
        'app.store("hits", None)',
        'app.store("hits", "redis://", ttl=60)',
        'app.page("hits", chart="bar")',
        'app.query("SELECT * FROM hits")',
        'app.query("by_url", key="url")',
        "app.query(lambda hits: hits)",
        'app.sql_query("by_url", key="url", watermark=30, sql="SELECT * FROM hits")',
        'app.sql_query("by_url", key="url", windw="10 seconds", sql="SELECT * FROM hits")',
    ],
)
def test_an_option_of_the_wrong_kind_is_told_with_its_line_and_no_word_of_python(written: Written, line: str) -> None:
    with pytest.raises(Misconfigured) as error:
        load(written(f"{BEGIN}\n{line}\n"))
    assert error.value.location.startswith("pipe.py:4")
    assert "Error" not in str(error.value)
    assert error.value.fix or "; " in error.value.problem
