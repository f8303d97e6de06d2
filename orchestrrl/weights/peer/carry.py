"""Run the edges of a peer, each in a separate thread. Waves run in order, and each outcome is reported as an event.

This module starts and ends edges and releases their resources. The protocol on the link is in wire.py.

An edge waits without limit for its other endpoint, which may still be in an earlier wave. The daemon detects peers that
have detached and ends their edges.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.weights import wire
from orchestrrl.weights.model import MOST_BLOCK_BYTES
from orchestrrl.weights.orders import ArrivedBytes, CarryEdges, EdgeEvent, EdgeState
from orchestrrl.weights.transports.base import IncomingLink, LinkBroken, NotYet, OutgoingLink, Transport
from orchestrrl.weights.wire import EdgeEnded, EdgeRun, LocalVersion
from planner.model import PeerId

ASK_AGAIN_S = 0.5  # longest single wait for the other endpoint, so that ending the edge is detected
DIALS_AGAIN_S = 4 * ASK_AGAIN_S  # within this time a sender dials again whose wait timed out while it was accepted
TOLD_EVERY_S = 0.25

L = TypeVar("L", IncomingLink, OutgoingLink)
EdgeKey = tuple[int, str]  # version and edge

log = logging.getLogger(__name__)


class ThreadedCarrier:
    """The threads that run the edges of the peer `me`. `report` is called from these threads. `now_s` returns the Unix
    time for events."""

    def __init__(
        self,
        me: PeerId,
        transports: Mapping[str, Transport],
        report: Callable[[EdgeEvent | ArrivedBytes], None],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._me = me
        self._transports = transports
        self._report = report
        self._now_s = now_s
        self._lock = threading.RLock()
        self._runs: dict[EdgeKey, EdgeRun] = {}  # including ended edges, until `end`
        self._told_s: dict[int, float] = {}  # time of the last ArrivedBytes of each version
        self._closed = False

    def carry(self, staged: LocalVersion, order: CarryEdges) -> None:
        """Start the edges of the order, in addition to the running edges. If an edge of the order has already ended,
        its outcome is reported again. Raises ProblemFaults if an edge is invalid for this peer. In that case, no edge
        is started."""
        self._check(staged, order)
        told_again = []
        with self._lock:
            if self._closed:
                raise Permanent(f"cannot start transfers of version {order.version}: this peer is shutting down")
            for edge in order.edges:
                if (known := self._runs.get((order.version, edge.id))) is None:
                    what = order.version, edge, edge.dst == self._me, staged, order.chunk_bytes, order.stall_s
                    self._runs[order.version, edge.id] = EdgeRun(*what, self._began, self._moved)
                    self._told_s.setdefault(order.version, time.monotonic())
                elif known.outcome is not None:
                    told_again.append(known.outcome)
            self._begin_due(order.version)
        for outcome in told_again:
            self._report(outcome)

    def end(self, version: int, edges: Sequence[str] = ()) -> None:
        """End the edges with these ids, or all edges of the version if `edges` is empty, and wait for their threads.
        Must not be called from `report`."""
        with self._lock:
            ending = [run for key, run in self._runs.items() if key[0] == version and (not edges or key[1] in edges)]
            for run in ending:
                run.let_go.set()
                del self._runs[version, run.edge.id]
            links = [run.link for run in ending if run.link is not None]
            if not any(key[0] == version for key in self._runs):
                self._told_s.pop(version, None)
            self._begin_due(version)
        for link in links:
            link.close()
        for run in ending:
            if run.thread is not None:
                run.thread.join()

    def close(self) -> None:
        """End all edges. The caller closes the transports."""
        with self._lock:
            self._closed = True
            versions = {version for version, _ in self._runs}
        for version in versions:
            self.end(version)

    def _check(self, staged: LocalVersion, order: CarryEdges) -> None:
        sizes = {shard.id: shard.bytes for shard in staged.map.shards}
        faults = []
        if not 0 < order.chunk_bytes <= MOST_BLOCK_BYTES:
            faults.append(f"chunk_bytes: must be > 0 and <= {MOST_BLOCK_BYTES}, got {order.chunk_bytes}")
        if not order.stall_s > 0:
            faults.append(f"stall_s: must be > 0, got {order.stall_s}")
        for edge in order.edges:
            path, size = f"edges.{edge.id}", sizes.get(edge.shard)
            if size is None:
                faults.append(f"{path}.shard: must be a shard of version {order.version} here, got {edge.shard!r}")
            elif edge.offset < 0 or edge.bytes < 0 or edge.offset + edge.bytes > size:
                faults.append(f"{path}: must be within {size} bytes, got {edge.bytes} at {edge.offset}")
            if not edge.rate_gbps >= 0:
                faults.append(f"{path}.rate_gbps: must be >= 0, got {edge.rate_gbps}")
            if (edge.src == self._me) == (edge.dst == self._me):
                faults.append(f"{path}: must begin or end at {self._me}, got {edge.src} to {edge.dst}")
            if edge.transport not in self._transports:
                known = ", ".join(sorted(self._transports)) or "none"
                faults.append(f"{path}.transport: must be open on this peer ({known}), got {edge.transport!r}")
        if faults:
            raise ProblemFaults(faults)

    def _begin_due(self, version: int) -> None:
        """Start the version's edges in the earliest wave that has unfinished edges. The caller holds the lock."""
        open_runs = [run for key, run in self._runs.items() if key[0] == version and run.outcome is None]
        first = min((run.edge.wave for run in open_runs), default=0)
        for run in open_runs:
            if run.thread is None and run.edge.wave == first:
                name = f"weights-{'from' if run.is_receiver else 'to'}-{run.edge.id}"
                run.thread = threading.Thread(target=self._live, args=(run,), name=name, daemon=True)
                run.thread.start()

    def _live(self, run: EdgeRun) -> None:
        """Run one edge in the current thread. Afterwards the edge has an outcome, even if an error occurred."""
        state, detail = EdgeState.BROKEN, "unexpected error, see the log of this peer"
        try:
            if run.edge.bytes:
                (self._receive if run.is_receiver else self._send)(run)
            state, detail = EdgeState.DONE, ""
        except EdgeEnded:
            detail = "ended by order"
        except (OrchestrRLError, OSError, ValueError, KeyError) as error:
            detail = f"{type(error).__name__}: {error}"
        finally:
            self._let_link_go(run)
            self._over(run, state, detail)

    def _over(self, run: EdgeRun, state: EdgeState, detail: str) -> None:
        with self._lock:
            run.outcome = EdgeEvent(
                run.version, run.edge.id, state, run.is_receiver, run.moved_bytes, run.began_s, self._now_s(), detail
            )
        if not run.let_go.is_set():
            if run.is_receiver:
                self._tell_arrived(run)
            self._report(run.outcome)
        with self._lock:
            if not self._closed:
                self._begin_due(run.version)

    def _send(self, run: EdgeRun) -> None:
        dial = self._transports[run.edge.transport].dial
        wire.send(self._linked(run, partial(dial, run.edge.address, run.link_key)), run)

    def _receive(self, run: EdgeRun) -> None:
        """Receive the edge's bytes. If the first link breaks before a byte has arrived, accept another link, because
        the sender's dial may have timed out just as it was accepted. The sender then dials again."""
        accept = self._transports[run.edge.transport].accept
        until_s: float | None = None
        while True:
            link = self._linked(run, partial(accept, run.link_key), until_s)
            try:
                wire.receive(link, run)
            except LinkBroken:
                if run.moved_bytes or (until_s is not None and time.monotonic() >= until_s):
                    raise
                until_s = until_s if until_s is not None else time.monotonic() + min(run.stall_s, DIALS_AGAIN_S)
                self._let_link_go(run)
                run.pause()
            else:
                return

    def _linked(self, run: EdgeRun, ask: Callable[[float], L], until_s: float | None = None) -> L:
        """Return the edge's link once the other endpoint has connected. `ask` waits up to the given number of seconds
        for the link. Raises NotYet if the endpoint has not connected by `until_s`, a time of the monotonic clock. If
        `until_s` is None, wait without limit."""
        while True:
            run.pause()
            try:
                link = ask(ASK_AGAIN_S)
            except NotYet:
                if until_s is not None and time.monotonic() >= until_s:
                    raise
            else:
                break
        with self._lock:
            run.link = link  # from now on `end` closes it
        run.pause()
        return link

    def _let_link_go(self, run: EdgeRun) -> None:
        with self._lock:
            link, run.link = run.link, None
        if link is not None:
            link.close()

    def _began(self, run: EdgeRun) -> None:
        if run.began_s:
            return
        run.began_s = self._now_s()
        if not run.let_go.is_set():
            self._report(EdgeEvent(run.version, run.edge.id, EdgeState.BEGAN, run.is_receiver, 0, run.began_s))

    def _moved(self, run: EdgeRun, size: int) -> None:
        run.moved_bytes += size
        told_s = self._told_s.get(run.version)
        if run.is_receiver and told_s is not None and time.monotonic() - told_s >= TOLD_EVERY_S:
            self._tell_arrived(run)

    def _tell_arrived(self, run: EdgeRun) -> None:
        """Report the number of bytes of the version that have arrived, unless the edge has been ended."""
        with self._lock:
            if run.version not in self._told_s or run.let_go.is_set():
                return
            self._told_s[run.version] = time.monotonic()
        needed = sum(shard.bytes for shard in run.staged.map.shards)
        missing = sum(size for ranges in run.staged.missing().values() for _, size in ranges)
        self._report(ArrivedBytes(run.version, needed - missing))
