"""Publishing to a daemon with real gRPC whose answers the test chooses."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.rpc.channel import Backoff
from orchestrrl.weights.controller.reports import SyncReport, SyncState, WeightsStatus
from orchestrrl.weights.peer import settings as peer_settings
from orchestrrl.weights.peer.arguments import FOLDERS
from orchestrrl.weights.staging_hold import nobody_stages
from orchestrrl.weights.trainer.client import NOT_ATTACHED, SyncAborted, WeightsClient
from tests.orchestrrl.gateway.processes import free_port
from tests.orchestrrl.weights.publishing_daemon import Daemon, serving
from tests.orchestrrl.weights.staged_parts import tensors_in

WITHIN_S = 60.0
ARRAYS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(4, dtype=np.float16)}
CARRYING = SyncReport("sync-5", 5, SyncState.CARRYING, 1.0)
DONE = replace(CARRYING, state=SyncState.DONE, code="done", ended_s=2.0)


def client_of(address: str, folder: Path, patience_s: float = WITHIN_S) -> WeightsClient:
    backoff = Backoff(0.01, 0.05)
    return WeightsClient(address, peer="train0", folder=folder, patience_s=patience_s, backoff=backoff)


async def published(client: WeightsClient, **options: Any) -> SyncReport:
    told = await asyncio.to_thread(partial(client.publish_arrays, 5, ARRAYS, **options))
    assert isinstance(told, SyncReport)
    return told


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_publish_stages_notifies_the_daemon_and_waits(tmp_path: Path) -> None:
    daemon = Daemon([[CARRYING, DONE]])
    daemon.may_end.set()
    async with serving(daemon) as address:
        with client_of(address, tmp_path) as client:
            assert await published(client, probe=[1, 2], expected=[3], backend="nccl", options={"a": "b"}) == DONE
    (said,) = daemon.publications
    assert (said.version, said.rank, said.world, said.peer, said.install) == (5, 0, 1, "train0", "")
    assert (said.probe, said.expected, said.backend, said.options) == ((1, 2), (3,), "nccl", {"a": "b"})
    assert [(tensor.name, tensor.dtype) for tensor in said.tensors] == [("a", "F16"), ("b", "F32")]
    assert said.boxes == {"a": (((0, 4),),), "b": (((0, 2), (0, 3)),)}
    assert said.run
    assert said.offload_s == 0
    assert said.gather_s > 0
    read = tensors_in(tmp_path / "v5" / "part-0.safetensors")
    assert all(np.array_equal(read[name].view(values.dtype), values) for name, values in ARRAYS.items())


async def test_start_publish_returns_after_staging(tmp_path: Path) -> None:
    daemon = Daemon([[CARRYING, DONE]])
    async with serving(daemon) as address:
        with client_of(address, tmp_path) as client:
            handle = client.start_publish_arrays(5, ARRAYS, install="next_pause")
            await until(lambda: handle.report is not None)
            assert not handle.done()
            with pytest.raises(Retryable, match=r"timed out after 0\.01 s: the state of version 5 is carrying"):
                await asyncio.to_thread(handle.result, 0.01)
            daemon.may_end.set()
            assert await asyncio.to_thread(handle.result, WITHIN_S) == DONE
            assert handle.done()
    assert daemon.publications[0].install == "next_pause"


@pytest.mark.parametrize("is_closed", [False, True])
async def test_staged_parts_are_held_until_peers_open_the_version(tmp_path: Path, is_closed: bool) -> None:
    def is_held() -> bool:
        with nobody_stages(tmp_path / "v5") as is_left:
            return not is_left

    daemon = Daemon([Retryable("not yet", 0.0), [replace(CARRYING, state=SyncState.PLANNING), CARRYING, CARRYING]])
    async with serving(daemon) as address:
        with client_of(address, tmp_path) as client:
            handle = client.start_publish_arrays(5, ARRAYS)
            await until(lambda: handle.report is not None)
            assert is_held()
            if is_closed:
                client.close()
            else:
                daemon.may_end.set()
            await until(lambda: not is_held())


async def test_aborted_sync_raises_with_a_remedy(tmp_path: Path) -> None:
    aborted = replace(DONE, state=SyncState.ABORTED, code="peer_lost", detail="gen1 has gone for 31 s")
    daemon = Daemon([[aborted], [DONE]])
    async with serving(daemon) as address:
        with client_of(address, tmp_path) as client:
            with pytest.raises(SyncAborted, match=r"peer_lost, gen1 has gone for 31 s; .*orchestrrl sync peer") as told:
                await published(client)
            assert told.value.report == aborted
            assert await published(client) == DONE  # the same version again
    assert daemon.publications[0].run != daemon.publications[1].run  # not a resend


async def test_superseded_sync_is_not_an_error(tmp_path: Path) -> None:
    superseded = replace(DONE, state=SyncState.SUPERSEDED, code="superseded")
    async with serving(Daemon([[superseded]])) as address:
        with client_of(address, tmp_path) as client:
            assert await published(client) == superseded


async def test_quarantined_engines_cause_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = replace(DONE, code="some_quarantined", detail="e1: probe_differs")
    async with serving(Daemon([[some]])) as address:
        with client_of(address, tmp_path) as client, caplog.at_level(logging.WARNING):
            assert await published(client) == some
    assert "e1: probe_differs" in caplog.text


async def test_publish_waits_for_an_unreachable_daemon(tmp_path: Path) -> None:
    port = free_port()
    daemon = Daemon([[DONE]])
    with client_of(f"127.0.0.1:{port}", tmp_path) as client:
        publishing = asyncio.create_task(published(client))
        await until(lambda: (tmp_path / "v5" / "part-0.safetensors").exists())
        async with serving(daemon, port):
            assert await asyncio.wait_for(publishing, WITHIN_S) == DONE


async def test_publication_is_sent_again_to_a_restarted_daemon(tmp_path: Path) -> None:
    port = free_port()
    daemon = Daemon([[CARRYING], [CARRYING, CARRYING]])
    with client_of(f"127.0.0.1:{port}", tmp_path) as client:
        async with serving(daemon, port):
            publishing = asyncio.create_task(published(client))
            await until(lambda: len(daemon.heard) == 2)  # the first stream ended before the sync was over
        daemon.stories = [[DONE]]
        async with serving(daemon, port):
            assert await asyncio.wait_for(publishing, WITHIN_S) == DONE
    assert len(daemon.heard) == 3
    assert len(set(daemon.heard)) == 1


async def test_publish_raises_retryable_if_no_daemon_answers_in_time(tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with (
        client_of(nowhere, tmp_path, patience_s=0.05) as client,
        pytest.raises(Retryable, match=r"no call to the daemon succeeded .*orchestrrl daemon.*version 5 is staged"),
    ):
        await published(client)


async def test_publish_raises_outcome_unknown_if_the_daemon_disappears(tmp_path: Path) -> None:
    daemon = Daemon([[CARRYING]])
    async with serving(daemon) as address:
        with client_of(address, tmp_path, patience_s=0.05) as client:
            handle = client.start_publish_arrays(5, ARRAYS)
            await until(lambda: handle.report is not None)
            daemon.stories = [Retryable("starting", 1.0)] * 1000
            with pytest.raises(OutcomeUnknown, match="last state of the sync carrying"):
                await asyncio.to_thread(handle.result, WITHIN_S)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ProblemFaults(["version: must be above 5, got 5", "boxes.w: nobody has ((3, 4),)"]), ProblemFaults),
        (Permanent("version 5 is being installed"), Permanent),
    ],
    ids=["malformed", "declined"],
)
async def test_rejected_publication_raises_at_once(
    error: OrchestrRLError, raised: type[Exception], tmp_path: Path
) -> None:
    async with serving(Daemon([error])) as address:
        with client_of(address, tmp_path) as client, pytest.raises(raised) as told:
            await published(client)
    assert str(told.value) == str(error)


async def test_closed_client_ends_handles_with_outcome_unknown(tmp_path: Path) -> None:
    async with serving(Daemon([[CARRYING, DONE]])) as address:
        client = client_of(address, tmp_path)
        handle = client.start_publish_arrays(5, ARRAYS)
        await until(lambda: handle.report is not None)
        await asyncio.to_thread(client.close)
        with pytest.raises(OutcomeUnknown, match="closed"):
            handle.result()
        client.close()


def test_restarted_trainer_has_another_run(tmp_path: Path) -> None:
    runs = {WeightsClient("x:1", peer="p", folder=tmp_path)._ranks.neighbours([]).run for _ in range(3)}
    assert len(runs) == 3
    assert all(runs)


async def test_ranks_without_torch_distributed_agree_by_run(tmp_path: Path) -> None:
    daemon = Daemon([[DONE]] * 4)
    async with serving(daemon) as address:
        for rank in (0, 1):
            with WeightsClient(address, peer="p", folder=tmp_path, rank=rank, world=2, run="job7") as client:
                await published(client)
                await published(client)
    assert [said.run for said in daemon.publications] == ["job7-1", "job7-2"] * 2
    assert all(sorted(said.boxes) == ["a", "b"] for said in daemon.publications)  # each rank stages everything


@pytest.mark.parametrize(
    ("status", "next_version"),
    [
        (WeightsStatus(None, None), 0),
        (WeightsStatus(4, None), 5),
        (WeightsStatus(4, CARRYING), 6),
        (WeightsStatus(7, CARRYING), 8),
    ],
    ids=["nothing yet", "the fleet's", "on its way", "older"],
)
async def test_next_version_is_above_all_versions_of_the_fleet(
    status: WeightsStatus, next_version: int, tmp_path: Path
) -> None:
    async with serving(Daemon(status=status)) as address:
        with client_of(address, tmp_path) as client:
            assert await asyncio.to_thread(client.next_version) == next_version
    with client_of(address, tmp_path, patience_s=0.05) as client, pytest.raises(Retryable, match="no daemon"):
        await asyncio.to_thread(client.next_version)


async def test_publish_waits_for_the_peer_to_attach_to_a_restarted_daemon(tmp_path: Path) -> None:
    away = Retryable(f"{NOT_ATTACHED}, got 'train0'", 1.0)
    async with serving(Daemon([away, away, [DONE]])) as address:
        with client_of(address, tmp_path) as client:
            assert await published(client) == DONE
    async with serving(Daemon([away] * 1000)) as address:
        with client_of(address, tmp_path, patience_s=0.05) as client:
            with pytest.raises(Retryable, match="sync peer --id train0` on this host"):
                await published(client)


def test_default_folder_is_that_of_the_peer() -> None:
    assert str(WeightsClient("x:1", peer="train0").folder) == f"{FOLDERS}train0"
    assert FOLDERS == peer_settings.FOLDERS


def test_client_rejects_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"less than the world size \(2\), got 2"):
        WeightsClient("x:1", peer="p", folder=tmp_path, rank=2, world=2)
    with pytest.raises(ValueError, match="peer must be the name"):
        WeightsClient("x:1", peer="", folder=tmp_path)
