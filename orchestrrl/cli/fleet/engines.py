"""`orchestrrl engines`: which engines there are, and engines that come and go while the daemon runs."""

import time
from typing import Annotated, Any

import typer
from rich.markup import escape

from orchestrrl.cli.command import Reason, answer, daemon_command, url_faults
from orchestrrl.cli.fleet.status import fetch_status, remarks
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.cli.output import Columns, Output, View, note, raise_faults, table
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable

POLL_EVERY_S = 0.25
# Gateways report several times in this, so a request that was on its way when the drain was told has shown itself.
EMPTY_FOR_S = 2.0
# By then a daemon that was started anew has its gateways again, and knows what they have.
KNOWN_AFTER_S = 5.0
REMOVE_TIMEOUT_S = 600.0  # moves wait for their destinations' first tokens

EngineArgument = Annotated[str, typer.Argument(help="The engine's id.", metavar="ID")]


@daemon_command
async def engines_list(client: ControlClient) -> Output:
    """List the engines: which take requests, which are drained, who judges their health.

    Example: `orchestrrl engines list`
    """
    found = await _workers(client)
    return Output({"engines": found}, _view(found))


def _view(workers: list[dict[str, Any]]) -> View:
    yield table("Engines", COLUMNS, workers)
    yield from _remarks(workers)


@daemon_command
async def add(
    client: ControlClient,
    engine: EngineArgument,
    url: Annotated[str, typer.Option(help="Where it listens.", metavar="URL")] = "",
    configuration: Annotated[str, typer.Option(help="One that the daemon knows.", metavar="C")] = "",
    gpus: Annotated[str, typer.Option(help="Its GPUs, as in `0,1` or `0-7`.", metavar="LIST")] = "",
    pool: Annotated[str, typer.Option(help="Engines of a kind, which tags may prefer.", metavar="P")] = "",
    reason: Reason = "",
) -> Output:
    """Have every gateway send requests to one more engine, until it is removed.

    It stays over restarts and reloads of the daemon. Start its agent afterwards, under the same id: without one it gets
    requests, but no decision is taken for it. One that was removed and that the daemon's configuration names comes back
    by its id alone, as it stands there.

    Example: `orchestrrl engines add e2 --url http://127.0.0.1:8003 --configuration tp2 --gpus 4,5`
    """
    order = control_pb2.AddEngineRequest(
        engine_id=engine,
        url=url,
        configuration=configuration,
        gpus=_checked(engine, url, gpus),
        pool=pool,
        reason=reason,
    )
    worker = await answer(client, client.control.AddEngine, order)
    return Output(worker, [escape(f"{engine} is added: gateways send it requests"), *_remarks([worker])])


