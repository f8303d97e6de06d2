"""Record the ends of asynchronous collectives on the CPU, and the starts and ends of collectives on CUDA devices."""

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
IDLE_PERIOD_S = 5e-3  # the thread polls, because waking it would cost each collective a system call
BUSY_FOR = 50  # periods without work after which the thread is idle
DEVICE_PERIOD_S = 200e-6
ANCHOR_PERIOD_S = 10.0  # interval of comparisons between the device's clock and the host's


class WorkWatch:
    """Records the end of each collective on the CPU when the program has waited for the collective, or when a polling
    thread detects its end.

    A callback on the future of torch's Work object would be exact, but the backend's thread would take the GIL from the
    program, which would cost several times as much as the rest of the recording. So each Work is kept until the program
    has waited for it. A thread, started with the first Work, polls all kept Works. Until its end is recorded, a
    collective is reported as in flight. The end may be recorded late, by up to the thread's period plus the wait for
    the GIL, but never early.
    """

    def __init__(self) -> None:
        # By the address of the Work, which is referenced so that its address is not reused.
        self._pending: dict[int, tuple[Any, RingWriter, int]] = {}
        # The end of these is known only to a waiting owner, so they are kept by weak references.
        self._waited: dict[int, tuple[Any, RingWriter, int]] = {}
        self._thread: threading.Thread | None = None
        self._stopped = False

    def follow(self, work: Any, writer: RingWriter, sequence: int, completes: bool) -> None:
        """Watch an asynchronous operation, so that its end is recorded. `completes` is set if `work` reports its own
        completion."""
        if completes:
            self._pending[id(work)] = work, writer, sequence
            if self._thread is None:
                self._start()
            return
        try:
            work.get_future().add_done_callback(lambda _: writer.end(sequence))
        except RuntimeError:  # no future: point-to-point operations of gloo have none
            key = id(work)
            self._waited[key] = weakref.ref(work, partial(self._dropped, key)), writer, sequence

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a replacement for the method `wait` of torch's Work. It calls the method `original`, then records the
        end of the operation."""
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
                pending[key] = entry  # after a timeout the operation may still run
                raise
            entry[1].end(entry[2])
            return result

        return wait

    def poll(self) -> int:
        """Record the ends of operations that have ended; return the number of operations that are still pending."""
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
        """Reset the state in a forked child, where the polling thread does not exist."""
        self._pending.clear()
        self._waited.clear()
        self._thread = None

    def _start(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._loop, name="orchestrrl-recorder-works", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # before the interpreter shuts down

    def _loop(self) -> None:
        idle = 0
        while not self._stopped:
            idle = 0 if self._pending and self.poll() else idle + 1
            time.sleep(PERIOD_S if idle < BUSY_FOR else IDLE_PERIOD_S)

    def _dropped(self, key: int, reference: Any) -> None:
        """Record the end of an operation whose Work was freed. No caller can wait for the operation any more."""
        found = self._waited.get(key)
        if found is not None and found[0] is reference:
            del self._waited[key]
            found[1].end(found[2])


def is_completed(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:  # it failed; `wait` raises the error in its owner
        return True


@dataclass(slots=True, eq=False)
class _Pending:
    sequence: int
    issued_ns: int
    begun: Any  # a CUDA event before the operation
    is_over: Callable[[], bool] | None = None  # None: part of a coalesced group that is still open
    running: bool = False


class DeviceWatch:
    """Records when collectives run on a CUDA device, by events on the device's streams. A thread polls the events while
    collectives are pending. `cuda` is torch.cuda or a compatible object.

    An operation may wait in a stream for long after it was issued, and an asynchronous call returns before its end, so
    neither the call nor its return shows when the network is in use. The start is an event before the operation. The
    end is an event after it, or the completion of the Work of an asynchronous operation. The thread detects the start
    and the end with a delay of at most two polling periods. The time of the start is then read from the device.
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
        """Issue one operation to the current stream with `call`. Record a CUDA event before the operation and, if
        needed, one after it. Return the operation's Work. `coalescing` is the list of operations in the open coalesced
        group, or None."""
        entry = _Pending(sequence, self._clock_ns(), self._record())
        try:
            work = call()
            if work is not None and hasattr(work, "wait") and not asynchronous:
                work.wait()  # the caller would do so, too; this blocks the stream, not the host
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
        """Set the end of the coalesced operations `entries`. All of them end at the same time: when `work` is complete
        or, if `work` is None, at the current position in the current stream."""
        over = self._record().query if work is None else lambda: is_completed(work)
        with self._changed:
            for entry in entries:
                entry.is_over = over

    def poll(self) -> bool:
        """Record the operations that have started or ended; return whether operations are still pending."""
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
        """Return the host time of an operation's start event in nanoseconds, limited to the interval from the issue of
        the operation to the current time."""
        now_ns = self._clock_ns()
        device = self._cuda.current_device()
        anchor = self._anchors.get(device)
        if anchor is None or now_ns - anchor[1] > ANCHOR_PERIOD_S * 1e9:
            event = self._cuda.Event(enable_timing=True)
            with self._cuda.stream(self._cuda.Stream()):  # a new stream, so that no work precedes the event
                event.record()
                event.synchronize()
            anchor = self._anchors[device] = event, self._clock_ns()
        # Negative if the event precedes the anchor.
        since_ns = round(float(anchor[0].elapsed_time(entry.begun)) * 1e6)
        return min(max(anchor[1] + since_ns, entry.issued_ns), now_ns)
