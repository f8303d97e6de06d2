"""`orchestrrl fabric trace`: recorded events are written to a trace file and read again."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.fabric.traces import TracedCollective, TracedIteration, TracedMark, read_traces, study
from orchestrrl.integrations.instrument.rings import RingWriter, group_id


class Recorded:
    """The recorded events of two ranks of a job, with a pause of 0.1 s after each collective."""

    def __init__(self, rings: Path, job: str = "trainer", iterations: int = 12, since_ns: int = 10**12) -> None:
        self.now_ns = since_ns
        self.writers = [RingWriter(rings, job=job, capacity=256, clock_ns=lambda: self.now_ns) for _ in range(2)]
        for rank, writer in enumerate(self.writers):
            writer.set_rank(rank)
        for iteration in range(iterations):
            for writer in self.writers:
                writer.moment("iteration", iteration)
                writer.moment("forward")
            flying = [each.begin(each.op("all_reduce"), group_id((0, 1), "all"), 64) for each in self.writers]
            self.now_ns += 2_000_000
            for writer, sequence in zip(self.writers, flying, strict=True):
                writer.end(sequence)
            self.now_ns += 100_000_000

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(application(), ["fabric", "trace", *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_trace_contains_the_events_of_the_rings(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path / "rings")
    recorded.writers[0].begin(recorded.writers[0].op("broadcast"))  # still running
    recorded.writers[0].announce("announce", b'{"period": "next", "body": {}}')
    target = tmp_path / "trace.jsonl"
    status, printed, _ = run(target, "--rings", tmp_path / "rings")
    assert status == 0
    assert "72 events of 2 ranks" in printed
    assert "1 collectives that still run" in printed
    status, printed, _ = run(target, "--rings", tmp_path / "rings", "--json")
    shown = {"file": str(target), "job": "trainer", "ranks": [0, 1], "events": 72, "lost": 0, "running": 1}
    assert (status, json.loads(printed)) == (0, shown)
    events = read_traces([target])
    assert len([each for each in events if isinstance(each, TracedCollective)]) == 24
    assert [each.iteration for each in events if isinstance(each, TracedIteration) and each.rank == 1] == list(
        range(12)
    )
    assert {each.mark for each in events if isinstance(each, TracedMark)} == {"forward"}
    summaries, common = study(events, 0.05)
    assert [each.ranks for each in summaries] == [(0,), (1,)]
    assert common.quantile_s(0.5) == pytest.approx(0.1, rel=1e-3)
    recorded.close()


def test_restarted_rank_uses_its_newest_ring(tmp_path: Path) -> None:
    old = Recorded(tmp_path, iterations=3)
    new = Recorded(tmp_path, iterations=5, since_ns=old.now_ns)
    target = tmp_path / "trace.jsonl"
    assert run(target, "--rings", tmp_path)[0] == 0
    assert len([each for each in read_traces([target]) if isinstance(each, TracedCollective)]) == 10
    old.close()
    new.close()


def test_job_is_required_for_several_jobs(tmp_path: Path) -> None:
    one, other = Recorded(tmp_path, "one", 3), Recorded(tmp_path, "other", 4)
    target = tmp_path / "trace.jsonl"
    assert run(target, "--rings", tmp_path) == (2, "", "--job: is required to select one of 'one', 'other'\n")
    status, _, wrong = run(target, "--rings", tmp_path, "--job", "third")
    assert (status, wrong) == (1, f"{tmp_path}: no job 'third' is recorded; recorded jobs: 'one', 'other'\n")
    assert not target.exists()
    assert run(target, "--rings", tmp_path, "--job", "other")[0] == 0
    assert len([each for each in read_traces([target]) if isinstance(each, TracedCollective)]) == 8
    one.close()
    other.close()


def test_missing_rings_are_reported_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "odd.ring").write_bytes(b"no ring")
    status, _, wrong = run(tmp_path / "trace.jsonl", "--rings", tmp_path / "away")
    assert status == 1
    assert "no ring of job ''" in wrong
    recorded = Recorded(tmp_path)
    status, _, wrong = run(tmp_path / "no" / "trace.jsonl", "--rings", tmp_path)
    assert status == 1
    assert "cannot be written" in wrong
    recorded.close()
