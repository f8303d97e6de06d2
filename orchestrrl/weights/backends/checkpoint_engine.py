"""The weight backend for MoonshotAI's checkpoint-engine, for trainer ranks that share GPUs with inference servers.

The ranks keep a version in pinned memory, broadcast it among themselves, and pass it to the workers on their GPUs by
CUDA IPC. Ranks publish with `torch.distributed` initialized, one rank per GPU. `options["engines"]` lists the servers
on the ranks' GPUs, sorted by rank, such as `e0,e1`. Servers are started with
`--worker-extension-cls checkpoint_engine.worker.VllmColocateWorkerExtension`. Before the fence, each rank registers its
share of the tensors, without splitting any tensor. While requests are paused, the ranks run `ParameterServer.update`.
Its calls to the workers of each server go through the daemon and the server's peer.

This backend follows the source of checkpoint-engine 0.3 (`ps.py`, `worker.py`, `api.py`). It has been tested only with
a fake of that interface, never with the package itself, which needs CUDA.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.engines.base import Engine, transfer_engine
from orchestrrl.weights.backends.base import (
    DirectSync,
    EngineOutcomes,
    EnginesFailed,
    ReportStep,
    SenderOptions,
    TrainerStep,
    WeightSender,
)
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.publication import Publication
from orchestrrl.weights.trainer.torch_tensors import gathered, named_tensors
from planner.model import EngineId

REGISTER, UPDATE = "register", "update"  # steps of the trainer
TO_WORKERS = "update_weights_from_ipc"
CHECKPOINT = "orchestrrl-{version}"


class CheckpointEngineBackend:
    def __init__(self) -> None:
        self._workers: dict[EngineId, int] = {}  # number of workers by engine, in order of rank
        self._outcomes = EngineOutcomes()
        self._is_open = False

    # --- in the daemon

    def faults(self, publication: Publication) -> list[str]:
        faults = [f"options.{name}: must be engines, got {name!r}" for name in publication.options if name != "engines"]
        named = _named(publication)
        if not named:
            faults.append("options.engines: must list the servers on the ranks' GPUs in order of rank, got ''")
        if len(set(named)) != len(named):
            faults.append(f"options.engines: must list each server once, got {publication.options['engines']!r}")
        return faults

    async def prepare(self, sync: DirectSync) -> None:
        named = _named(sync.publications[0])
        why = {engine: "no rank of the trainer is on its GPUs" for engine in sync.engines if engine not in named}
        self._workers = {}
        for engine in named:
            if engine not in sync.engines:
                raise Permanent(
                    f"engine {engine} must take part in the sync, because the trainer's ranks on its GPUs would"
                    " otherwise wait for its workers"
                )
            try:
                self._workers[engine] = int((await sync.at(engine, "inspect", {}))["workers"])
            except OrchestrRLError as error:
                why[engine] = str(error)
        if why:
            raise EnginesFailed(why)
        if sum(self._workers.values()) != len(sync.publications):
            raise Permanent(
                f"the number of ranks must equal the number of workers of all servers, got {len(sync.publications)}"
                f" ranks and workers {dict(self._workers)}"
            )
        await sync.request_trainer(REGISTER, {"version": sync.version})

    async def install(self, sync: DirectSync) -> Mapping[EngineId, OrchestrRLError | None]:
        self._outcomes = EngineOutcomes(sync.engines)
        nothing: dict[EngineId, Mapping[str, Any]] = {engine: {} for engine in sync.engines}
        try:
            await self._outcomes.act(sync, "begin", nothing, first=True, last=False)
            self._is_open = True
            await sync.request_trainer(UPDATE, {"version": sync.version})
            self._is_open = False
            await self._outcomes.act(sync, "end", nothing, first=False, last=True)
        except OrchestrRLError as error:
            self._outcomes.broke_off(error)
        finally:
            self._is_open = False
        return self._outcomes.by_engine

    async def relayed(self, sync: DirectSync, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        if call != TO_WORKERS or not self._is_open:
            raise Permanent(
                f"{call} cannot be called now; only {TO_WORKERS} can be called, and only during the trainer's step"
                f" {UPDATE!r}"
            )
        sockets: Sequence[tuple[str, str]] = body["sockets"]  # per rank: its GPU, and the socket that announces bytes
        own: dict[EngineId, dict[str, Any]] = {}
        first = 0
        for engine, workers in self._workers.items():
            own[engine] = {"sockets": dict(sockets[first : first + workers])}
            first += workers
        await self._outcomes.act(sync, "take", own, first=False, last=False)
        return {}

    def forget(self) -> None:
        """Do nothing, because this backend keeps no process groups between versions."""

    # --- at an engine's peer

    async def at_engine(self, engine: Engine, act: str, version: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        transfers, within_s = transfer_engine(engine), float(body["within_s"])
        match act:
            case "inspect":
                return {"workers": (await transfers.ends()).workers}
            case "begin":
                await transfers.begin()
            case "take":
                await transfers.call_workers(TO_WORKERS, [body["sockets"]], within_s)
            case "end":
                await transfers.end(version)
            case _:
                raise Permanent(
                    f"backend checkpoint_engine does not support action {act!r} on engines; use the same version of"
                    " OrchestrRL for the daemon and the peer"
                )
        return {}

    # --- in the trainer

    def sender(self, model: Any, options: SenderOptions) -> WeightSender:
        try:
            from checkpoint_engine.ps import ParameterServer
        except ImportError as error:
            raise Permanent(
                f"backend 'checkpoint_engine' needs the package checkpoint-engine in the trainer's environment: {error}"
            ) from error
        return RankShares(ParameterServer(auto_pg=True), model, options)


class RankShares:
    """The sender of one rank. It registers every `world`-th tensor, where `world` is the number of ranks. No tensor is
    split. `server` is a ParameterServer."""

    def __init__(self, server: Any, model: Any, options: SenderOptions) -> None:
        self._server = server
        self._registered: str | None = None
        self.use(model, options)

    def use(self, model: Any, options: SenderOptions) -> None:
        self._options = options
        self._all, self._metas = named_tensors(model, options.dtype, options.rename, options.ignore)

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        return tuple(self._metas.values())

    def act(self, step: TrainerStep, report: ReportStep) -> None:
        name = CHECKPOINT.format(version=step.body["version"])
        if step.step == REGISTER:
            self.close()
            self._server.register_checkpoint(name, named_tensors=self._share())
            self._registered = name
            self._server.gather_metas(name)
        elif step.step == UPDATE:

            def call_workers(sockets: Sequence[tuple[str, str]]) -> None:
                if self._options.rank == 0:  # every rank receives the sockets of all ranks
                    report(TO_WORKERS, {"sockets": [list(each) for each in sockets]})

            self._server.update(name, call_workers)
        else:
            raise Permanent(
                f"backend checkpoint_engine does not support step {step.step!r} in the trainer; use the same version of"
                " OrchestrRL for the daemon and the trainer"
            )

    def close(self) -> None:
        """Release the pinned memory of the registered version, so that the next version can be registered."""
        registered, self._registered = self._registered, None
        if registered is not None:
            self._server.unregister_checkpoint(registered)

    def _share(self) -> dict[str, Any]:
        share = {}
        for number, (name, tensor) in enumerate(self._all.items()):
            whole = gathered(tensor, self._metas[name])  # a collective of all ranks, even if another rank keeps it
            if number % self._options.world == self._options.rank:
                share[name] = whole.cpu()
        return share


def _named(publication: Publication) -> list[EngineId]:
    return [EngineId(name.strip()) for name in publication.options.get("engines", "").split(",") if name.strip()]
