"""Call a real daemon with invalid messages, built through its gRPC reflection.

For manual runs with any number of calls and any seed; the same seed makes the same calls, except for the daemon's times
and ids:

    .venv/bin/python tests/orchestrrl/rpc/grpc_fuzz.py --calls 100000 --seed 7

Every method of every service is called: with valid messages, with messages of which one to three fields are changed,
with streams of several messages, and with bytes that are not a message. The daemon must stay alive, answer `GetStatus`,
`ListWorkers` and `ListRequests` throughout, serve its metrics page, log no traceback, never answer with UNKNOWN or
INTERNAL, and show everything again after a restart on the same journal. Otherwise the exit status is 1, and each kind
of finding is printed once.

The daemon has a fabric with virtual switches, but no deployer: `Redeploy` would start engine processes.
"""

import argparse
import asyncio
import collections
import contextlib
import copy
import itertools
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from orchestrrl.core.clock import WallClock
from orchestrrl.core.operations import Operation, OperationResult, OperationStatus
from orchestrrl.rpc.node import NodeLink
from orchestrrl.rpc.pb import agent_pb2
from planner.model import NodeId

SITE = Path(__file__).parents[3] / "deploy" / "examples" / "site.yaml"
STARTS_WITHIN_S = 120.0
CALL_S = (0.3, 0.6, 1.5)  # deadline of one call
STREAM_S = 0.25  # how long the answers of a stream are read
SIDE_BY_SIDE = 12
LOOK_EVERY = 250  # calls between two checks of the views
MANY = 10_000
HUGE_CHARACTERS = 200_000
# Inserted into a string before serialization, and replaced by the bytes of a lone surrogate afterwards.
SURROGATE, SURROGATE_BYTES = "\x02\x03\x04", b"\xed\xa0\x80"

EVIL_FLOATS = (
    math.nan, math.inf, -math.inf, 1e308, -1e308, 1.7e308, 5e-324, -1.0, -1e-9, 0.0, -0.0, 1.0005, 1e12, 2.0**53,
    2.0**63, 2.0**64, 253402300800.0,
)  # fmt: skip
EVIL_INTS = (0, 1, -1, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1)
EVIL_TEXTS = (
    "", " ", "\0", "\n", "x" * 300, "x" * HUGE_CHARACTERS, "\u00e9" * 5000, "\U0001f600", "../../x", "%s{}$(x)", "null",
    "-1", "nan", SURROGATE, f"e0{SURROGATE}", "http://[", "http://127.0.0.1:99999", "\u2028", '"', "\x1b[2J",
)  # fmt: skip
EVIL_JSON = (
    math.nan, math.inf, -math.inf, 1e308, -1, 0, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 2**64 - 1, -(2**63),
    10**40, None, True, "", "x", "\ud800", "x" * 100_000, [], {}, [[]], [1] * MANY, 0.5, "1", [None], -0.0, 1e-320,
)  # fmt: skip


@dataclass
class Method:
    path: str
    asks: Any  # message class
    answers: Any
    streams_in: bool
    streams_out: bool


async def reflected_methods(channel: grpc.aio.Channel) -> list[Method]:
    """Return every method of every service in the server's reflection, by path."""
    stub, pool, files = reflection_pb2_grpc.ServerReflectionStub(channel), descriptor_pool.DescriptorPool(), set()

    async def ask(**question: str) -> Any:
        async for answer in stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**question)])):
            return answer
        raise AssertionError("reflection gave no answer")

    async def learn(**question: str) -> None:
        answer = await ask(**question)
        for raw in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            if file.name in files:
                continue
            files.add(file.name)
            for dependency in file.dependency:
                await learn(file_by_filename=dependency)
            pool.Add(file)  # type: ignore[attr-defined]

    methods = []
    listed = await ask(list_services="")
    for service in listed.list_services_response.service:
        await learn(file_containing_symbol=service.name)
        for method in pool.FindServiceByName(service.name).methods:
            asks, answers = (message_factory.GetMessageClass(t) for t in (method.input_type, method.output_type))
            streams = method.client_streaming, method.server_streaming
            methods.append(Method(f"/{service.name}/{method.name}", asks, answers, *streams))
    return sorted(methods, key=lambda each: each.path)


