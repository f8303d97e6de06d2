"""When the collector of garbage runs: hardly while a process starts, since nearly all that a start makes stays."""

import gc

_USUAL = gc.get_threshold()
_AT_START = 100_000


def seldom() -> None:
    """Until `keep_loaded`: a start takes a tenth less, and a command that ends soon has little to collect."""
    gc.set_threshold(_AT_START)


def keep_loaded() -> None:
    """What there is now stays as long as the process, so the collector need not look through it again: that stops
    everything for up to a tenth of a second, as long as a window lasts."""
    gc.freeze()
    gc.set_threshold(*_USUAL)
