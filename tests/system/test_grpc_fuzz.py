"""A daemon survives corrupted messages to all of its methods. For more messages, run grpc_fuzz.py."""

from pathlib import Path

import grpc_fuzz

CALLS, SEED = 3000, 20


async def test_daemon_survives_corrupted_messages_to_every_method(tmp_path: Path) -> None:
    outcome = await grpc_fuzz.fuzz(tmp_path, CALLS, SEED)
    assert outcome.died_at is None, grpc_fuzz.report(outcome)
    assert not outcome.findings, grpc_fuzz.report(outcome)
    assert outcome.calls == CALLS
    assert {"OK", "INVALID_ARGUMENT"} <= outcome.codes.keys()
