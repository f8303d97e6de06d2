"""Run one of OrchestrRL's processes, which gets a signal at a point of a weight sync: `dying_process.py NAME WORDS...`.

WORDS are a command's (`daemon`, `sync peer`, `engine simulated`, `gateway`). The point is in the file `mark-NAME.json`
of the working folder: its condition must hold for the `number`th time; `signal` 9 kills and 19 stops. The mark is
removed when the signal is sent. The process is otherwise unchanged.

| point | in | |
|---|---|---|
| entry, entry-after | daemon | before and after an entry of the journal is written: `kind`, `step` |
| order, order-after | peer | before and after it carries an order out: `kind` |
| received, sent | peer | some bytes of an edge |
| load | engine | during a load: the file was read, the weights are the old ones |
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from orchestrrl.cli.main import main
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.lab.simulated_engine.managed import ManagedFace
from orchestrrl.weights.peer.carry import ThreadedCarrier
from orchestrrl.weights.peer.peer import PeerOrders

# The journal entries of a weight sync.
OURS = (EntryKind.SYNC_BEGAN, EntryKind.SYNC_STEP, EntryKind.WEIGHTS, EntryKind.SYNC_ENDED, EntryKind.BARRIER)


class Marked:
    def __init__(self, name: str) -> None:
        self._mark = Path(f"mark-{name}.json")
        self._passed = 0
        self._text = ""
        self._lock = threading.Lock()  # bytes arrive in threads

    def at(self, point: str, **here: Any) -> None:
        with self._lock:
            try:
                text = self._mark.read_text()
            except FileNotFoundError:
                return
            if text != self._text:
                self._text, self._passed = text, 0
            mark = json.loads(text)
            wanted = {name: value for name, value in mark.items() if name not in ("signal", "number")}
            if any({"point": point, **here}.get(name) != value for name, value in wanted.items()):
                return
            self._passed += 1
            if self._passed < mark.get("number", 1):
                return
            self._mark.unlink()
            os.kill(os.getpid(), mark["signal"])


def mark_all(marked: Marked) -> None:
    append, act, moved, take_s = Journal.append, PeerOrders.perform, ThreadedCarrier._moved, ManagedFace._take_s

    def appending(journal: Journal, at_s: float, kind: EntryKind, subject: str, body: Any) -> int:
        here = {"kind": str(kind), "step": body.get("step")} if kind in OURS else None
        if here is not None:
            marked.at("entry", **here)
        sequence = append(journal, at_s, kind, subject, body)
        if here is not None:
            marked.at("entry-after", **here)
        return sequence

    async def acting(orders: PeerOrders, order: Any) -> Any:
        marked.at("order", kind=order.order.kind)
        result = await act(orders, order)
        marked.at("order-after", kind=order.order.kind)
        return result

    def moving(carrier: ThreadedCarrier, run: Any, size: int) -> None:
        moved(carrier, run, size)
        marked.at("received" if run.is_receiver else "sent")

    async def taking(face: ManagedFace, virtual_s: float) -> None:
        marked.at("load")
        await take_s(face, virtual_s)

    Journal.append = appending  # type: ignore[method-assign, assignment]
    PeerOrders.perform = acting  # type: ignore[method-assign, assignment]
    ThreadedCarrier._moved = moving  # type: ignore[method-assign, assignment]
    ManagedFace._take_s = taking  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    mark_all(Marked(sys.argv[1]))
    sys.argv = ["orchestrrl", *sys.argv[2:]]
    main()