@dataclass
class Values:
    """Valid values by field name; ids from answers are reused."""

    rng: random.Random
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    learnt: dict[str, collections.deque[str]] = field(default_factory=dict)

    def text(self, message: str, name: str) -> str:
        pick = self.rng.choice
        if name in self.learnt and self.rng.random() < 0.4:
            return pick(self.learnt[name])
        known: dict[str, Callable[[], str]] = {
            "agent_id": lambda: pick(("agent-0", "agent-1")),
            "gateway_id": lambda: pick(("gw", "gw-2")),
            "node_id": lambda: pick(("gw", "gw-2", "agent-0")),
            "group_id": lambda: pick(("", "g0", "g1")),
            "group_ids": lambda: pick(("g0", "g1")),
            "lease_id": lambda: pick(("", "g1-1")),
            "switch_id": lambda: pick(("gen0/agg0", "train0/agg0", "core0", "nobody")),
            "url": lambda: f"http://127.0.0.1:{self.rng.randrange(8000, 8010)}",
            "configuration": lambda: pick(("tp1", "tp2", "")),
            "part": lambda: pick(("balancer", "fabric", "sync")),
            "mode": lambda: pick(("", "safe", "update", "overwrite", "keep")),
            "kinds": lambda: pick(("plan", "barrier", "mode", "sync.began")),
            "cross_connects": lambda: "gen0/agg0:1-2",
            "masked": lambda: pick(("switch gen0/agg0", "port gen0/agg0:1", "server gen0/s0")),
            "period": lambda: pick(("weights", "step")),
            "host": lambda: pick(("host-0", "host-1")),
            "job": lambda: pick(("", "job-0")),
            "service": lambda: pick(("", "orchestrrl.v1.Control")),
            "intent_json": lambda: json.dumps(self.intent()),
            "summary_json": lambda: json.dumps({"rank": 0, "positions": []}),
            "publication_json": lambda: json.dumps(self.publication()),
            "news_json": lambda: json.dumps(self.news()),
            "body_json": lambda: "{}",
            "file_containing_symbol": lambda: "orchestrrl.v1.Control",
            "file_by_filename": lambda: "orchestrrl/v1/control.proto",
        }
        if name in known:
            return known[name]()
        if "engine_id" in name:
            return f"e{self.rng.randrange(4)}"
        if "request_id" in name or message.endswith("ItemResult"):
            return f"r{self.rng.randrange(30)}"
        return f"{name} of a fuzz"

    def intent(self) -> Any:
        return {
            "stage": self.rng.choice(("weight_sync", "train")),
            "traffic": [
                {"operation": "WS", "primitive": "broadcast", "groups": [[0]], "receivers": [[16, 18]],
                 "bytes_per_rank": 4e9}
            ],
        }  # fmt: skip

    def publication(self) -> Any:
        return {
            "version": self.rng.randrange(1, 9), "rank": 0, "world": self.rng.choice((1, 2)),
            "peer": self.rng.choice(("p0", "p1")), "run": f"run-{self.rng.randrange(100)}",
            "tensors": [{"name": "w", "dtype": "F32", "shape": [4, 4]}], "boxes": {"w": [[[0, 4], [0, 4]]]},
            "began_s": time.time(), "offload_s": 0.1, "gather_s": 0.1, "probe": [1, 2], "expected": [3],
        }  # fmt: skip

    def news(self) -> Any:
        peer = {
            "id": self.rng.choice(("p0", "p1", "p2")), "role": self.rng.choice(("trainer", "engine")), "host": "node-0",
            "place": {"pod": "gen0", "nic_gbps": 100.0}, "transports": {"tcp": "127.0.0.1:7300"}, "engines": [],
            "share": {"tp": 2, "tp_ranks": [0, 1]}, "folder": "/tmp/w",
            "held": [{"version": 1, "shards": ["s0"], "missing": {"s0": [[0, 4096]]}}],
        }  # fmt: skip
        if peer["role"] == "engine":
            peer["engines"] = [{"engine": f"e{self.rng.randrange(4)}", "url": "http://127.0.0.1:8000", "installed": 1}]
        others = (
            {"id": "w1-1", "outcome": "done", "tokens": [1, 2]},
            {"version": 1, "edge": "a1", "state": "done", "is_receiver": True, "bytes": 4096, "began_s": 1.0,
             "ended_s": 2.0},
            {"version": 1, "received_bytes": 4096},
        )  # fmt: skip
        return self.rng.choice((peer, peer, *others))

    def number(self, name: str) -> float:
        if "unix" in name:
            return time.time() + self.rng.uniform(-2, 2)
        if name == "kv_usage_fraction":
            return self.rng.random()
        if name in ("ttl_s", "lease_s", "deadline_s", "within_s"):
            return self.rng.choice((0.0, 0.2, 2.0))
        return self.rng.choice((0.0, 0.5, 20.0))

    def whole(self, name: str) -> int:
        if name == "sequence":
            return next(self.numbers)
        if "capacity" in name:
            return 100_000
        if "tokens" in name:
            return self.rng.randrange(1, 5000)
        if "port" in name:
            return self.rng.randrange(1, 9)
        return self.rng.randrange(0, 5)

    def learn(self, message: Any) -> None:
        """Store ids assigned by the daemon: of leases, plans, syncs, operations, switches."""
        for each, value in message.ListFields():
            if each.type == each.TYPE_MESSAGE:
                for item in list(value)[:4] if each.is_repeated else [value]:
                    self.learn(item)
            elif each.name in ("lease_id", "plan_id", "sync_id", "switch_id") and 0 < len(value) < 200:
                self.learnt.setdefault(each.name, collections.deque(maxlen=8)).append(value)


