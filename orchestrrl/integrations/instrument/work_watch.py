"""Notes the ends of collectives that the program does not wait for at once, on the CPU and on CUDA devices."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument.rings import RingWriter
else:  # in the traced process, where this folder is on the path
    from rings import RingWriter

PERIOD_S = 1e-3
IDLE_PERIOD_S = 5e-3  # nothing wakes the thread, as that would cost each collective a system call
BUSY_FOR = 50  # periods after which it is idle
DEVICE_PERIOD_S = 200e-6
ANCHOR_PERIOD_S = 10.0  # how often the device's clock is compared with the host's


class WorkWatch:
    """Notes when collectives on the CPU are over: when their owner has waited for them, or a thread finds it.

    A callback on the Work's future would tell the very moment, and have the backend's thread take the GIL away from the
    program for it, which costs several times what else is noted of a collective. So each Work is kept until its owner
    has waited for it; a thread, which begins with the first, looks after those that are left. Until then a collective
    counts as in flight: its end may be noted late, by the thread's period and what the GIL adds, but never early.
    """

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
            work.get_future().add_done_callback(lambda _: writer.end(sequence))
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


def is_completed(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # it failed, which its owner hears when it waits
        return True


@dataclass(slots=True, eq=False)
class _Pending:
    sequence: int
    issued_ns: int
    begun: Any  # an event
    is_over: Callable[[], bool] | None = None  # None: issued among others, not yet closed
    running: bool = False


class DeviceWatch:
    """Notes when collectives run on a CUDA device, by events on its streams that a thread polls while some are pending.

    What is issued may wait in a stream for long, and what is issued without waiting is not waited for, so neither the
    call nor its return says when the network is in use. The start is an event before the operation; the end an event
    after it, or, of an asynchronous operation, that its Work says it is completed. The thread sees both late by at most
    two of its periods; the start's time itself is then read off the device. `cuda` is torch.cuda, or what behaves like
    it.
    """

    def __init__(self, cuda: Any, writer: RingWriter, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.writer = writer
        self._cuda, self._clock_ns = cuda, clock_ns
        self._pending: list[_Pending] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._anchors: dict[int, tuple[Any, int]] = {}
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], Any], sequence: int, asynchronous: bool, coalescing: Any) -> Any:
        """Issue one operation to the current stream, between events."""
        entry = _Pending(sequence, self._clock_ns(), self._record())
        try:
            work = call()
            if work is not None and hasattr(work, "wait") and not asynchronous:
                work.wait()  # so does whoever called: the stream does, not the host
        except BaseException:
            entry.is_over = lambda: True
            self._add(entry)
            raise
        if coalescing is not None:
            coalescing.append(entry)
        elif asynchronous and work is not None:
            entry.is_over = lambda: is_completed(work)
        else:
            entry.is_over = self._record().query
        self._add(entry)
        return work

    def follow(self, entries: list[Any], work: Any) -> None:
        """What was issued among others ends when all of them have."""
        over = self._record().query if work is None else lambda: is_completed(work)
        with self._changed:
            for entry in entries:
                entry.is_over = over

    def poll(self) -> bool:
        """Note what has begun and ended. Returns whether anything is left to wait for."""
        with self._changed:
            entries = list(self._pending)
        for entry in entries:
            if not entry.running and entry.begun.query():
                entry.running = True
                self.writer.started(entry.sequence, self._begun_ns(entry))
            if entry.running and entry.is_over is not None and entry.is_over():
                self.writer.end(entry.sequence)
                with self._changed:
                    self._pending.remove(entry)
        with self._changed:
            return bool(self._pending)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _add(self, entry: _Pending) -> None:
        with self._changed:
            self._pending.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="orchestrrl-recorder", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
            self.poll()
            time.sleep(DEVICE_PERIOD_S)

    def _record(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def _begun_ns(self, entry: _Pending) -> int:
        """The host's time of the event, which must lie between the issuing and now."""
        now_ns = self._clock_ns()
        device = self._cuda.current_device()
        anchor = self._anchors.get(device)
        if anchor is None or now_ns - anchor[1] > ANCHOR_PERIOD_S * 1e9:
            event = self._cuda.Event(enable_timing=True)
            with self._cuda.stream(self._cuda.Stream()):  # one where nothing is before it
                event.record()
                event.synchronize()
            anchor = self._anchors[device] = event, self._clock_ns()
        # Negative where the event was before the anchor.
        since_ns = round(float(anchor[0].elapsed_time(entry.begun)) * 1e6)
        return min(max(anchor[1] + since_ns, entry.issued_ns), now_ns)
