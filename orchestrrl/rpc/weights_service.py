"""The Weights service. It sends orders to peers. Trainers use it to publish versions, and operators to inspect, abort
and install versions."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from pydantic import TypeAdapter, ValidationError

from orchestrrl.core.clock import Clock, stop
from orchestrrl.core.errors import Permanent, ProblemFaults, faults_of
from orchestrrl.rpc.channel import MESSAGE_BYTES
from orchestrrl.rpc.codec import optional
from orchestrrl.rpc.codecs.weights import STATUS, report_to_pb
from orchestrrl.rpc.order_pieces import pieces_of
from orchestrrl.rpc.pb import weights_pb2 as pb
from orchestrrl.rpc.pb import weights_pb2_grpc
from orchestrrl.rpc.refusals import Context, status_text
from orchestrrl.weights.controller.controller import WeightSync
from orchestrrl.weights.controller.peer_hub import PeerHub, PeerStream
from orchestrrl.weights.controller.reports import SyncReport
from orchestrrl.weights.model import Peer
from orchestrrl.weights.orders import NEWS
from orchestrrl.weights.publication import PUBLICATION

logger = logging.getLogger(__name__)

# Interval of reports while bytes arrive; other changes are reported at once.
TOLD_EVERY_S = 0.1
ENVELOPE_BYTES = 1024  # most bytes that gRPC and protobuf add to a text
FIELD_BYTES = 16  # most bytes that a nested message adds to its own
_BODY: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])


class WeightsService(weights_pb2_grpc.WeightsServicer):
    def __init__(self, syncs: WeightSync, peers: PeerHub, clock: Clock) -> None:
        self._syncs = syncs
        self._peers = peers
        self._now_s = clock.now_s

    async def Attach(
        self, request_iterator: AsyncIterator[pb.PeerMessage], context: Context
    ) -> AsyncIterator[pb.PeerOrder]:
        first = await anext(aiter(request_iterator), None)
        if first is None:
            return
        try:
            peer = NEWS.validate_json(first.news_json)
        except ValidationError as error:
            raise ProblemFaults(news_faults(error)) from None
        if not isinstance(peer, Peer):
            raise ProblemFaults([f"the first message must describe the peer, got {type(peer).__name__}"])
        line = self._peers.attach(peer)
        _stamp(line, first)
        receiving = asyncio.ensure_future(self._receive(request_iterator, peer, line))
        try:
            async for order in line.orders():
                for piece in pieces_of(order):
                    yield piece
            if receiving.done():
                receiving.result()  # its error ends the call
        finally:
            await stop(receiving)
            line.end()

    async def _receive(self, messages: AsyncIterator[pb.PeerMessage], peer: Peer, line: PeerStream) -> None:
        try:
            async for message in messages:
                _stamp(line, message)
                try:
                    if message.news_json:
                        line.on_news(NEWS.validate_json(message.news_json))
                except ValidationError as error:
                    logger.warning("invalid message from peer %s: %s", peer.id, "; ".join(news_faults(error)))
        finally:
            line.end()

    async def Publish(self, request: pb.PublishRequest, context: Context) -> AsyncIterator[pb.SyncReport]:
        try:
            publication = PUBLICATION.validate_json(request.publication_json)
        except ValidationError as error:
            raise ProblemFaults(_publication_faults(error)) from None
        sync_id = self._syncs.publish(publication)
        async for message in self._follow(sync_id, context):
            yield message

    async def GetSync(self, request: pb.GetSyncRequest, context: Context) -> pb.SyncReport:
        return report_to_pb(await self._found(request, context))

    async def WatchSync(self, request: pb.GetSyncRequest, context: Context) -> AsyncIterator[pb.SyncReport]:
        report = await self._found(request, context)
        async for message in self._follow(report.id, context):
            yield message

    async def ListSyncs(self, request: pb.ListSyncsRequest, context: Context) -> pb.ListSyncsResponse:
        """Return the newest stored syncs that fit into a message. There are at most `request.limit` of them, unless the
        limit is 0."""
        listed: list[pb.SyncReport] = []
        size = ENVELOPE_BYTES
        for report in self._syncs.history(request.limit):
            message = report_to_pb(report, edges=False)
            size += message.ByteSize() + FIELD_BYTES
            if size > MESSAGE_BYTES:
                break
            listed.append(message)
        return pb.ListSyncsResponse(syncs=listed)

    async def GetWeights(self, request: pb.GetWeightsRequest, context: Context) -> pb.WeightsStatus:
        return STATUS.to_pb(self._syncs.status())

    async def AbortSync(self, request: pb.AbortSyncRequest, context: Context) -> pb.SyncReport:
        return report_to_pb(self._syncs.abort(request.sync_id, request.reason))

    async def InstallSync(self, request: pb.InstallSyncRequest, context: Context) -> pb.SyncReport:
        return report_to_pb(self._syncs.install_now(request.sync_id, request.reason))

    async def RelayToBackend(self, request: pb.RelayToBackendRequest, context: Context) -> pb.RelayToBackendResponse:
        try:
            body = _BODY.validate_json(request.body_json or "{}")
        except ValidationError as error:
            raise ProblemFaults(faults_of(error)) from None
        told = await self._syncs.relayed(request.sync_id, request.rank, request.number, request.call, body)
        return pb.RelayToBackendResponse(body_json=_BODY.dump_json(dict(told)).decode())

    async def _found(self, request: pb.GetSyncRequest, context: Context) -> SyncReport:
        version = optional(request, "version")
        try:
            return self._syncs.report(request.sync_id, version)
        except Permanent as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, status_text(error))

    async def _follow(self, sync_id: str, context: Context) -> AsyncIterator[pb.SyncReport]:
        """Yield a report immediately after each new step of a sync. Progress within a step is reported at most once
        every `TOLD_EVERY_S` seconds, because the report of a large fleet is large."""
        seen: SyncReport | None = None
        told_s = 0.0
        async for report in self._syncs.follow(sync_id):
            if seen is None or _is_step(seen, report) or self._now_s() - told_s >= TOLD_EVERY_S:
                seen, told_s = report, self._now_s()
                yield report_to_pb(report)


def _stamp(line: PeerStream, message: pb.PeerMessage) -> None:
    if message.HasField("sent_unix_s"):
        line.stamped(message.sent_unix_s)


def _publication_faults(error: ValidationError) -> list[str]:
    """Return the faults of a publication. If the error is about contradictions between fields, its texts already
    contain the paths, because the validator of the publication adds them."""
    together = [each["msg"] for each in error.errors() if each["type"] == "value_error" and not each["loc"]]
    if together:
        return together[0].removeprefix("Value error, ").split("; ")
    return faults_of(error)


def news_faults(error: ValidationError) -> list[str]:
    """Return the faults of an invalid message from a peer. The kind of the message is not known, so the faults are
    those of the kind that the message matches best."""
    kinds: dict[str, list[str]] = {}
    for fault in faults_of(error):
        kinds.setdefault(fault.partition(".")[0].partition(":")[0], []).append(fault)
    return min(kinds.values(), key=len)


def _is_step(seen: SyncReport, report: SyncReport) -> bool:
    def steps(of: SyncReport) -> tuple[object, ...]:
        return of.state, of.code, of.attempt, of.phases, of.published, of.trainer_step_json

    return report.over or steps(seen) != steps(report)
