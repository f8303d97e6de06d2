"""A daemon with real gRPC to which trainers publish; the test chooses its answers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.rpc.channel import SERVER_OPTIONS
from orchestrrl.rpc.codecs.weights import STATUS, report_to_pb
from orchestrrl.rpc.pb import weights_pb2, weights_pb2_grpc
from orchestrrl.rpc.refusals import refuse
from orchestrrl.weights.controller.reports import SyncReport, WeightsStatus
from orchestrrl.weights.publication import PUBLICATION, Publication


@dataclass
class Daemon(weights_pb2_grpc.WeightsServicer):
    """Answers each call with the next script: reports and then the end of the stream, or an error."""

    stories: list[Sequence[SyncReport] | OrchestrRLError] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    status: WeightsStatus = field(default_factory=lambda: WeightsStatus(None, None))
    may_end: asyncio.Event = field(default_factory=asyncio.Event)  # after the first report of the last script

    async def Publish(
        self, request: weights_pb2.PublishRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[weights_pb2.SyncReport]:
        await context.send_initial_metadata(())
        self.heard.append(request.publication_json)
        story = self.stories.pop(0)
        if isinstance(story, OrchestrRLError):
            await refuse(context, story)
        for number, report in enumerate(story):
            if number and not self.stories:
                await self.may_end.wait()
            yield report_to_pb(report)

    async def GetWeights(
        self, request: weights_pb2.GetWeightsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> weights_pb2.WeightsStatus:
        return STATUS.to_pb(self.status)

    @property
    def publications(self) -> list[Publication]:
        return [PUBLICATION.validate_json(each) for each in self.heard]


@asynccontextmanager
async def serving(daemon: Daemon, port: int = 0) -> AsyncIterator[str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    weights_pb2_grpc.add_WeightsServicer_to_server(daemon, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(None)
