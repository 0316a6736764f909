"""Ports for those who bind them later."""

import random
import socket
from contextlib import suppress


def later_port() -> int:
    """One that is free, below those that the system, or a pipeline for its services, gives away meanwhile."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
