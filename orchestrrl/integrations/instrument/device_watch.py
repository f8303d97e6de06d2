"""When collectives really run on a CUDA device: events on its streams, looked at by a thread while some are pending.

What is issued may wait in a stream for long, and what is issued without waiting is not waited for, so neither the call
nor its return says when the network is in use. The start is an event before the operation; the end an event after it,
or, of an asynchronous operation, that its Work says it is completed. The thread sees both late by at most two of its
periods; the start's time itself is then read off the device.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument.rings import RingWriter
    from orchestrrl.integrations.instrument.work_watch import is_completed
else:  # in the traced process, where this folder is on the path
    from rings import RingWriter
    from work_watch import is_completed

PERIOD_S = 200e-6
ANCHOR_PERIOD_S = 10.0  # how often the device's clock is compared with the host's


@dataclass(slots=True, eq=False)
class _Pending:
    sequence: int
    issued_ns: int
    begun: Any  # an event
    is_over: Callable[[], bool] | None = None  # None: issued among others, not yet closed
    running: bool = False


class DeviceWatch:
    """`cuda` is torch.cuda, or what behaves like it."""

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
            time.sleep(PERIOD_S)

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
