"""The journal is complete after its writer was killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrrl.core.journal.store import EntryKind, Journal, JournalReader
from tests.orchestrrl.core.journal.test_journal import path

# Writes until it is killed, and prints each sequence number after `append` has returned.
WRITER = """
import sys
from pathlib import Path
from orchestrrl.core.journal.store import EntryKind, Journal
journal = Journal(Path(sys.argv[1]), at_s=0.0)
print(journal.generation, flush=True)
while True:
    id = f"op-{journal.generation}-{journal.last_sequence + 1}"
    journal.append(0.0, EntryKind.OPERATION_INTENT, id, {"n": 1})
    print(journal.append(0.0, EntryKind.OPERATION_RESULT, id, {"n": 2}), flush=True)
"""


@pytest.mark.smoke
def test_killed_writer_loses_no_written_entry(path: Path) -> None:
    shown = 0
    for generation in (1, 2, 3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert int(process.stdout.readline()) == generation
        for _ in range(50):
            shown = int(process.stdout.readline())
        process.kill()
        shown = max([shown, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        process.wait()
        reader = JournalReader(path)
        entries = reader.since(0, limit=10**6)
        assert [entry.sequence for entry in entries] == list(range(1, len(entries) + 1))
        assert len(entries) >= shown
        # If killed between an intent and its result, each run leaves at most one open operation.
        assert len(reader.open_operations()) <= generation
        reader.close()
    with Journal(path, 0.0) as journal:
        assert journal.generation == 4
        assert journal.append(0.0, EntryKind.MODE, "", {}) == len(entries) + 1
