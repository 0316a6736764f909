"""A folder in which a run stands, as far as other commands can see."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.pipeline.config import Config
from penstock.run.services import ROLE, RunningPipeline, Services
from penstock.supervise.folder import StateFolder


@contextmanager
def standing(folder: Path, servers: str, address: str | None = None) -> Iterator[Path]:
    """With the channels on that Kafka, or at another address."""
    state = Config.read(folder).state
    with StateFolder(state).locked() as run, StateFolder(state, ROLE).locked() as services:
        address = address or f"kafka://{servers}"
        RunningPipeline(os.getpid(), "test", "penstock.test.status", address, None, None, "", address).write(run.path)
        Services(os.getpid(), servers, up=True).write(services)
        yield folder
