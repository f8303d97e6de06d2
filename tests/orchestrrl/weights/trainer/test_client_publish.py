"""Publishing, against a daemon that is real gRPC and says what the test wants."""

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


async def test_it_is_staged_told_and_waited_for(tmp_path: Path) -> None:
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


async def test_a_trainer_may_go_on_when_it_is_staged(tmp_path: Path) -> None:
    daemon = Daemon([[CARRYING, DONE]])
    async with serving(daemon) as address:
        with client_of(address, tmp_path) as client:
            handle = client.start_publish_arrays(5, ARRAYS, install="next_pause")
            await until(lambda: handle.report is not None)
            assert not handle.done()
            with pytest.raises(Retryable, match=r"version 5 is carrying after 0\.01 s"):
                await asyncio.to_thread(handle.result, 0.01)
            daemon.may_end.set()
            assert await asyncio.to_thread(handle.result, WITHIN_S) == DONE
            assert handle.done()
    assert daemon.publications[0].install == "next_pause"


@pytest.mark.parametrize("is_closed", [False, True])
async def test_what_is_staged_is_held_until_peers_know_of_it(tmp_path: Path, is_closed: bool) -> None:
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


async def test_a_version_that_engines_did_not_take_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    aborted = replace(DONE, state=SyncState.ABORTED, code="peer_lost", detail="gen1 has gone for 31 s")
    daemon = Daemon([[aborted], [DONE]])
    async with serving(daemon) as address:
        with client_of(address, tmp_path) as client:
            with pytest.raises(SyncAborted, match=r"peer_lost, gen1 has gone for 31 s; .*orchestrrl sync peer") as told:
                await published(client)
            assert told.value.report == aborted
            assert await published(client) == DONE  # the same version again
    assert daemon.publications[0].run != daemon.publications[1].run  # not one that was sent twice


async def test_one_that_was_superseded_is_told_and_no_error(tmp_path: Path) -> None:
    superseded = replace(DONE, state=SyncState.SUPERSEDED, code="superseded")
    async with serving(Daemon([[superseded]])) as address:
        with client_of(address, tmp_path) as client:
            assert await published(client) == superseded


async def test_engines_without_it_are_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    some = replace(DONE, code="some_quarantined", detail="e1: probe_differs")
    async with serving(Daemon([[some]])) as address:
        with client_of(address, tmp_path) as client, caplog.at_level(logging.WARNING):
            assert await published(client) == some
    assert "e1: probe_differs" in caplog.text


async def test_a_daemon_that_is_away_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    daemon = Daemon([[DONE]])
    with client_of(f"127.0.0.1:{port}", tmp_path) as client:
        publishing = asyncio.create_task(published(client))
        await until(lambda: (tmp_path / "v5" / "part-0.safetensors").exists())
        async with serving(daemon, port):
            assert await asyncio.wait_for(publishing, WITHIN_S) == DONE


async def test_a_daemon_that_restarts_is_told_the_same_again(tmp_path: Path) -> None:
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


async def test_patience_ends_and_nothing_was_told(tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with (
        client_of(nowhere, tmp_path, patience_s=0.05) as client,
        pytest.raises(Retryable, match=r"nothing was told .*orchestrrl daemon.*version 5 is staged"),
    ):
        await published(client)


async def test_patience_ends_and_what_became_of_it_is_not_known(tmp_path: Path) -> None:
    daemon = Daemon([[CARRYING]])
    async with serving(daemon) as address:
        with client_of(address, tmp_path, patience_s=0.05) as client:
            handle = client.start_publish_arrays(5, ARRAYS)
            await until(lambda: handle.report is not None)
            daemon.stories = [Retryable("starting", 1.0)] * 1000
            with pytest.raises(OutcomeUnknown, match="the sync was carrying then"):
                await asyncio.to_thread(handle.result, WITHIN_S)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ProblemFaults(["version: must be above 5, got 5", "boxes.w: nobody has ((3, 4),)"]), ProblemFaults),
        (Permanent("version 5 is being installed"), Permanent),
    ],
    ids=["malformed", "declined"],
)
async def test_what_the_daemon_declines_is_told_at_once(
    error: OrchestrRLError, raised: type[Exception], tmp_path: Path
) -> None:
    async with serving(Daemon([error])) as address:
        with client_of(address, tmp_path) as client, pytest.raises(raised) as told:
            await published(client)
    assert str(told.value) == str(error)


async def test_a_client_that_is_closed_leaves_its_handles_without_a_result(tmp_path: Path) -> None:
    async with serving(Daemon([[CARRYING, DONE]])) as address:
        client = client_of(address, tmp_path)
        handle = client.start_publish_arrays(5, ARRAYS)
        await until(lambda: handle.report is not None)
        await asyncio.to_thread(client.close)
        with pytest.raises(OutcomeUnknown, match="closed"):
            handle.result()
        client.close()


def test_a_trainer_that_starts_anew_says_so(tmp_path: Path) -> None:
    runs = {WeightsClient("x:1", peer="p", folder=tmp_path)._ranks.neighbours([]).run for _ in range(3)}
    assert len(runs) == 3
    assert all(runs)


async def test_ranks_that_nothing_joins_agree_by_the_name_of_their_run(tmp_path: Path) -> None:
    daemon = Daemon([[DONE]] * 4)
    async with serving(daemon) as address:
        for rank in (0, 1):
            with WeightsClient(address, peer="p", folder=tmp_path, rank=rank, world=2, run="job7") as client:
                await published(client)
                await published(client)
    assert [said.run for said in daemon.publications] == ["job7-1", "job7-2"] * 2
    assert all(sorted(said.boxes) == ["a", "b"] for said in daemon.publications)  # each all that it has


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
async def test_the_next_version_is_above_all_that_the_fleet_has_or_gets(
    status: WeightsStatus, next_version: int, tmp_path: Path
) -> None:
    async with serving(Daemon(status=status)) as address:
        with client_of(address, tmp_path) as client:
            assert await asyncio.to_thread(client.next_version) == next_version
    with client_of(address, tmp_path, patience_s=0.05) as client, pytest.raises(Retryable, match="no daemon"):
        await asyncio.to_thread(client.next_version)


async def test_a_peer_that_comes_back_to_a_daemon_that_came_back_is_waited_for(tmp_path: Path) -> None:
    away = Retryable(f"{NOT_ATTACHED}, got 'train0'", 1.0)
    async with serving(Daemon([away, away, [DONE]])) as address:
        with client_of(address, tmp_path) as client:
            assert await published(client) == DONE
    async with serving(Daemon([away] * 1000)) as address:
        with client_of(address, tmp_path, patience_s=0.05) as client:
            with pytest.raises(Retryable, match="sync peer --id train0` runs here"):
                await published(client)


def test_the_folder_is_the_one_that_its_peer_has() -> None:
    assert str(WeightsClient("x:1", peer="train0").folder) == f"{FOLDERS}train0"
    assert FOLDERS == peer_settings.FOLDERS


def test_what_a_client_needs_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="below world 2, got 2"):
        WeightsClient("x:1", peer="p", folder=tmp_path, rank=2, world=2)
    with pytest.raises(ValueError, match="peer must name"):
        WeightsClient("x:1", peer="", folder=tmp_path)
