"""The ledger on disk: a client that returns finds its response after the process that served it was killed."""

import asyncio
import sys
from pathlib import Path

import pytest

from orchestrrl.gateway.ledger.file import check
from tests.orchestrrl.gateway.test_ledger_store import entered, running

# Synthetic streams: token i of request k is 1000 k + i.
_WRITER = """
import asyncio, sys
from pathlib import Path
from orchestrrl.core.clock import WallClock
from orchestrrl.engines.base import Chunk, CompletionEndpoint
from orchestrrl.gateway.ledger import store as module
from orchestrrl.gateway.http.completion_requests import read_completion_request
from orchestrrl.gateway.ledger.store import LedgerStore, RetentionPolicy

module.PROGRESS_S, module.BATCH_S = 0.004, 0.002

async def main():
    store = LedgerStore(RetentionPolicy(Path(sys.argv[1]), from_s=0.0), WallClock())
    store.start()
    body = {"prompt": [1, 2, 3], "max_tokens": 100_000}
    entries = []
    for k in range(20):
        ids = {"request_id": f"r{k}", "group": "", "tag": ""}
        ask = read_completion_request(CompletionEndpoint.COMPLETIONS, body, default_model="m", now_s=0.0, **ids)
        entries.append(await store.enter(ask, body))
    records = [entry.records[0] for entry in entries]
    print("started", flush=True)
    for i in range(100_000):
        for k, record in enumerate(records):
            if len(record.generated_ids) < 40 * (k + 1):
                token = 1000 * k + len(record.generated_ids)
                record.append(Chunk((token,), f"<{token}>"), f"<{token}>", None, 0.0)
        if i == 400:
            for entry in entries[:10]:
                entry.records[0].finish("stop", None, 0.0)
                store.leave(entry)
        await asyncio.sleep(0.0005)

asyncio.run(main())
"""


@pytest.mark.parametrize("after_s", [0.02, 0.1, 0.3, 0.6, 1.0, 1.5])
async def test_killed_process_leaves_partial_responses_and_no_claim(tmp_path: Path, after_s: float) -> None:
    path = tmp_path / "ledger"
    check(path)
    command = (sys.executable, "-c", _WRITER, str(path))
    writer = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert writer.stdout is not None
    assert await writer.stdout.readline() == b"started\n"
    await asyncio.sleep(after_s)
    writer.kill()
    await writer.wait()
    body = {"prompt": [1, 2, 3], "max_tokens": 100_000}
    async with running(path) as store:
        kept = 0
        for k in range(20):
            entry = await asyncio.wait_for(entered(store, f"r{k}", body=body), 0.9)  # no claim blocks the request
            (record,) = entry.records
            tokens = list(record.generated_ids)
            assert tokens == [1000 * k + i for i in range(len(tokens))]
            assert record.text == "".join(f"<{token}>" for token in tokens)
            assert not record.done or len(tokens) == 40 * (k + 1)
            kept += len(tokens)
            store.leave(entry)
        if after_s >= 0.3:
            assert kept > 0
