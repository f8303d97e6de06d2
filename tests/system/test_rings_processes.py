"""The shared memory of a traced process: rings of killed and forked processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from orchestrrl.integrations.instrument.rings import RingReader, RingWriter, list_rings, remove_dead
from tests.orchestrrl.integrations.instrument.test_rings import reader, writer

KILLED = """
import os, signal, sys
from pathlib import Path
from orchestrrl.integrations.instrument.rings import RingWriter
writer = RingWriter(Path(sys.argv[1]))
writer.begin(writer.op("x"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ring_of_a_killed_process_is_removed(tmp_path: Path, writer: RingWriter) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False)
    assert killed.returncode == -signal.SIGKILL
    mine, other = sorted(list_rings(tmp_path), key=lambda path: path != writer.path)
    with RingReader(other) as dead, RingReader(mine) as living:
        assert (dead.alive, dead.in_flight) == (False, 1)
        assert living.alive
    assert remove_dead(tmp_path, older_than_s=1000) == []
    assert remove_dead(tmp_path) == [other]
    assert list_rings(tmp_path) == [mine]


def test_forked_child_does_not_write_to_its_parents_ring(writer: RingWriter, reader: RingReader) -> None:
    child = os.fork()
    if not child:
        writer.abandon()
        writer.begin(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert reader.events() == ([], 0)
    assert reader.alive
