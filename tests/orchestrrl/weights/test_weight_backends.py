"""All weight backends: the tree, vLLM's weight transfer and checkpoint-engine, with a fake trainer and fake servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from weights_harness import STEP_S, TENSORS, Engine, FakePeer, Harness

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, ProblemFaults
from orchestrrl.engines.base import TransferEnds
from orchestrrl.weights.backends.base import (
    BACKENDS,
    TREE,
    DirectBackend,
    SenderOptions,
    TrainerStep,
    make_direct,
    trainer_step_from,
)
from orchestrrl.weights.backends.checkpoint_engine import RankShares
from orchestrrl.weights.backends.conformance import BackendConformance, BackendStep
from orchestrrl.weights.controller.reports import EngineSync, SyncReport, SyncState
from orchestrrl.weights.model import (
    PeerRole,
)
from orchestrrl.weights.orders import BackendAct, InstallVersion, Order, OrderOutcome, PeerResult
from orchestrrl.weights.publication import Publication
from planner.model import EngineId, PeerId

WORKERS = {"e0": 1, "e1": 2, "e2": 4}


class Transfers:
    """The weight-transfer endpoints of a fake server."""

    def __init__(self, peer: "DirectPeer", engine: Engine) -> None:
        self.peer, self.engine = peer, engine

    async def ends(self) -> TransferEnds:
        if "prepare" in self.harness.failing.pop(self.engine.id, ""):
            raise Permanent("has no such endpoint")
        return TransferEnds("nccl", WORKERS[self.engine.id])

    async def join(self, init_info: Mapping[str, Any], within_s: float) -> None:
        await self._takes_time()
        self.harness.joined[self.engine.id] = dict(init_info)

    async def start(self) -> None:
        await self._changes(None)

    async def update(self, update_info: Mapping[str, Any] | Sequence[Any], within_s: float) -> None:
        await self._takes_time()
        if self.engine.fails:
            self.engine.fails -= 1
            raise OutcomeUnknown("the connection broke")

    async def finish(self, version: int, within_s: float) -> None:
        await self._changes(version)

    async def begin(self) -> None:
        await self.start()

    async def call_workers(self, method: str, arguments: Sequence[Any], within_s: float) -> None:
        assert method == "update_weights_from_ipc"
        self.harness.joined[self.engine.id] = arguments[0]
        await self.update({}, within_s)

    async def end(self, version: int) -> None:
        await self._changes(version)

    @property
    def harness(self) -> "DirectHarness":
        harness = self.peer.harness
        assert isinstance(harness, DirectHarness)
        return harness

    async def _changes(self, version: int | None) -> None:
        await self._takes_time()
        if self.harness.fence.state.lease is None:
            self.harness.changed_while_open.append(self.engine.id)
        self.engine.weights = version
        self.peer.installed.pop(self.engine.id, None)
        if version is not None:
            self.peer.installed[self.engine.id] = version
        self.peer.introduce()

    async def _takes_time(self) -> None:
        await self.harness.clock.sleep(STEP_S)
        if not self.engine.alive:
            raise OutcomeUnknown("does not answer")


class Server:
    """The client of an engine with weight-transfer endpoints, as used by a peer."""

    url = "http://fake"

    def __init__(self, transfers: Transfers) -> None:
        self.transfers = transfers


class DirectPeer(FakePeer):
    async def _result(self, order: Order) -> PeerResult:
        if isinstance(order, InstallVersion):
            harness = self.harness
            assert isinstance(harness, DirectHarness)
            if harness.fence.state.lease is None and harness.fence.state.serves(order.engine):
                harness.changed_while_open.append(order.engine)
        if not isinstance(order, BackendAct):
            return await super()._result(order)
        backend = make_direct(order.backend)
        body = {"init_info": {}, "update_info": {}, "within_s": 10.0}
        try:
            server: Any = Server(Transfers(self, self._engine(order.engine)))
            told = await backend.at_engine(server, order.act, order.version, {**body, **json.loads(order.body_json)})
        except OutcomeUnknown as error:
            return PeerResult("", OrderOutcome.UNKNOWN, str(error))
        except OrchestrRLError as error:
            return PeerResult("", OrderOutcome.FAILED, str(error))
        return PeerResult("", OrderOutcome.DONE, result_json=json.dumps(dict(told)))


class DirectHarness(Harness):
    """A harness with a direct backend."""

    backend = "tree"

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.changed_while_open: list[str] = []
        self.failing: dict[str, str] = {}
        self.joined: dict[str, dict[str, Any]] = {}
        self.trainer_fails: BackendStep | None = None
        super().__init__(folder, **settings)

    def _peer(self, id: str, role: PeerRole, engines: list[str]) -> FakePeer:
        peer = DirectPeer(self, PeerId(id), role, [self.engines[EngineId(e)] for e in engines])
        self.peers[peer.id] = peer
        return peer


class TreeWorld:
    """The conformance world of the tree, on top of a harness."""

    backend = "tree"

    def __init__(self, harness: DirectHarness) -> None:
        self.harness = harness
        self.engines = tuple(harness.engines)
        self._odd: list[Engine] = []

    @property
    def keeps_versions(self) -> bool:
        return self.backend == TREE

    @property
    def changed_while_open(self) -> Sequence[str]:
        return self.harness.changed_while_open

    def holds(self, engine: EngineId) -> int | None:
        return self.harness.engines[engine].weights

    def gets_requests(self, engine: EngineId) -> bool:
        state = self.harness.fence.state
        return state.lease is None and state.serves(engine) and not self.harness.engines[engine].resting

    def fleet(self) -> int | None:
        return self.harness.sync.book.fleet.version

    def fail(self, step: BackendStep, engines: Sequence[EngineId]) -> None:
        for id in engines:
            engine = self.harness.engines[id]
            match step:
                case BackendStep.PREPARE:
                    self._fail_preparing(id)
                case BackendStep.INSTALL:
                    engine.fails, engine.spoils = 1, True
                case BackendStep.VERIFY:
                    engine.odd = True
                    self._odd.append(engine)

    def lose_trainer(self, step: BackendStep) -> None:
        if step is BackendStep.PREPARE:
            self.harness.later(0.3, self.harness.trainer.die)
            self.harness.later(30.0, self.harness.trainer.come_back)

    async def publish(self, version: int) -> SyncReport:
        report = await self.harness.report(self._publish(version), within_s=600.0)
        for engine in self._odd:
            engine.odd = False
        self._odd.clear()
        await self.harness.settled(60.0)
        return report

    def _publish(self, version: int) -> str:
        if self.harness.trainer.stream is None:
            self.harness.trainer.come_back()
        return self.harness.publish(version, probe=(1, 2, 3))

    def _fail_preparing(self, engine: EngineId) -> None:
        next(peer for peer in self.harness.peers.values() if self.harness.engines[engine] in peer.engines).rots = 1


class DirectWorld(TreeWorld):
    backend = "vllm_transfer"
    options: Mapping[str, str] = {"backend": "nccl"}
    world = 1

    def __init__(self, harness: DirectHarness) -> None:
        super().__init__(harness)
        self._loses: BackendStep | None = None
        self._trainer: asyncio.Task[None] | None = None
        self.told: list[SyncReport] = []
        self.probe: tuple[int, ...] = (1, 2, 3)

    def lose_trainer(self, step: BackendStep) -> None:
        self._loses = step

    def _fail_preparing(self, engine: EngineId) -> None:
        self.harness.failing[engine] = "prepare"

    def _publish(self, version: int) -> str:
        words = [
            Publication(
                *(version, rank, self.world, PeerId("t"), TENSORS, {}),
                backend=self.backend,
                probe=self.probe,
                options=self.options,
                run="r-1",
            )
            for rank in range(self.world)
        ]
        id = [self.harness.sync.publish(word) for word in words][-1]
        self._trainer = asyncio.ensure_future(self._stand_by(id))
        return id

    async def _stand_by(self, id: str) -> None:
        """Perform the trainer's steps as vLLM's trainer-side engine does, with relayed calls."""
        sync, seen = self.harness.sync, 0
        async for report in sync.follow(id):
            self.told.append(report)
            asked = trainer_step_from(report.trainer_step_json)
            if asked is None or asked.number <= seen:
                continue
            seen = asked.number
            step = BackendStep.PREPARE if asked.step in ("join", "register") else BackendStep.INSTALL
            calls = self._calls(asked)
            try:
                for number, (call, body) in enumerate(calls):
                    if self._loses is step and number + 1 == max(1, len(calls) - 1):
                        self._loses = None
                        raise Permanent("no connection")
                    await sync.relayed(id, 0, asked.number, call, body)
                await sync.relayed(id, 0, asked.number, "done", {})
            except OrchestrRLError as error:
                with suppress(Permanent):  # the step is over
                    await sync.relayed(id, 0, asked.number, "failed", {"why": str(error)})

    def _calls(self, asked: TrainerStep) -> list[tuple[str, dict[str, Any]]]:
        if asked.step == "join":
            init_info = {"rank_offset": 1, "world_size": asked.body["workers"] + 1}
            return [("init_weight_transfer_engine", {"init_info": init_info})]
        return [
            ("start_weight_update", {}),
            ("update_weights", {"update_info": {"names": ["a", "b"]}}),
            ("finish_weight_update", {}),
        ]


class RankServer:
    """A fake of checkpoint-engine's ParameterServer for all ranks, with the methods that are used."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, Any] = {}

    def register_checkpoint(self, name: str, *, files: Any = None, named_tensors: Any = None) -> None:
        self.checkpoints[name] = named_tensors

    def unregister_checkpoint(self, name: str) -> None:
        del self.checkpoints[name]

    def gather_metas(self, name: str) -> None:
        assert name in self.checkpoints

    def update(self, name: str, call_workers: Any, ranks: Any = None) -> None:
        assert name in self.checkpoints
        call_workers([(f"GPU-{rank}", f"ipc://{rank}") for rank in range(sum(WORKERS.values()))])


