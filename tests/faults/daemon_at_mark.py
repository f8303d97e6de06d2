"""Run the daemon, which gets a signal at a marked entry of its journal: `python daemon_at_mark.py -c FILE`.

The mark is a file `mark.json` in the working folder: `{"number": 3}` for the third step's entry from then on, or
`{"kind": "start", "state": "done"}`; with `before`, the entry is not written; `signal` is 9 to kill or 19 to stop. The
mark is removed when the signal is sent. The daemon is otherwise unchanged.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from orchestrrl.cli.main import main
from orchestrrl.core.journal.store import EntryKind, Journal

MARK = Path("mark.json")


class Marked:
    """A replacement for the journal's `append`."""

    def __init__(self) -> None:
        self._append = Journal.append
        self._passed = 0

    def append(self, journal: Journal, at_s: float, kind: EntryKind, subject: str, body: Any) -> int:
        signal, before = self._signal(kind, body), False
        if signal is not None:
            signal, before = signal
            MARK.unlink()
        if signal is not None and before:
            os.kill(os.getpid(), signal)
        sequence = self._append(journal, at_s, kind, subject, body)
        if signal is not None and not before:
            os.kill(os.getpid(), signal)
        return sequence

    def _signal(self, kind: EntryKind, body: Any) -> Any:
        """Return (signal, before), or None."""
        if kind is not EntryKind.REDEPLOYMENT_STEP:
            return None
        try:
            mark = json.loads(MARK.read_text())
        except FileNotFoundError:
            self._passed = 0
            return None
        self._passed += 1
        reached = (
            self._passed == mark["number"]
            if "number" in mark
            else all(body[name] == mark[name] for name in ("kind", "state", "direction") if name in mark)
        )
        return (mark["signal"], mark["before"]) if reached else None


if __name__ == "__main__":
    marked = Marked()
    Journal.append = lambda *given: marked.append(*given)  # type: ignore[method-assign]
    sys.argv = ["orchestrrl", "daemon", *sys.argv[1:]]
    main()
