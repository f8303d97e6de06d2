"""Register the attached nodes (agents and gateways), and queue orders for each node.

A node that attaches again under the same id replaces its old stream. Two processes that are attached under the same id
at the same time are treated as different nodes. The second node is listed under an id that includes a hash of its
incarnation. Among queued standing orders (routes), only the newest is kept, because each order replaces the previous
one.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b

from orchestrrl.core.delivery import REATTACH_S, OrderStream
from orchestrrl.core.errors import LimitReached, Retryable, shorten
from orchestrrl.core.operations import Operation, SetRoutes
from planner.model import EngineId, NodeId


class NodeKind(StrEnum):
    AGENT = "agent"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class GatewayEngine:
    """An engine, under the id that a gateway's command line assigns to it."""

    engine: EngineId
    url: str
    server: str = ""  # id of the server process, as read from it; empty: unknown
    known_as: EngineId | None = None  # the daemon's id of the same engine, once the gateway uses it


@dataclass(frozen=True, slots=True)
class NodeHello:
    """The first message that a node sends when it attaches."""

    node: NodeId
    kind: NodeKind
    engines: tuple[EngineId, ...]  # an agent's own engines, or those a gateway routes to
    version: str
    url: str = ""  # the node's own address
    incarnation: str = ""  # id of one process of the node; empty: not given
    addresses: tuple[GatewayEngine, ...] = ()  # a gateway's engines with their URLs
    host: str = ""  # id of the host whose loopback addresses the node uses; empty: unknown


class Attachment(OrderStream[Operation]):
    """The stream of orders to one attached node. A standing order (routes) is sent before all other queued orders,
    because it also announces the daemon's generation to the node."""

    def __init__(self, hello: NodeHello) -> None:
        super().__init__()
        self.hello = hello

    def put(self, order: Operation) -> None:
        if isinstance(order.action, SetRoutes):
            if self._waiting and isinstance(self._waiting[0].action, SetRoutes):
                self._waiting.popleft()
            self._waiting.appendleft(order)
            self._changed.set()
        else:
            super().put(order)


@dataclass(slots=True)
class NodeState:
    """The state of a node that is attached now or was attached earlier."""

    attachment: Attachment  # the latest
    attached: bool
    last_report_s: float


@dataclass(slots=True)
class _Process:
    """One process of a node. It is stored while it has a stream of reports or orders."""

    id: NodeId  # the id under which it is listed
    streams: set[object] = field(default_factory=set)  # of reports by number, of orders by attachment


class NodeRegistry:
    """The nodes that are attached now or were attached earlier. At most `most_nodes` nodes are stored."""

    def __init__(self, most_nodes: int = 8192) -> None:
        self._most_nodes = most_nodes
        self._known: dict[NodeId, NodeState] = {}
        self._processes: dict[tuple[NodeId, str], _Process] = {}  # by id and incarnation

    def id_of(self, node: NodeId, incarnation: str, stream: object) -> NodeId:
        """Return the id under which the process that uses `stream` is listed, and record that the process uses this
        stream. The id is `node` or, if another attached process has this id, `node` with a hash of the incarnation. A
        process without an incarnation is always listed under `node`."""
        if not incarnation:
            return node
        process = self._processes.get((node, incarnation))
        if process is None:
            self.stream_ended(stream)  # it belonged to another process
            taken = any(other.id == node for other in self._processes.values())
            digest = blake2b(incarnation.encode(), digest_size=4).hexdigest()
            id = NodeId(f"{node}~{digest}") if taken else node
            process = self._processes[node, incarnation] = _Process(id)
        process.streams.add(stream)
        return process.id

    def stream_ended(self, stream: object) -> None:
        """Remove a stream from its process. Remove the process too if this was its last stream."""
        for key, process in list(self._processes.items()):
            process.streams.discard(stream)
            if not process.streams:
                del self._processes[key]

    def doubles(self) -> dict[NodeId, NodeId]:
        """Return the attached nodes that are listed under an id with a hash, because another attached node uses the
        same id. The result maps the id under which each of these nodes is listed to the id that the node uses."""
        there = {process.id for process in self._processes.values()}
        listed = {process.id: node for (node, _), process in self._processes.items() if process.id != node}
        return {id: node for id, node in listed.items() if node in there}

    def attach(self, hello: NodeHello, now_s: float) -> Attachment:
        """Attach a node and return its stream of orders. Raises LimitReached if `most_nodes` other nodes are
        attached."""
        attachment = Attachment(hello)
        attachment.hello = hello = replace(hello, node=self.id_of(hello.node, hello.incarnation, attachment))
        try:
            self._make_room(hello.node)
        except LimitReached:
            self.stream_ended(attachment)
            raise
        old = self._known.get(hello.node)
        if old is not None and old.attached:
            old.attachment.end()
            self.stream_ended(old.attachment)
        self._known[hello.node] = NodeState(attachment, attached=True, last_report_s=now_s)
        return attachment

    def detach(self, attachment: Attachment, now_s: float) -> bool:
        """Record that a node's stream of orders has ended. Return True if the node is now detached, and False if it was
        already detached or a newer stream has replaced this one."""
        attachment.end()
        node = attachment.hello.node
        is_double = any(process.id == node != own for (own, _), process in self._processes.items())
        self.stream_ended(attachment)
        known = self._known.get(node)
        if known is None or known.attachment is not attachment or not known.attached:
            return False
        known.attached, known.last_report_s = False, now_s
        if is_double:  # it will attach again under another id, or as the only one
            del self._known[node]
        return True

    def on_report(self, node: NodeId, now_s: float) -> None:
        known = self._known.get(node)
        if known is not None:
            known.last_report_s = now_s

    def send(self, node: NodeId, operation: Operation) -> None:
        """Send an operation to a node. Raises Retryable if the node is not attached."""
        known = self._known.get(node)
        if known is None or not known.attached:
            raise Retryable(f"node {node} is not attached", REATTACH_S)
        known.attachment.put(operation)

    def gateways(self) -> tuple[NodeId, ...]:
        """Return the ids of the attached gateways, sorted."""
        nodes = self._known.items()
        return tuple(sorted(n for n, at in nodes if at.attached and at.attachment.hello.kind is NodeKind.GATEWAY))

    def states(self) -> tuple[NodeState, ...]:
        """Return the states of all stored nodes, attached or not, in order of their ids."""
        return tuple(self._known[node] for node in sorted(self._known))

    def _make_room(self, node: NodeId) -> None:
        """If `node` is new and the limit of stored nodes is reached, drop the detached node with the oldest last
        report. Raises LimitReached if all stored nodes are attached."""
        if node in self._known or len(self._known) < self._most_nodes:
            return
        away = [known for known in self._known.values() if not known.attached]
        if not away:
            limit = f"at most {self._most_nodes} nodes can be attached at a time (limits.nodes)"
            raise LimitReached(f"node_id: cannot attach node {shorten(node)}: {limit}")
        del self._known[min(away, key=lambda known: known.last_report_s).attachment.hello.node]

    def end_all(self) -> None:
        """End every stream, so that the nodes detect the daemon's shutdown at once and attach to the next daemon."""
        for known in self._known.values():
            known.attachment.end()
