"""A pipeline that runs as a person starts it, and the outside world that it listens to."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
from tests.ports import later_port

import penstock.demo


def demo() -> str:
    """The RSVP analyzer. Nothing perishes in a test: what clients and stores hold is compared with the whole log."""
    text = Path(penstock.demo.__file__).with_name("pipeline.py").read_text()
    return re.sub('retention="[^"]*"', 'retention="1 day"', text)


class Run:
    """`penstock run` in a folder of its own, as a person starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "pipeline.py"
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (folder / "run.log").open("ab")

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "run", str(self.file)], stdout=self._log, stderr=self._log
        )

    @property
    def said(self) -> str:
        return (self.folder / "run.log").read_text()

    def is_up(self, within: float) -> None:
        """Wait until all its parts are ready."""
        until = time.monotonic() + within
        while " runs; the page is at " not in self.said:
            assert time.monotonic() < until, self.said
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> list[psutil.Process]:
        """kill -9; the children that it had."""
        children = psutil.Process(self.pid).children(recursive=True)
        os.kill(self.pid, signal.SIGKILL)
        self._wait()
        return children

    def stop(self) -> int:
        """As Ctrl-C does; the exit code."""
        os.kill(self.pid, signal.SIGINT)
        return self._wait()

    def _wait(self) -> int:
        assert self._process is not None
        code = self._process.wait(60)
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self.stop()
        self._log.close()

    def tier(self, name: str) -> int | None:
        """The pid of a tier, once it does its work."""
        try:
            return int((self.folder / ".penstock" / "ready" / name).read_text())
        except FileNotFoundError:
            return None

    def penstock(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock", *arguments, "--folder", str(self.folder)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def audit(self) -> dict[str, Any]:
        told = self.penstock("audit", "--json", "--grace", "3600")
        (source,) = [one for one in json.loads(told.stdout or "{}").get("channels", []) if one["kind"] == "source"]
        return dict(source)

    def page(self, path: str) -> Any:
        address = json.loads((self.folder / ".penstock" / "run.json").read_text())["page"]
        with urllib.request.urlopen(address + path, timeout=10) as answer:
            return json.load(answer)

    def balance(self) -> dict[str, Any]:
        """The balance as the page tells it: to wait by. A command for each look would take a core for itself."""
        try:
            return dict(self.page("/status")["balance"] or {})
        except (OSError, ValueError):
            return {}

    @property
    def records(self) -> int:
        """How many records the balance knows of."""
        return sum(one["records"] for one in self.balance().get("channels", ()) if one["kind"] == "source")

    def settled(self, records: int) -> bool:
        """All of them have arrived, none is under way at any hop, and nothing stands against knowing that."""
        balance = self.balance()
        hops = balance.get("hops", ())
        quiet = bool(hops) and not any(hop["in_flight"] or hop["missing"] for hop in hops)
        return quiet and self.records == records and bool(balance["verdict"] == "whole")

    def rows(self, feed: str) -> dict[str, dict[str, Any]]:
        """A result as a client gets it: rows by key."""
        return {json.dumps(row["key"]): row["row"] for row in self.page(f"/feeds/{feed}")["rows"]}


class Outside:
    """The outside world: a feed that nobody kills."""

    def __init__(self, records: int, rate: int, senders: int) -> None:
        self._options = ("--rate", rate, "--senders", senders, "--count", records)
        self._port = later_port()
        self.url = f"ws://127.0.0.1:{self._port}/rsvps"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = [*self._options, "--port", self._port]
        self._process = subprocess.Popen([sys.executable, "-m", "penstock", "feed", "rsvps", *map(str, options)])

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)


def exposed(pid: int) -> list[str]:
    """Where a process, or one below it, listens for others than this machine."""
    found = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            for one in process.net_connections("inet"):
                if one.status == psutil.CONN_LISTEN:
                    address = ip_address(one.laddr.ip)
                    if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                        found.append(f"{process.name()} {process.pid} at {one.laddr.ip}:{one.laddr.port}")
    return found


def readable(folder: Path) -> list[str]:
    """What others than its owner can do something with, of all in a folder and the folder itself."""
    found = []
    for path in (folder, *folder.rglob("*")):
        # Some of it comes and goes.
        with suppress(FileNotFoundError):
            if not path.is_symlink() and (mode := path.stat().st_mode) & 0o077:
                found.append(f"{path} {mode & 0o777:o}")
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
