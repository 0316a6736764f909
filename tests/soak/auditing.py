"""An auditor as a program of its own, for tests that kill or measure it.

`auditing.py FOLDER SERVERS CHANNEL python|spark [end]`: with `end` it stops when it has read all there is, and says how
many seconds that took.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

from penstock.audit.auditor import Auditor, Reduction
from penstock.audit.findings import Kind, Watched
from penstock.audit.ledger import Ledger
from penstock.channels.kafka import Kafka
from penstock.pipeline.config import Config
from penstock.pipeline.pipeline import Pipeline


def ledger_in(folder: Path) -> Path:
    return folder / "ledger.db"


def watching(channel: str) -> list[Watched]:
    return [Watched(channel, Kind.SOURCE, (f"source:{channel}",))]


def main(folder: str, servers: str, channel: str, engine: str, until: str = "") -> None:
    with ExitStack() as stack:
        kafka = Kafka(servers)
        ledger = stack.enter_context(closing(Ledger(ledger_in(Path(folder)))))
        auditor = Auditor(kafka, ledger, watching(channel), "", catch_up_only=engine == "spark")
        stack.callback(auditor.close)
        reduction = _spark(stack, folder, servers) if engine == "spark" else None
        if not until:
            auditor.run(threading.Event(), every=0.01, reduction=reduction)
            return
        began = time.monotonic()
        auditor.step(0)
        while (auditor.catch_up(reduction()) if reduction else auditor.step(1.0)) or auditor.behind():
            pass
        sys.stdout.write(f"{time.monotonic() - began}\n")


def _spark(stack: ExitStack, folder: str, servers: str) -> Callable[[], Reduction]:
    # Imported only by those who use it: it would double the memory of the others.
    from penstock.run.analyse import spark_reader

    config = Config.read(Path(folder), environ={"PENSTOCK_CHANNELS_ADDRESS": f"kafka://{servers}"})
    found = stack.enter_context(spark_reader(Pipeline("soak").describe(), config, None))
    return lambda: found


if __name__ == "__main__":
    main(*sys.argv[1:])
