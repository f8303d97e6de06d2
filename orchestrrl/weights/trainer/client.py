"""The client with which a trainer brings its weights to the engines.

    client = WeightsClient("127.0.0.1:7070", peer="train0")
    report = client.publish(version, model)  # returns when every engine serves the version
    handle = client.start_publish(version, model, install="next_pause")  # handle.result() waits

Every rank must make these calls. `publish` copies the weights into a folder, from which this host's peer
(`orchestrrl sync peer`) serves them, and notifies the daemon. The model may change once `publish` or `start_publish`
has returned. The client runs in the trainer's environment and needs grpcio, protobuf, pydantic, aiohttp and numpy, and
torch to publish tensors.
"""

import asyncio
import json
import logging
import queue
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as StillWaiting
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack

import numpy as np

from orchestrrl.core.clock import WallClock
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.rpc.channel import Backoff
from orchestrrl.rpc.codecs.weights import STATUS, SYNC
from orchestrrl.rpc.control_client import ControlClient
from orchestrrl.rpc.pb import weights_pb2
from orchestrrl.weights.backends.base import (
    STEP_DONE,
    STEP_FAILED,
    TREE,
    SenderOptions,
    WeightSender,
    make_direct,
    trainer_step_from,
)
from orchestrrl.weights.controller.reports import SyncReport, SyncState
from orchestrrl.weights.model import TensorMeta
from orchestrrl.weights.peer.arguments import FOLDERS
from orchestrrl.weights.publication import NOT_ATTACHED, PUBLICATION, Publication
from orchestrrl.weights.trainer.boxes import TensorPiece, TrainerRanks, to_stage
from orchestrrl.weights.trainer.megatron import MegatronShards, megatron_pieces
from orchestrrl.weights.trainer.staging import ArrayCopies, PieceCopies, stage
from orchestrrl.weights.trainer.torch_tensors import Rename, TensorCopies, Tied, pieces_of, published_dtype, state_of
from planner.model import PeerId

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 60.0
RELAYED_WITHIN_S = 3600.0  # the daemon's own limits are shorter
UNOPENED = (SyncState.PUBLISHING, SyncState.PLANNING)  # peers may not have opened the staged version yet
Arrays = Mapping[str, "np.ndarray[Any, Any]"] | Sequence[TensorPiece]

_ADVICE = {
    "peer_lost": "check that `orchestrrl sync peer` runs on every host and can reach the daemon",
    "unreachable": "check that every engine has a peer (`orchestrrl sync status`)",
    "no_engines": "check that engines have an agent (`orchestrrl status`) and a peer (`orchestrrl sync status`)",
    "trainer_lost": "check that every rank publishes the version",
    "not_quiet": "check which engine did not pause (`orchestrrl barrier`)",
}


class SyncAborted(Permanent):
    """Raised if a sync was aborted and the fleet keeps its previous version. `report` has the reason. The aborted
    version may be published again."""

    def __init__(self, report: SyncReport) -> None:
        advice = _ADVICE.get(report.code, "see `orchestrrl sync history`")
        super().__init__(
            f"version {report.version} was not committed, engines keep the previous version: {report.code},"
            f" {report.detail or 'no detail'}; {advice}, then publish it again"
        )
        self.report = report


class PublishOptions(TypedDict, total=False):
    """Options of a publication, documented in `Publication`."""

    install: Literal["", "at_once", "next_pause"]
    backend: str
    probe: Sequence[int]
    expected: Sequence[int]
    options: Mapping[str, str]


class ModelOptions(PublishOptions, total=False):
    """Options for reading a model. If `shards` is given, the model is the module or state dict of a Megatron rank. If
    the rank has several pipeline chunks, the model is a list with one module or state dict for each chunk.
    Floating-point tensors are published as `dtype`. `tied`, `rename` and `ignore` are documented in `pieces_of`."""

    shards: MegatronShards | None
    dtype: Any
    tied: Tied
    rename: Rename | None
    ignore: Sequence[str]


