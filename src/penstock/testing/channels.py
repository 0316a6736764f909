"""A binder that lives in memory: the shape of a real one, for tests of whatever stands on a channel."""

from penstock.channels.memory import MemoryChannels

__all__ = ["MemoryChannels"]