class Messages:
    """Valid and invalid messages."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.values = Values(rng)

    def sane(self, message_class: Any, first: bool = True) -> Any:
        message = message_class()
        self._fill(message, 0, first)
        return message

    def _fill(self, message: Any, depth: int, first: bool) -> None:
        descriptor = message.DESCRIPTOR
        chosen = {self._choice(oneof, first) for oneof in descriptor.oneofs if len(oneof.fields) > 1}
        for each in descriptor.fields:
            oneof = each.containing_oneof
            if oneof is not None and len(oneof.fields) > 1 and each.name not in chosen:
                continue
            if each.is_repeated:
                for _ in range(self.rng.randrange(4)):
                    self._append(message, each, depth)
            elif each.type == each.TYPE_MESSAGE:
                if depth < 4 and (oneof is not None or self.rng.random() < 0.8):
                    getattr(message, each.name).SetInParent()
                    self._fill(getattr(message, each.name), depth + 1, first)
            elif not (each.has_presence and oneof is not None and len(oneof.fields) == 1 and self.rng.random() < 0.3):
                setattr(message, each.name, self._value(message, each))

    def _choice(self, oneof: Any, first: bool) -> str:
        names = [each.name for each in oneof.fields]
        return "hello" if first and "hello" in names else self.rng.choice(names)

    def _append(self, message: Any, each: Any, depth: int) -> None:
        if each.type == each.TYPE_MESSAGE:
            self._fill(getattr(message, each.name).add(), depth + 1, False)
        else:
            getattr(message, each.name).append(self._value(message, each))

    def _value(self, message: Any, each: Any) -> Any:
        if each.type == each.TYPE_STRING:
            return self.values.text(message.DESCRIPTOR.full_name, each.name)
        if each.type == each.TYPE_ENUM:
            return self.rng.choice([value.number for value in each.enum_type.values if value.number] or [0])
        if each.type == each.TYPE_BOOL:
            return self.rng.random() < 0.5
        if each.type == each.TYPE_BYTES:
            return b"bytes"
        if each.type in (each.TYPE_DOUBLE, each.TYPE_FLOAT):
            return self.values.number(each.name)
        return self.values.whole(each.name)

    def spoil(self, message: Any) -> None:
        """Change one to three fields at any depth."""
        for _ in range(self.rng.randrange(1, 4)):
            slots = list(_slots(message))
            if slots:
                self._spoil(*self.rng.choice(slots))

    def _spoil(self, message: Any, each: Any) -> None:
        rng = self.rng
        if each.is_repeated:
            items = getattr(message, each.name)
            if rng.random() < 0.2:
                return message.ClearField(each.name)
            if not items:
                self._append(message, each, 3)
            if rng.random() < 0.5:
                items.extend(list(items)[:1] * MANY)
            elif each.type == each.TYPE_MESSAGE:
                self.spoil(rng.choice(items))
            else:
                items[rng.randrange(len(items))] = self._evil(each, "")
            return None
        if rng.random() < 0.1 or each.type == each.TYPE_MESSAGE:
            return message.ClearField(each.name)
        setattr(message, each.name, self._evil(each, getattr(message, each.name)))
        return None

    def _evil(self, each: Any, now: Any) -> Any:
        rng = self.rng
        if each.type == each.TYPE_STRING:
            if each.name.endswith("_json") and now and rng.random() < 0.8:
                return self._spoilt_json(now)
            return rng.choice(EVIL_TEXTS)
        if each.type == each.TYPE_ENUM:
            return rng.choice((0, 99, -1, 2**31 - 1))
        if each.type == each.TYPE_BOOL:
            return not now
        if each.type == each.TYPE_BYTES:
            return rng.choice((b"", b"\xff" * 100))
        if each.type in (each.TYPE_DOUBLE, each.TYPE_FLOAT):
            return rng.choice(EVIL_FLOATS)
        low, high = _INT_RANGES[each.type]
        return rng.choice([value for value in EVIL_INTS if low <= value <= high])

    def _spoilt_json(self, text: str) -> str:
        rng = self.rng
        if rng.random() < 0.1:
            return rng.choice((text[: len(text) // 2], "[" * 100_000, "{", "nul", text + text, "[1e999999]"))
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):  # changed before
            return rng.choice(EVIL_TEXTS)
        for _ in range(rng.randrange(1, 3)):
            places = list(_places(document))
            if places:
                holder, key = rng.choice(places)
                holder[key] = copy.deepcopy(rng.choice(EVIL_JSON))
        return json.dumps(document)


_field = descriptor_pb2.FieldDescriptorProto
_INT_RANGES = {
    number: (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for number, bits, unsigned in (
        (_field.TYPE_UINT32, 32, True), (_field.TYPE_UINT64, 64, True), (_field.TYPE_INT32, 32, False),
        (_field.TYPE_INT64, 64, False), (_field.TYPE_SINT32, 32, False), (_field.TYPE_SINT64, 64, False),
        (_field.TYPE_FIXED32, 32, True), (_field.TYPE_FIXED64, 64, True),
    )
}  # fmt: skip


def _slots(message: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (message, field) of a tree, for the messages that are present."""
    for each in message.DESCRIPTOR.fields:
        yield message, each
        if each.type == each.TYPE_MESSAGE:
            if each.is_repeated:
                for item in list(getattr(message, each.name))[:4]:
                    yield from _slots(item)
            elif message.HasField(each.name):
                yield from _slots(getattr(message, each.name))


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    keys = document if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in list(keys):
        yield document, key
        yield from _places(document[key])