@daemon_command
async def drain(
    client: ControlClient,
    engine: EngineArgument,
    move: Annotated[bool, typer.Option("--move", help="Have what is there continued elsewhere.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until nothing is there.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.0, help="Of the wait, in seconds; 0: without end.")] = 0.0,
    reason: Reason = "",
) -> Output:
    """Send an engine nothing new. What is there finishes or, with --move, goes on elsewhere as far as it can.

    It stays drained over restarts of the daemon, until --undo.

    Example: `orchestrrl engines drain e1 --move --wait`
    """
    given = {"--move": move, "--wait": wait}
    raise_faults(f"{flag}: cannot go with --undo" for flag, on in given.items() if on and undo)
    order = control_pb2.DrainEngineRequest(engine_id=engine, move_requests=move, undo=undo, reason=reason)
    worker = await answer(client, client.control.DrainEngine, order)
    if undo:
        return Output(worker, [escape(f"{engine} takes requests again")])
    if not any(map(_accepts_requests, await _workers(client))):
        note("no engine takes requests now: new ones wait at their gateway, and then fail")
    if not wait:
        return Output(worker, [escape(f"{engine} gets nothing new; {_there(worker)}")])
    worker = await _until_empty(client, worker, timeout_s)
    return Output(worker, [escape(f"{engine} is drained: nothing is there")])


@daemon_command
async def remove(
    client: ControlClient,
    engine: EngineArgument,
    force: Annotated[bool, typer.Option("--force", help="Also while requests are there.")] = False,
    reason: Reason = "",
) -> Output:
    """Forget an engine, whoever goes on to report it, until it is added again.

    Refused while requests are there. With --force those that can be continued elsewhere are, and the others finish.

    Example: `orchestrrl engines remove e1`
    """
    order = control_pb2.RemoveEngineRequest(engine_id=engine, force=force, reason=reason)
    removed = await answer(client, client.control.RemoveEngine, order, timeout_s=REMOVE_TIMEOUT_S)
    moved, left = removed["requests_moved"], removed["requests_left"]
    rest = f"; requests that go on elsewhere: {moved}, that finish there: {left}" if moved or left else ""
    return Output(removed, [escape(f"{engine} is removed{rest}")])


# --- inside


def _checked(engine: str, url: str, gpus: str) -> tuple[int, ...]:
    """The GPUs. Raises ProblemFaults with all that is malformed."""
    faults = [] if engine.strip() else [f"ID: must not be empty, got {engine!r}"]
    faults += url_faults("--url", url) if url else []
    numbers: tuple[int, ...] = ()
    if gpus:
        from orchestrrl.fabric.site_parts import numbers_in  # here, as no other order needs it

        try:
            numbers = numbers_in(gpus)
        except ValueError as error:
            faults.append(f"--gpus: {error}, got {gpus!r}")
    raise_faults(faults)
    return numbers


async def _workers(client: ControlClient) -> list[dict[str, Any]]:
    listed = await answer(client, client.control.ListWorkers, control_pb2.ListWorkersRequest())
    workers: list[dict[str, Any]] = listed["workers"]
    return workers


async def _until_empty(client: ControlClient, worker: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The engine once nothing is there by the word of gateways, or it is not known any more."""
    import asyncio

    engine = worker["engine_id"]
    began_s = time.monotonic()
    empty_since_s: float | None = None
    words, told = _there(worker), ""
    while True:
        if words != told:
            note(escape(f"{engine}: {words}"))
            told = words
        await asyncio.sleep(POLL_EVERY_S)
        now_s, empty = time.monotonic(), False
        try:
            status = await fetch_status(client)
        except (Retryable, OutcomeUnknown):  # the drain outlives the daemon, and so does the wait
            words = "the daemon is away"
        else:
            seen = next((other for other in status["workers"] if other["engine_id"] == engine), None)
            if seen is None:
                return worker
            worker = seen
            if not worker["draining"]:
                raise Permanent(f"{engine} takes requests again: somebody has undone the drain, or added it anew")
            attached = any(node["kind"] == "gateway" and node["attached"] for node in status["nodes"])
            known = attached and status["uptime_s"] >= KNOWN_AFTER_S
            empty = _count(worker) == 0 and known
            words = _there(worker) if known or _count(worker) else "no gateway has told yet what is there"
        empty_since_s = (empty_since_s or now_s) if empty else None
        if empty_since_s is not None and now_s - empty_since_s >= EMPTY_FOR_S:
            return worker
        if timeout_s and now_s - began_s >= timeout_s:
            raise Permanent(f"{engine} is not known to be empty after {timeout_s:g} s, and stays drained; {words}")


def _count(worker: dict[str, Any]) -> int:
    """Requests there, by the gateways' word and, while it can be read, by the engine's own."""
    own = worker["running"] + worker["waiting"] if worker["health"] == "ok" else 0
    return int(max(worker["requests"], own))


def _there(worker: dict[str, Any]) -> str:
    count = _count(worker)
    return "1 request is there" if count == 1 else f"{count} requests are there"


def _accepts_requests(worker: dict[str, Any]) -> bool:
    return not worker["draining"] and (worker["health"] == "ok" or not worker["reported"])


def state(worker: dict[str, Any]) -> str:
    """serving | draining | drained"""
    if not worker["draining"]:
        return "serving"
    return "draining" if worker["requests"] else "drained"


def _remarks(workers: list[dict[str, Any]]) -> list[str]:
    told = list(map(escape, remarks(workers)))
    if alone := ", ".join(worker["engine_id"] for worker in workers if not worker["reported"]):
        reason = "only the gateways know whether it is well, and nothing is balanced for it"
        told.append(escape(f"no agent reports {alone}: {reason}"))
    return told


COLUMNS: Columns = {
    "engine": "engine_id",
    "state": state,
    "health": lambda worker: worker["health"] if worker["reported"] else "no agent",
    "requests": "requests",
    "run": lambda worker: worker["running"] if worker["reported"] else None,
    "wait": lambda worker: worker["waiting"] if worker["reported"] else None,
    "pool": "pool",
    "weights": "policy_version",
    "runs as": "configuration",
    "url": "url",
}
