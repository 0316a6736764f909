import shutil
import sys
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured, Unavailable
from penstock.supervise.jars import broken, cache_folder, ensure_jars
from penstock.supervise.java import Java, find_java

NO_JAVA = Java(Path("/nowhere/java"), 17, Path("/nowhere"))


@pytest.fixture(scope="module")
def whole() -> Path:
    """The user's own cache, complete."""
    return ensure_jars(find_java()).kafka[0].parents[1]


def ivy_that(does: str, tmp_path: Path) -> Java:
    """A Java that in place of Ivy runs the given lines of Python; `lib` is the folder to fill, `cache` is Ivy's own."""
    path = tmp_path / "java"
    path.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys\n"
        "lib = pathlib.Path(sys.argv[sys.argv.index('-retrieve') + 1].split('/[conf]')[0])\n"
        "cache = pathlib.Path(sys.argv[sys.argv.index('-cache') + 1])\n"
        "cache.mkdir(parents=True, exist_ok=True)\n" + does
    )
    path.chmod(0o755)
    return Java(path, 17, tmp_path)


def test_a_complete_cache_needs_neither_network_nor_java(whole: Path) -> None:
    jars = ensure_jars(NO_JAVA, whole.parent)
    assert (len(jars.kafka), len(jars.spark)) == (46, 5)
    assert all(path.is_file() for path in jars.kafka + jars.spark)


def test_every_jar_of_the_cache_is_what_it_has_to_be(whole: Path) -> None:
    assert broken(whole) == []


def test_a_jar_is_named_when_it_is_missing_or_spoilt(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy/spark/commons-pool2-2.12.1.jar").unlink()
    with (tmp_path / "copy/kafka/re2j-1.8.jar").open("ab") as jar:
        jar.write(b"!")
    assert broken(tmp_path / "copy") == ["kafka/re2j-1.8.jar", "spark/commons-pool2-2.12.1.jar"]


def test_what_ivy_brought_is_kept_under_its_name_only_when_it_is_right(whole: Path, tmp_path: Path) -> None:
    java = ivy_that(f"import shutil; shutil.copytree({str(whole)!r}, lib)", tmp_path)
    jars = ensure_jars(java, tmp_path / "cache", pauses=())
    assert broken(jars.kafka[0].parents[1]) == []
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [whole.name, f"{whole.name}.lock"]


def test_a_spoilt_jar_is_found_by_its_checksum(whole: Path, tmp_path: Path) -> None:
    does = f"import shutil; shutil.copytree({str(whole)!r}, lib); (lib / 'kafka/re2j-1.8.jar').write_text('spoilt')"
    with pytest.raises(Unavailable, match=r"kafka/re2j-1\.8\.jar: not what jars\.sha256 says"):
        ensure_jars(ivy_that(does, tmp_path), tmp_path / "cache", pauses=())
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_failure_is_followed_by_another_attempt_that_goes_on_from_there(whole: Path, tmp_path: Path) -> None:
    does = (
        "if not (cache / 'half').exists():\n"
        "    (cache / 'half').touch()\n"
        "    sys.exit(1)\n"
        f"import shutil; shutil.copytree({str(whole)!r}, lib)"
    )
    assert ensure_jars(ivy_that(does, tmp_path), tmp_path / "cache", pauses=(0,)).kafka


def test_a_failure_shows_what_ivy_said_last(tmp_path: Path) -> None:
    java = ivy_that("print('downloading ...'); sys.exit('UnknownHostException: repository')", tmp_path)
    with pytest.raises(Unavailable, match=r"Ivy gave up:\ndownloading \.\.\.\nUnknownHostException: repository"):
        ensure_jars(java, tmp_path / "cache", pauses=(0,))


def test_a_certificate_that_java_does_not_trust_is_called_that(tmp_path: Path) -> None:
    java = ivy_that("sys.exit('SSLHandshakeException: PKIX path building failed')", tmp_path)
    with pytest.raises(Unavailable, match=r"Java does not trust its certificate \(docs/supervise\.md, Certificates\)"):
        ensure_jars(java, tmp_path / "cache", pauses=())


def test_progress_counts_what_was_found_and_fetched(whole: Path, tmp_path: Path) -> None:
    does = (
        r"print('\tfound org#a;1 in public\n\tfound org#b;1 in public\n....\n\t[SUCCESSFUL ] org#a;1!a.jar (3ms)')"
        f"\nimport shutil; shutil.copytree({str(whole)!r}, lib)"
    )
    steps: list[tuple[int, int]] = []
    ensure_jars(ivy_that(does, tmp_path), tmp_path / "cache", lambda done, total: steps.append((done, total)))
    assert steps[-1] == (3, 102)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match="file/cache: the jars cannot be kept there"):
        ensure_jars(NO_JAVA, tmp_path / "file" / "cache")


def test_the_cache_lies_where_the_user_keeps_such_things(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "penstock" / "jars"
    assert cache_folder({}) == Path.home() / ".cache" / "penstock" / "jars"