class BesideWorld(DirectWorld):
    backend = "checkpoint_engine"
    options: Mapping[str, str] = {"engines": "e0,e1,e2"}
    world = sum(WORKERS.values())

    def __init__(self, harness: DirectHarness) -> None:
        super().__init__(harness)
        self.server = RankServer()
        self.sender = RankShares(self.server, {}, SenderOptions(0, self.world))

    def _calls(self, asked: TrainerStep) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls that the sender of rank 0 reports."""
        told: list[tuple[str, dict[str, Any]]] = []

        def tell(call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
            told.append((call, dict(body)))
            return {}

        self.sender.act(asked, tell)
        return told


@pytest.fixture
async def harness(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[DirectHarness]:
    harness = DirectHarness(tmp_path, **getattr(request, "param", {}))
    harness.start()
    await harness.pass_time(1.0)
    yield harness
    harness.kill()
    for peer in harness.peers.values():
        peer.die()


class TestTree(BackendConformance):
    @pytest.fixture
    def world(self, harness: DirectHarness) -> TreeWorld:
        return TreeWorld(harness)


class TestVllmTransfer(BackendConformance):
    @pytest.fixture
    def world(self, harness: DirectHarness) -> DirectWorld:
        return DirectWorld(harness)

    async def test_workers_get_ranks_after_those_of_earlier_servers(
        self, harness: DirectHarness, world: DirectWorld
    ) -> None:
        await world.publish(1)
        assert {id: told["rank_offset"] for id, told in harness.joined.items()} == {"e0": 1, "e1": 2, "e2": 4}
        assert {told["world_size"] for told in harness.joined.values()} == {8}

    async def test_group_is_joined_once(self, harness: DirectHarness, world: DirectWorld) -> None:
        await world.publish(1)
        harness.joined.clear()
        report = await world.publish(2)
        assert report.state is SyncState.DONE
        assert harness.joined == {}
        assert report.notes == ()
        world.fail(BackendStep.INSTALL, [EngineId("e1")])
        await world.publish(3)
        assert set(harness.joined) == {"e0", "e1", "e2"}, "anew, as it was broken"

    async def test_failed_engine_is_reported_at_once(self, world: DirectWorld) -> None:
        world.fail(BackendStep.INSTALL, [EngineId("e1")])
        await world.publish(1)
        report = next(report for report in world.told if any(each.detail for each in report.engines))
        stands = {each.engine: each for each in report.engines}[EngineId("e1")]
        assert (stands.state, stands.detail) == (EngineSync.WAITING, "e1: update failed: the connection broke")

    @pytest.mark.parametrize("harness", [{"probe": None}], indirect=True)
    async def test_sync_without_a_probe_has_a_note(self, world: DirectWorld) -> None:
        world.probe = ()
        report = await world.publish(1)
        assert report.notes == ("engines were not verified: this backend has no checksums; configure a probe",)

    async def test_call_outside_its_step_is_rejected(self, harness: DirectHarness, world: DirectWorld) -> None:
        await world.publish(1)
        with pytest.raises(Permanent):
            await harness.sync.relayed(harness.sync.history(1)[0].id, 0, 1, "update_weights", {"update_info": {}})

    async def test_invalid_options_are_reported_together(self, harness: DirectHarness) -> None:
        word = Publication(1, 0, 1, PeerId("t"), TENSORS, {}, backend="vllm_transfer", options={"backends": "nccl"})
        with pytest.raises(ProblemFaults) as caught:
            harness.sync.publish(word)
        assert len(caught.value.faults) == 2


class TestCheckpointEngine(BackendConformance):
    @pytest.fixture
    def world(self, harness: DirectHarness) -> BesideWorld:
        return BesideWorld(harness)

    async def test_workers_get_the_sockets_of_their_ranks(self, harness: DirectHarness, world: BesideWorld) -> None:
        await world.publish(1)
        await world.publish(2)
        assert {id: list(sockets) for id, sockets in harness.joined.items()} == {
            "e0": ["GPU-0"],
            "e1": ["GPU-1", "GPU-2"],
            "e2": ["GPU-3", "GPU-4", "GPU-5", "GPU-6"],
        }
        assert list(world.server.checkpoints) == ["orchestrrl-2"]  # at most one version is in pinned memory


def test_make_direct_finds_backends_by_name() -> None:
    assert {"tree", "vllm_transfer"} <= set(BACKENDS.names())
    assert isinstance(make_direct("vllm_transfer"), DirectBackend)
    with pytest.raises(Permanent, match="tree"):
        make_direct("carrier pigeons")
    with pytest.raises(Permanent, match="tree"):
        make_direct("tree")
