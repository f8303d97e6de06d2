"""Moves every 20th request of a gateway to its other engine, through the operator API."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import aiohttp

MOVED_EACH = 20
POLL_S = 0.005


@dataclass
class ForcedMoves:
    """Watches the requests in flight and moves the 20th, 40th, ... If one of these ends before it can be moved, the
    next request is moved in its place."""

    http: aiohttp.ClientSession
    operator_url: str
    engines: tuple[str, str] = ("e0", "e1")
    immovable: dict[str, str] = field(default_factory=dict)  # reasons by request id
    moved: list[dict[str, Any]] = field(default_factory=list)  # results of the moves that were done
    seen: set[str] = field(default_factory=set)
    due: int = 0

    async def run(self) -> None:
        while True:
            await self._step()
            await asyncio.sleep(POLL_S)

    async def _step(self) -> None:
        async with self.http.get(f"{self.operator_url}/orchestrrl/requests") as response:
            requests = (await response.json())["in_flight"]
        new = [request for request in requests if request["id"] not in self.seen]
        self.due += (len(self.seen) + len(new)) // MOVED_EACH - len(self.seen) // MOVED_EACH
        self.seen |= {request["id"] for request in new}
        self.immovable |= {request["id"]: request["movable_detail"] for request in requests if not request["movable"]}
        running = (
            request
            for request in requests
            if request["movable"] and request["generated_tokens"] and not request["moves"] and request["engine"]
        )
        for request in running:
            if not self.due:
                break
            await self._move(request)

    async def _move(self, request: dict[str, Any]) -> None:
        target = self.engines[request["engine"] == self.engines[0]]
        order = {"moves": [{"request_id": request["id"], "to_engine_id": target}]}
        async with self.http.post(f"{self.operator_url}/orchestrrl/move", json=order) as response:
            (result,) = (await response.json())["items"]
        if result["done"]:
            self.due -= 1
            self.moved.append(result)