@dataclass
class Call:
    """One call, ready to be made."""

    method: Method
    raws: list[bytes]
    deadline_s: float
    what: str  # valid, changed or bytes


class Calls:
    """The calls of a seed, one after another."""

    def __init__(self, methods: list[Method], seed: int) -> None:
        self.rng = random.Random(seed)
        self.methods = methods
        self.messages = Messages(self.rng)

    def next(self) -> Call:
        rng = self.rng
        method, what = rng.choice(self.methods), rng.choices(("sane", "spoilt", "bytes"), (25, 65, 10))[0]
        count = rng.choice((0, 1, 2, 2, 3, 4)) if method.streams_in else 1
        raws = [self._raw(method, what, place, count) for place in range(count)]
        return Call(method, raws, rng.choice(CALL_S), what)

    def _raw(self, method: Method, what: str, place: int, count: int) -> bytes:
        rng = self.rng
        message = self.messages.sane(method.asks, first=place == 0 and rng.random() < 0.95)
        spoils = what == "spoilt" and (count == 1 or place == count - 1 or rng.random() < 0.3)
        if spoils:
            self.messages.spoil(message)
        raw = bytes(message.SerializeToString()).replace(SURROGATE.encode(), SURROGATE_BYTES)
        return self._no_message(raw) if what == "bytes" and place == count - 1 else raw

    def _no_message(self, raw: bytes) -> bytes:
        rng = self.rng
        match rng.randrange(4):
            case 0:
                return rng.randbytes(rng.choice((1, 3, 50, 5000)))
            case 1:
                return raw[: rng.randrange(len(raw))] if raw else b"\x0a"
            case 2:
                flipped = bytearray(raw or b"\x00")
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                return bytes(flipped)
            case _:
                return raw + b"\x0a\xff\xff\xff\xff\x0f"


