"""The nodes that are attached, and the orders on their way to each.

A node that attaches again under the same id replaces its old stream. Of standing orders (routes) only the newest one
waits: each replaces the one before.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from orchestrrl.errors import Retryable
from orchestrrl.operations import Operation, SetRoutes
from orchestrrl.reports import NodeHello, NodeKind
from planner.model import NodeId

# How soon a node that went away is expected back.
REATTACH_S = 1.0


class Attachment:
    """One node's stream of orders, from its hello to its end."""

    def __init__(self, hello: NodeHello) -> None:
        self.hello = hello
        self._orders: deque[Operation] = deque()
        self._standing: Operation | None = None
        self._news = asyncio.Event()
        self._ended = False

    def put(self, operation: Operation) -> None:
        if isinstance(operation.action, SetRoutes):
            self._standing = operation
        else:
            self._orders.append(operation)
        self._news.set()

    def end(self) -> None:
        """Let the stream end; what waits in it is not sent."""
        self._ended = True
        self._news.set()

    async def orders(self) -> AsyncIterator[Operation]:
        """Each order as it comes, until the attachment ends. Standing orders go first: they also tell a node which
        generation now commands."""
        while True:
            await self._news.wait()
            self._news.clear()
            while not self._ended and (self._standing or self._orders):
                if self._standing:
                    standing, self._standing = self._standing, None
                    yield standing
                else:
                    yield self._orders.popleft()
            if self._ended:
                return


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node that is or was attached."""

    hello: NodeHello
    attached: bool
    heard_s: float


class NodeRegistry:
    """Who is attached, and since when others are missed."""

    def __init__(self) -> None:
        self._attached: dict[NodeId, Attachment] = {}
        self._known: dict[NodeId, NodeState] = {}

    def attach(self, hello: NodeHello, now_s: float) -> Attachment:
        old = self._attached.get(hello.node)
        if old is not None:
            old.end()
        attachment = self._attached[hello.node] = Attachment(hello)
        self._known[hello.node] = NodeState(hello, True, now_s)
        return attachment

    def detach(self, attachment: Attachment, now_s: float) -> bool:
        """The stream has ended. False: a newer one of the same node had replaced it already."""
        attachment.end()
        node = attachment.hello.node
        if self._attached.get(node) is not attachment:
            return False
        del self._attached[node]
        self._known[node] = NodeState(attachment.hello, False, now_s)
        return True

    def heard(self, node: NodeId, now_s: float) -> None:
        known = self._known.get(node)
        if known is not None:
            self._known[node] = NodeState(known.hello, known.attached, now_s)

    def send(self, node: NodeId, operation: Operation) -> None:
        """Raises Retryable when the node is not attached."""
        attachment = self._attached.get(node)
        if attachment is None:
            raise Retryable(f"node {node} is not attached", REATTACH_S)
        attachment.put(operation)

    def gateways(self) -> tuple[NodeId, ...]:
        """The attached gateways, by id."""
        return tuple(sorted(n for n, a in self._attached.items() if a.hello.kind is NodeKind.GATEWAY))

    def states(self) -> tuple[NodeState, ...]:
        """Every node that ever attached, by id."""
        return tuple(self._known[node] for node in sorted(self._known))

    def end_all(self) -> None:
        """Close every stream, so that nodes notice at once and attach to the next daemon."""
        for attachment in self._attached.values():
            attachment.end()
