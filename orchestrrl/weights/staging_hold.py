"""A lock on a version's folder, by which trainers keep the peer from discarding the parts that they stage.

Ranks stage a version before it is published to the daemon, and its number may be lower than that of the fleet's
version. Therefore, no order of the daemon protects the staged parts. Instead, a shared lock (flock) on the folder
protects them. The kernel releases the lock when a trainer dies.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class StagingHold:
    """A shared lock on a folder. The constructor creates the folder if it does not exist, and acquires the lock. Raises
    OSError if the folder cannot be created."""

    def __init__(self, home: Path) -> None:
        self._held: int | None = None
        while self._held is None:
            with suppress(FileExistsError):  # pathlib's exist_ok raises it if the folder is removed at that moment
                os.mkdir(home, 0o700)
            self._held = _locked_folder(home)  # None: the peer was discarding the folder

    def let_go(self) -> None:
        """Release the lock. A repeated call has no effect."""
        held, self._held = self._held, None
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_UN)  # closing does not release the lock if the trainer has forked
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
    """Yield True if no trainer is staging into the folder, else False. While the context of a True value is open, no
    trainer can begin to stage into the folder."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(folder)