class Daemon:
    """A real daemon process on a folder's journal, with its log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log.txt"
        self.config = folder / "orchestrrl.yaml"
        if not self.config.exists():
            self._write_config()
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "orchestrrl", "daemon", "-c", str(self.config)]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().decode().strip()
        assert self.address, f"the daemon did not start:\n{self.log.read_text()[-4000:]}"

    def _write_config(self) -> None:
        shutil.copy(SITE, self.folder / "site.yaml")
        options = {"ports": 64, "connectivity": "any_to_any", "reconfiguration_s": 0.005}
        costs = {"alpha_s": 0.02, "beta_s": 1e-4, "gamma_s": 4e-8, "kv_capacity_tokens": 100_000, "max_sequences": 8}
        more = {"prefill_tokens_per_s": 9000.0, "switch_s": 1.5}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.metrics_port = free.getsockname()[1]
        document = {
            "mode": "act",
            "listen": {"address": "127.0.0.1:0"},
            "metrics": {"address": f"127.0.0.1:{self.metrics_port}"},
            "journal": {"path": str(self.folder / "journal.sqlite")},
            "fast": {"interval_s": 0.2},
            "slow": {"interval_s": 1.0},
            "fleet": {
                "gpus": {"count": 8},
                "configurations": [{"id": f"tp{n}", "gpus": n, **costs, **more} for n in (1, 2)],
                "engines": [
                    {"id": f"e{n}", "url": f"http://127.0.0.1:800{n}", "configuration": "tp1", "gpus": [n]}
                    for n in (0, 1)
                ],
            },
            "ocs": [
                {"id": switch["id"], "driver": "virtual", "options": options}
                for switch in yaml.safe_load(SITE.read_text())["switches"]
            ],
            "fabric": {"site": "site.yaml", "within_s": 1.0},
            "weights": {"publish_within_s": 2.0, "patience_s": 1.0, "stall_s": 1.0},
        }
        self.config.write_text(yaml.safe_dump(document))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> int:
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STARTS_WITHIN_S)
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()

    def tracebacks(self) -> list[str]:
        """Return the last line of each traceback in the log."""
        found = []
        for part in self.log.read_text(errors="replace").split("Traceback (most recent call last)")[1:]:
            lines = itertools.dropwhile(lambda line: line.startswith(" ") or not line, part.splitlines()[1:])
            found.append(f"traceback in the log: {next(lines, '')[:200]}")
        return found


@dataclass
class Outcome:
    calls: int = 0
    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: collections.Counter[str] = field(default_factory=collections.Counter)
    examples: dict[str, str] = field(default_factory=dict)
    died_at: int | None = None  # calls made by then
    elapsed_s: float = 0.0
    daemon_cpu_s: float = 0.0
    resident_mib: float = 0.0

    def find(self, what: str, example: str = "") -> None:
        self.findings[what] += 1
        self.examples.setdefault(what, example[:400])


class Run:
    """Makes calls and judges the answers."""

    def __init__(self, daemon: Daemon, channel: grpc.aio.Channel, methods: list[Method], seed: int) -> None:
        self.daemon = daemon
        self.channel = channel
        self.calls = Calls(methods, seed)
        self.outcome = Outcome()
        self.by_path = {method.path: method for method in methods}

    async def make(self, count: int) -> None:
        outcome, began_s = self.outcome, time.monotonic()
        while outcome.calls < count and outcome.died_at is None:
            batch = [self.calls.next() for _ in range(min(SIDE_BY_SIDE, count - outcome.calls))]
            await asyncio.gather(*map(self._call, batch))
            outcome.calls += len(batch)
            if not self.daemon.alive:
                outcome.died_at = outcome.calls
            elif outcome.calls % LOOK_EVERY < SIDE_BY_SIDE:
                await self.look()
        outcome.elapsed_s = time.monotonic() - began_s
        if self.daemon.alive:
            outcome.daemon_cpu_s, outcome.resident_mib = self.daemon.cpu_s(), self.daemon.resident_mib()

    async def look(self) -> None:
        """Check that the views work after any reports."""
        for name in VIEWS:
            method = self.by_path[f"/orchestrrl.v1.{name}"]
            ask = self.channel.unary_unary(method.path, None, method.answers.FromString)
            try:
                await ask(b"", timeout=STARTS_WITHIN_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.NOT_FOUND:
                    self.outcome.find(f"view {name}: {error.code().name} {(error.details() or '')[:120]}")
        url = f"http://127.0.0.1:{yaml.safe_load(self.daemon.config.read_text())['metrics']['address'].split(':')[1]}"
        try:
            await asyncio.to_thread(_get, f"{url}/metrics")
        except OSError as error:
            self.outcome.find(f"metrics: {error}")

    async def _call(self, call: Call) -> None:
        try:
            code, details, answers = await self._answers(call)
        except Exception as error:  # noqa: BLE001 (it is a finding)
            self.outcome.find(f"{call.method.path}: {error!r}")
            return
        self.outcome.codes[code.name] += 1
        for raw in answers:
            self.calls.messages.values.learn(call.method.answers.FromString(raw))
        if (code, details) == CLIENTS_OWN:
            return
        bad = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
        if code in bad or (code is grpc.StatusCode.INVALID_ARGUMENT and not details):
            self.outcome.find(f"{call.method.path}: {code.name} {details[:100]!r}", f"{call.what} {call.raws!r}")

    async def _answers(self, call: Call) -> tuple[grpc.StatusCode, str, list[bytes]]:
        method = call.method
        kind = f"{'stream' if method.streams_in else 'unary'}_{'stream' if method.streams_out else 'unary'}"
        ask = getattr(self.channel, kind)(method.path, None, None)
        argument = _one_by_one(call.raws, call.deadline_s) if method.streams_in else call.raws[0]
        made, answers = ask(argument, timeout=call.deadline_s), []
        try:
            if method.streams_out:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(STREAM_S):
                        async for answer in made:
                            answers.append(answer)
                            if len(answers) > 20:
                                break
            else:
                answers.append(await made)
            if not made.done():
                made.cancel()
                return grpc.StatusCode.CANCELLED, "", answers
            return await made.code(), await made.details() or "", answers
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or "", answers
        except asyncio.CancelledError:
            if not made.cancelled():
                raise
            return grpc.StatusCode.CANCELLED, "", answers


# Errors of gRPC's client when it sends on a call that the server has just ended with another status.
CLIENTS_OWN = grpc.StatusCode.INTERNAL, "Internal error from Core"
VIEWS = (
    "Control/GetStatus", "Control/ListWorkers", "Control/ListRequests", "Control/GetBalance", "Control/ListPlans",
    "Control/GetPauseBarrier", "Control/ListRedeployments", "Fabric/GetFabric", "Weights/ListSyncs",
    "Weights/GetWeights",
    "Switches/ListSwitches",
)  # fmt: skip


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=STARTS_WITHIN_S) as answer:
        return bytes(answer.read())


async def _one_by_one(raws: list[bytes], lasts_s: float) -> AsyncIterator[bytes]:
    for raw in raws:
        yield raw
        await asyncio.sleep(0.002)
    await asyncio.sleep(min(lasts_s, STREAM_S) / 2)  # effects of the last message are seen before the stream ends


async def _obeying_gateway(address: str) -> None:
    """Run a gateway that obeys every order, so that operations have results."""

    async def done(operation: Operation) -> OperationResult:
        return OperationResult(operation.id, NodeId("gw"), OperationStatus.DONE)

    hello = agent_pb2.NodeHello(node_id="gw", kind=agent_pb2.NODE_KIND_GATEWAY, engine_ids=["e0", "e1"])
    await NodeLink(address, hello, done, clock=WallClock()).run()


async def fuzz(folder: Path, calls: int, seed: int) -> Outcome:
    """Make `calls` calls to a daemon in this folder, stop it, start it again on its journal and check its views."""
    daemon = Daemon(folder)
    try:
        outcome = await _fuzz(daemon, calls, seed)
        if outcome.died_at is None and (status := daemon.stop()):
            outcome.find(f"the daemon stopped with status {status}")
    finally:
        daemon.process.kill()
        daemon.stop()
    with contextlib.suppress(AssertionError) if outcome.died_at is not None else contextlib.nullcontext():
        await _look_after_restart(folder, outcome)
    for line in daemon.tracebacks():
        outcome.find(line)
    return outcome


async def _fuzz(daemon: Daemon, calls: int, seed: int) -> Outcome:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
    async with grpc.aio.insecure_channel(daemon.address, options=options) as channel:
        run = Run(daemon, channel, await reflected_methods(channel), seed)
        gateway = asyncio.create_task(_obeying_gateway(daemon.address))
        try:
            await run.make(calls)
        finally:
            gateway.cancel()
            await asyncio.gather(gateway, return_exceptions=True)
        if daemon.alive:
            await run.look()
    return run.outcome


async def _look_after_restart(folder: Path, outcome: Outcome) -> None:
    again = Daemon(folder)
    try:
        async with grpc.aio.insecure_channel(
            again.address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel:
            run = Run(again, channel, await reflected_methods(channel), 0)
            await run.look()
            for what, count in run.outcome.findings.items():
                outcome.findings[f"after a restart: {what}"] += count
    finally:
        again.stop()


def report(outcome: Outcome) -> str:
    lines = [
        f"{outcome.calls} calls in {outcome.elapsed_s:.0f} s; daemon: {outcome.daemon_cpu_s:.0f} s of CPU,"
        f" {outcome.resident_mib:.0f} MiB",
        f"codes: {dict(outcome.codes.most_common())}",
    ]
    if outcome.died_at is not None:
        lines.append(f"THE DAEMON DIED within {outcome.died_at} calls")
    for what, count in outcome.findings.most_common():
        lines.append(f"{count} x {what}")
        if outcome.examples.get(what):
            lines.append(f"      e.g. {outcome.examples[what]}")
    return "\n".join([*lines, "no findings"] if not outcome.findings and outcome.died_at is None else lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a daemon through gRPC reflection.")
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the daemon's journal and log; by default a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = asyncio.run(fuzz(folder, arguments.calls, arguments.seed))
    print(f"seed {arguments.seed}: {report(outcome)}")
    return 1 if outcome.findings or outcome.died_at is not None else 0


if __name__ == "__main__":
    sys.exit(main())
