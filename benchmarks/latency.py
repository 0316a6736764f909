"""From the feed to a browser: the latency of the demo's real-time query, and the memory of all processes.

    .venv/bin/python benchmarks/latency.py --minutes 5

Runs the demo in a folder of its own with 200 records/s, opens its page in Chromium on the same machine, waits until the
start has passed out of the figures, and reports what the browser measured over the minutes after that: each result row
carries the time at which the newest record in it was due at its sender.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
WARM_UP = 60


def status(folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock", "status", "--json", "--folder", str(folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(json.loads(told.stdout))


def wait_for_page(folder: Path) -> str:
    while True:
        try:
            page = str(json.loads((folder / ".penstock" / "run.json").read_text())["page"])
            with urllib.request.urlopen(f"{page}/feeds/by_country", timeout=1) as answer:
                if json.load(answer)["rows"]:
                    return page
        except (OSError, ValueError):
            pass
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--screenshot", type=Path)
    arguments = parser.parse_args()
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    folder = Path(tempfile.mkdtemp(prefix="penstock-latency-"))
    began = time.monotonic()
    with (folder / "run.log").open("wb") as log:
        run = subprocess.Popen([sys.executable, "-m", "penstock", "demo"], cwd=folder, stdout=log, stderr=log)
    try:
        address = wait_for_page(folder)
        print(f"first points after {time.monotonic() - began:.1f} s")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.goto(address)
            peak = 0
            until = time.monotonic() + WARM_UP + arguments.minutes * 60
            while time.monotonic() < until:
                page.wait_for_timeout(30_000)
                found = status(folder)
                peak = max(peak, found["memory"])
            if arguments.screenshot:
                page.screenshot(path=arguments.screenshot, full_page=True)
            browser.close()
        node = found["nodes"]["feed:by_country"]
        for name, description in (("browser", "to the browser"), ("door", "to the delivery")):
            took = node[name]
            figures = ", ".join(f"{key} {took[key]:.1f}" for key in ("p50", "p95", "p99", "max"))
            print(f"{description}, the last five minutes, {took['count']} rows: {figures} ms")
        print(f"memory of all processes, the browser apart: peak {peak / 2**20:,.0f} MiB")
        print(f"balance: {'whole' if found['balance']['whole'] else 'NOT WHOLE'}")
    finally:
        run.terminate()
        run.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
