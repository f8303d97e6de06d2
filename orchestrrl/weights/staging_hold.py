"""A version's folder in the hands of trainers: its peer leaves parts alone for as long as anybody holds them.

Ranks stage before the daemon knows of a version, whatever its number: it may be lower than the fleet's. So it is no
order of the daemon that keeps what they stage, but a shared lock (flock) on the folder, which the system lets go of
when a trainer dies.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class StagingHold:
    """Makes the folder, and holds it until it is let go of. Raises OSError where it cannot be made."""

    def __init__(self, home: Path) -> None:
        self._held: int | None = None
        while self._held is None:
            with suppress(FileExistsError):  # of pathlib's exist_ok it comes where the folder goes away just then
                os.mkdir(home, 0o700)
            self._held = _locked_folder(home)  # None: the peer was just discarding it

    def let_go(self) -> None:
        """Harmless when it was."""
        held, self._held = self._held, None
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_UN)  # closing is not enough where the trainer has forked
            os.close(held)

    def __del__(self) -> None:
        self.let_go()


def _locked_folder(home: Path) -> int | None:
    try:
        folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    fcntl.flock(folder, fcntl.LOCK_SH)
    try:
        if os.path.samestat(os.fstat(folder), home.stat()):
            return folder
    except FileNotFoundError:
        pass
    os.close(folder)
    return None


@contextmanager
def nobody_stages(home: Path) -> Iterator[bool]:
    """Whether that is so, and then nobody begins to before it is left."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(folder)
