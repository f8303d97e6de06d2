"""When collectives on the CPU are over that were not waited for at once: who waits says so, or a thread that looks.

A callback on the Work's future would tell the very moment, and have the backend's thread take the GIL away from the
program for it, which costs several times what else is noted of a collective. So each Work is kept until its owner has
waited for it; a thread looks after those that are left. Until then a collective counts as in flight: its end may be
noted late, by the thread's period and what the GIL adds, but never early.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument.rings import RingWriter
else:  # in the traced process, where this folder is on the path
    from rings import RingWriter

PERIOD_S = 1e-3
IDLE_PERIOD_S = 5e-3  # nothing wakes the thread, as that would cost each collective a system call
BUSY_FOR = 50  # periods after which it is idle


class WorkWatch:
    """One per process. Its thread begins with the first collective that is not waited for at once."""

    def __init__(self) -> None:
        # By the address of the Work, which is kept so that the address stays its own.
        self._pending: dict[int, tuple[Any, RingWriter, int]] = {}
        # Of these nobody but who waits can say that they are over, so they are kept by weak references.
        self._waited: dict[int, tuple[Any, RingWriter, int]] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

    def follow(self, work: Any, writer: RingWriter, sequence: int, completes: bool) -> None:
        """Note the end of an asynchronous operation when it comes. `completes`: whether the Work itself will say so."""
        if completes:
            self._pending[id(work)] = work, writer, sequence
            if self._thread is None:
                self._start()
            return
        try:
            work.get_future().add_done_callback(partial(_done, writer, sequence))
        except RuntimeError:  # it has no future, as point-to-point operations of gloo have none
            key = id(work)
            self._waited[key] = weakref.ref(work, partial(self._dropped, key)), writer, sequence

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What replaces Work.wait."""
        pending, waited = self._pending, self._waited

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if not pending and not waited:
                return original(work, *args, **kwargs)
            key = id(work)
            entry = pending.pop(key, None)
            if entry is None:
                entry = waited.pop(key, None)
                if entry is None:
                    return original(work, *args, **kwargs)
                try:
                    return original(work, *args, **kwargs)
                finally:
                    entry[1].end(entry[2])
            try:
                result = original(work, *args, **kwargs)
            except BaseException:
                pending[key] = entry  # the time may be up and the network busy
                raise
            entry[1].end(entry[2])
            return result

        return wait

    def poll(self) -> int:
        """Note what has ended. Returns how many have not."""
        pending = self._pending
        for key in list(pending):
            entry = pending.get(key)
            if entry is not None and is_completed(entry[0]) and pending.pop(key, None) is not None:
                entry[1].end(entry[2])
        return len(pending)

    def stop(self) -> None:
        self._stopped = True
        atexit.unregister(self.stop)
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def forked(self) -> None:
        """In the child, where the thread is not."""
        self._pending.clear()
        self._waited.clear()
        self._thread = None

    def _start(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="orchestrrl-recorder-works", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before the interpreter goes away under it

    def _loop(self) -> None:
        idle = 0
        while not self._stopped:
            idle = 0 if self._pending and self.poll() else idle + 1
            time.sleep(PERIOD_S if idle < BUSY_FOR else IDLE_PERIOD_S)

    def _dropped(self, key: int, reference: Any) -> None:
        """Nobody can wait for it any more."""
        found = self._waited.get(key)
        if found is not None and found[0] is reference:
            del self._waited[key]
            found[1].end(found[2])


def _done(writer: RingWriter, sequence: int, _: Any) -> None:
    writer.end(sequence)


def is_completed(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # it failed, which its owner hears when it waits
        return True