class PublishInProgress:
    """The handle of a running publication. Its methods may be called from any thread."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.report: SyncReport | None = None  # the newest report; None until the daemon has answered
        self._future: Future[SyncReport] = Future()

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> SyncReport:
        """Wait until the sync is done or superseded by a newer version; return its report. Raises SyncAborted if
        engines keep the previous version, and Permanent or ProblemFaults if the daemon rejects the publication. Raises
        Retryable or OutcomeUnknown if the daemon is unreachable for longer than the client's `patience_s`, and
        Retryable if the sync takes longer than `timeout_s`."""
        try:
            report = self._future.result(timeout_s)
        except CancelledError:
            raise OutcomeUnknown(f"the client was closed before the sync of version {self.version} ended") from None
        except StillWaiting as error:
            if self._future.done():
                raise
            state = "unknown, because the daemon has not accepted it yet" if self.report is None else self.report.state
            raise Retryable(
                f"timed out after {timeout_s:g} s: the state of version {self.version} is {state}", after_s=1.0
            ) from error
        if report.state is SyncState.ABORTED:
            raise SyncAborted(report)
        return report


class WeightsClient:
    """The client of one trainer rank, which publishes the rank's weights.

    `peer` and `folder` are the id and the folder of the peer on this rank's host; the default folder is the peer's
    default. `rank` is the index of this rank among the `world` publishing ranks. If torch.distributed runs, `rank` and
    `world` must agree with it; pass `group` if only some of its ranks publish. `run` identifies this start of the
    trainer and must be equal on all ranks. It is needed only if torch.distributed does not run. `dtype` is the default
    for floating-point tensors. Publishing fails if the daemon is unreachable for more than `patience_s`.
    """

    def __init__(
        self,
        address: str,
        *,
        peer: str,
        folder: Path | str | None = None,
        rank: int = 0,
        world: int = 1,
        group: Any = None,
        run: str = "",
        dtype: Any = None,
        patience_s: float = PATIENCE_S,
        backoff: Backoff | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank must be >= 0 and less than the world size ({world}), got {rank}")
        if not peer:
            raise ValueError("peer must be the name of the peer on this host, got ''")
        self.address, self.peer = address, PeerId(peer)
        self.folder = Path(folder if folder is not None else f"{FOLDERS}{peer}").absolute()
        self.rank, self.world = rank, world
        self._dtype = dtype
        self._ranks = TrainerRanks(rank, world, peer, group, run)
        self._times = 0  # number of publications, equal on all ranks
        self._patience_s = patience_s
        self._clock = WallClock()
        self._backoff = backoff or Backoff()
        self._copies: TensorCopies | None = None
        self._senders: dict[tuple[str, tuple[tuple[str, str], ...]], WeightSender] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def publish(self, version: int, model: Any, **options: Unpack[ModelOptions]) -> SyncReport:
        """Publish this rank's part of a module or state dict as policy version `version`; return once the fleet has the
        version. Raises the errors of `PublishInProgress.result`.

        Whole tensors and DTensors (FSDP2, TP) are published as they are on this rank, without gathering. A version that
        was not committed may be published again, also by a restarted trainer. A committed version cannot change; see
        `next_version`. Raises Permanent before anything is published if there is not enough space or the model cannot
        be read.
        """
        if options.get("backend", TREE) != TREE:
            return self._send(version, model, options)
        return self.start_publish(version, model, **options).result()

    def start_publish(self, version: int, model: Any, **options: Unpack[ModelOptions]) -> PublishInProgress:
        """Start to publish as `publish` does, but return as soon as the model may change again. Raises Permanent for a
        direct backend, which supports only `publish`."""
        if (backend := options.get("backend", TREE)) != TREE:
            raise Permanent(
                f"backend {backend!r} does not support start_publish, because it sends from the trainer's process;"
                " call publish"
            )
        began_s = self._begun()
        dtype, rename, shards = options.get("dtype") or self._dtype, options.get("rename"), options.get("shards")
        if shards is None:
            tied, ignore = options.get("tied", "once"), options.get("ignore", ())
            pieces = pieces_of(model, dtype=dtype, tied=tied, rename=rename, ignore=ignore)
        else:
            chunks = model if isinstance(model, list | tuple) else [model]
            pieces = megatron_pieces(
                [state_of(chunk) for chunk in chunks],
                shards,
                lambda tensor: published_dtype(tensor.dtype, dtype),
                rename or (lambda name: name),
            )
        self._copies = copies = self._copies or TensorCopies()
        return self._publish(version, pieces, copies, began_s, options)

    def publish_arrays(self, version: int, arrays: Arrays, **options: Unpack[PublishOptions]) -> SyncReport:
        """Publish whole arrays by name, or pieces of tensors, without torch. Only pieces can have a dtype that numpy
        does not support; see ArrayCopies. The return value and the errors are those of `publish`."""
        return self.start_publish_arrays(version, arrays, **options).result()

    def start_publish_arrays(
        self, version: int, arrays: Arrays, **options: Unpack[PublishOptions]
    ) -> PublishInProgress:
        began_s = self._begun()
        pieces = [_whole(name, array) for name, array in arrays.items()] if isinstance(arrays, Mapping) else arrays
        return self._publish(version, pieces, ArrayCopies(), began_s, options)

    def next_version(self) -> int:
        """Return a number above every version that the fleet has or is receiving. A trainer that starts or restarts
        uses it for its first version, because the daemon rejects a committed version number with other content. Every
        rank must call this method. Raises Retryable or OutcomeUnknown if the daemon is unreachable for longer than the
        client's `patience_s`."""
        return self._ranks.of_the_first(lambda: self._submit(self._next_version()).result())

    def close(self) -> None:
        """Close the client. Running syncs continue in the daemon, but their handles get no result."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop = self._thread = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begun(self) -> float:
        self._times += 1
        return self._clock.now_s()

    def _publish(
        self, version: int, pieces: Sequence[TensorPiece], copies: PieceCopies, began_s: float, options: PublishOptions
    ) -> PublishInProgress:
        neighbours = self._ranks.neighbours(pieces)
        own = to_stage(pieces, self.rank, neighbours.holders)
        if pieces and not own:  # every rank must stage something: stage the smallest piece again
            own = [min(pieces, key=lambda piece: piece.bytes)]
        offloaded_s, copying_s = copies.offload_s, self._clock.now_s()
        staged = stage(self.folder, version, self.rank, self.world, own, copies)
        elapsed_s = self._clock.now_s() - copying_s
        offload_s = min(elapsed_s, copies.offload_s - offloaded_s)
        publication = replace(
            self._publication(version, staged.tensors, neighbours.run, began_s, options),
            boxes=staged.part.boxes,
            offload_s=offload_s,
            gather_s=elapsed_s - offload_s,
        )
        handle = self._start_following(
            publication, lambda report: staged.hold.let_go() if report.state not in UNOPENED else None
        )
        handle._future.add_done_callback(lambda _: staged.hold.let_go())
        return handle

    def _publication(
        self, version: int, tensors: Sequence[TensorMeta], run: str, began_s: float, options: PublishOptions
    ) -> Publication:
        given: Mapping[str, Any] = {**options}
        chosen = {name: given[name] for name in PublishOptions.__annotations__ if name in given}
        chosen |= {name: tuple(chosen[name]) for name in ("probe", "expected") if name in chosen}
        own = version, self.rank, self.world, self.peer, tuple(tensors)
        return Publication(*own, boxes={}, began_s=began_s, run=f"{run}-{self._times}", **chosen)

    def _send(self, version: int, model: Any, options: ModelOptions) -> SyncReport:
        """Publish through a direct backend, which sends the weights from the trainer's process; return the report."""
        began_s, name = self._begun(), options["backend"]
        if options.get("shards") is not None:
            raise Permanent(
                f"backend {name!r} does not support the shards of a Megatron rank; use backend {TREE!r}, or publish"
                " modules or DTensors"
            )
        own = dict(options.get("options", {}))
        rename, ignore = options.get("rename"), options.get("ignore", ())
        dtype = options.get("dtype") or self._dtype
        sender_options = SenderOptions(self.rank, self.world, dtype, rename, ignore, own)
        key = (name, tuple(sorted(own.items())))
        sender = self._senders.get(key)
        if sender is None:
            sender = self._senders[key] = make_direct(name).sender(model, sender_options)
        else:
            sender.use(model, sender_options)
        publication = self._publication(version, sender.tensors, self._ranks.neighbours([]).run, began_s, options)
        reports: queue.SimpleQueue[SyncReport | None] = queue.SimpleQueue()  # None: the sync is over
        handle = self._start_following(publication, reports.put)
        handle._future.add_done_callback(lambda _: reports.put(None))
        self._take_steps(sender, iter(reports.get, None))
        return handle.result()

    def _take_steps(self, sender: WeightSender, reports: Iterator[SyncReport]) -> None:
        """Perform the steps that the daemon requests. They run in the calling thread, because a step may gather
        tensors, which is a collective call of all ranks. If a step fails, the failure is reported to the daemon, which
        may request the step again."""
        done: set[tuple[str, int]] = set()
        for report in reports:
            asked = trainer_step_from(report.trainer_step_json)
            if asked is None or (report.id, asked.number) in done:
                continue
            done.add((report.id, asked.number))
            relay = partial(self._relay, report.id, asked.number)
            became, body = STEP_DONE, {}
            try:
                sender.act(asked, relay)
            except Exception as error:  # the backend's product may raise any exception
                logger.warning("version %d: %s: %s", report.version, asked.step, error, exc_info=True)
                became, body = STEP_FAILED, {"why": f"could not {asked.step}: {type(error).__name__}: {error}"}
            try:
                relay(became, body)
            except OrchestrRLError as error:  # the step is over or the daemon is away: the next report shows which
                logger.warning("%s", error)

    def _relay(self, sync_id: str, number: int, call: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        request = weights_pb2.RelayToBackendRequest(
            sync_id=sync_id, rank=self.rank, number=number, call=call, body_json=json.dumps(dict(body))
        )

        async def relay() -> str:
            async with ControlClient(self.address) as daemon:
                return (await daemon.call(daemon.weights.RelayToBackend, request, RELAYED_WITHIN_S)).body_json

        told: Mapping[str, Any] = json.loads(self._submit(relay()).result())
        return told

    def _start_following(self, publication: Publication, on_report: Callable[[SyncReport], None]) -> PublishInProgress:
        handle = PublishInProgress(publication.version)
        handle._future = self._submit(self._follow(publication, handle, on_report))
        return handle

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        # One thread for the client's lifetime: trainers are synchronous, and gRPC requires a single event loop.
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="orchestrrl-weights", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _next_version(self) -> int:
        began_s, failures, rng = self._clock.now_s(), 0, random.Random(self.peer)
        while True:
            try:
                async with ControlClient(self.address) as daemon:
                    told = await daemon.call(daemon.weights.GetWeights, weights_pb2.GetWeightsRequest())
                    status = STATUS.from_pb(told)
                    taken = [-1 if status.committed is None else status.committed]
                    taken += [status.sync.version] if status.sync is not None else []
                    return max(taken) + 1
            except (Retryable, OutcomeUnknown):
                if self._clock.now_s() - began_s > self._patience_s:
                    raise
            failures += 1
            await self._clock.sleep(self._backoff.delay_s(failures, rng))

    async def _follow(
        self, publication: Publication, handle: PublishInProgress, on_report: Callable[[SyncReport], None]
    ) -> SyncReport:
        """Publish to the daemon, follow the sync until it is over, and return its report. Publish again after a loss of
        the connection."""
        request = weights_pb2.PublishRequest(publication_json=PUBLICATION.dump_json(publication).decode())
        rng = random.Random(f"{publication.run} {publication.rank} {publication.version}")
        failures, since_s = 0, 0.0  # number of consecutive failures, and time of the first
        while True:
            error: Retryable | OutcomeUnknown
            try:
                async with ControlClient(self.address) as daemon:
                    async for told in daemon.watch(daemon.weights.Publish, request):
                        failures = 0
                        handle.report = SYNC.from_pb(told)
                        on_report(handle.report)
                        if handle.report.over:
                            return self._noted(handle.report)
                error = OutcomeUnknown(f"the daemon at {self.address} ended the call during version {handle.version}")
            except (Retryable, OutcomeUnknown) as caught:
                error = caught
            failures += 1
            if failures == 1:
                since_s = self._clock.now_s()
            elif (away_s := self._clock.now_s() - since_s) > self._patience_s:
                raise self._away(error, handle, away_s) from error
            await self._clock.sleep(self._backoff.delay_s(failures, rng))

    def _away(
        self, error: Retryable | OutcomeUnknown, handle: PublishInProgress, away_s: float
    ) -> Retryable | OutcomeUnknown:
        staged = f"version {handle.version} is staged; publish it again afterwards"
        if NOT_ATTACHED in str(error):
            peer = f"the peer {self.peer} has not been attached to the daemon for {away_s:.0f} s"
            return Retryable(f"{peer}: start `orchestrrl sync peer --id {self.peer}` on this host; {staged}", 5.0)
        if handle.report is None and isinstance(error, Retryable):
            return Retryable(f"no call to the daemon succeeded for {away_s:.0f} s: {error}; {staged}", error.after_s)
        stood = "unknown" if handle.report is None else str(handle.report.state)
        return OutcomeUnknown(f"no report for {away_s:.0f} s, last state of the sync {stood}: {error}; {staged}")

    def _noted(self, report: SyncReport) -> SyncReport:
        if report.state is SyncState.DONE and report.code != "done":
            logger.warning("version %d: %s, %s", report.version, report.code, report.detail)
        return report


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _whole(name: str, array: np.ndarray[Any, Any]) -> TensorPiece:
    kinds = {"f": "F", "i": "I", "u": "U", "b": "BOOL"}
    kind = kinds.get(array.dtype.kind, "")
    dtype = kind if kind == "BOOL" else f"{kind}{array.dtype.itemsize * 8}"
    meta = TensorMeta(name, dtype, tuple(array.shape))
    return TensorPiece(meta, meta.whole, array)
