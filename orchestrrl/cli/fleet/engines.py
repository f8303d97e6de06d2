"""`orchestrrl engines`: list, add, drain and remove engines while the daemon runs."""

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
# Gateways report several times within this, so a request in flight when the drain began has been reported.
EMPTY_FOR_S = 2.0
# Uptime after which the gateways have reconnected to a restarted daemon and reported their requests.
KNOWN_AFTER_S = 5.0
REMOVE_TIMEOUT_S = 600.0  # each move waits for the first token on its destination

EngineArgument = Annotated[str, typer.Argument(help="The engine's id.", metavar="ID")]


@daemon_command
async def engines_list(client: ControlClient) -> Output:
    """List the engines with their state, health, requests and weights.

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
    url: Annotated[str, typer.Option(help="The engine's URL.", metavar="URL")] = "",
    configuration: Annotated[
        str, typer.Option(help="A configuration of the daemon's file.", metavar="CONFIGURATION")
    ] = "",
    gpus: Annotated[str, typer.Option(help="The engine's GPUs, such as `0,1` or `0-7`.", metavar="LIST")] = "",
    pool: Annotated[str, typer.Option(help="The pool, which requests can prefer by tag.", metavar="POOL")] = "",
    reason: Reason = "",
) -> Output:
    """Add an engine, so that every gateway sends requests to it until it is removed.

    The engine remains added when the daemon restarts or reloads its configuration. Start the engine's agent afterwards,
    with the same id. Without an agent, the engine receives requests but is not balanced. To restore a removed engine of
    the daemon's configuration, give only its id.

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
    return Output(worker, [escape(f"{engine} added: gateways send requests to it"), *_remarks([worker])])


@daemon_command
async def drain(
    client: ControlClient,
    engine: EngineArgument,
    move: Annotated[bool, typer.Option("--move", help="Move its requests to other engines.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="End the drain; the engine accepts requests again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the engine has no requests.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.0, help="Timeout of --wait in seconds. 0: none.")] = 0.0,
    reason: Reason = "",
) -> Output:
    """Drain an engine, so that it receives no new requests. Its requests finish on the engine or, with --move, on other
    engines.

    The engine remains drained when the daemon restarts, until `--undo` ends the drain. Requests that cannot move finish
    on the engine.

    Example: `orchestrrl engines drain e1 --move --wait`
    """
    given = {"--move": move, "--wait": wait}
    raise_faults(f"{flag}: cannot go with --undo" for flag, on in given.items() if on and undo)
    order = control_pb2.DrainEngineRequest(engine_id=engine, move_requests=move, undo=undo, reason=reason)
    worker = await answer(client, client.control.DrainEngine, order)
    if undo:
        return Output(worker, [escape(f"{engine} accepts requests again")])
    if not any(map(_accepts_requests, await _workers(client))):
        note("no engine accepts requests now: new requests wait at their gateway until they time out")
    if not wait:
        return Output(worker, [escape(f"{engine} is draining: {_there(worker)}")])
    worker = await _until_empty(client, worker, timeout_s)
    return Output(worker, [escape(f"{engine} is drained: no requests")])


@daemon_command
async def remove(
    client: ControlClient,
    engine: EngineArgument,
    force: Annotated[bool, typer.Option("--force", help="Remove it even if it has requests.")] = False,
    reason: Reason = "",
) -> Output:
    """Remove an engine. Reports about it are ignored until it is added again.

    The command fails if the engine has requests. With --force, requests that can move continue on other engines; the
    other requests finish on the engine.

    Example: `orchestrrl engines remove e1`
    """
    order = control_pb2.RemoveEngineRequest(engine_id=engine, force=force, reason=reason)
    removed = await answer(client, client.control.RemoveEngine, order, timeout_s=REMOVE_TIMEOUT_S)
    moved, left = removed["requests_moved"], removed["requests_left"]
    rest = f"; requests moved to other engines: {moved}, finishing on it: {left}" if moved or left else ""
    return Output(removed, [escape(f"{engine} removed{rest}")])


# --- helpers


def _checked(engine: str, url: str, gpus: str) -> tuple[int, ...]:
    """Return the GPU numbers that `gpus` lists. Raises ProblemFaults if an argument is malformed, with an error for
    each malformed argument."""
    faults = [] if engine.strip() else [f"ID: must not be empty, got {engine!r}"]
    faults += url_faults("--url", url) if url else []
    numbers: tuple[int, ...] = ()
    if gpus:
        from orchestrrl.fabric.site_parts import numbers_in  # imported here: only this command needs it

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
    """Wait until the gateways report no requests on the engine, or the engine is removed. Return the engine's last
    state. Raises Permanent if the drain is undone or `timeout_s` seconds pass; 0 means no timeout."""
    import asyncio

    engine = worker["engine_id"]
    began_s = time.monotonic()
    empty_since_s: float | None = None
    words, printed = _there(worker), ""
    while True:
        if words != printed:
            note(escape(f"{engine}: {words}"))
            printed = words
        await asyncio.sleep(POLL_EVERY_S)
        now_s, empty = time.monotonic(), False
        try:
            status = await fetch_status(client)
        except (Retryable, OutcomeUnknown):  # the drain survives a restart of the daemon, so keep waiting
            words = "the daemon is unreachable"
        else:
            seen = next((other for other in status["workers"] if other["engine_id"] == engine), None)
            if seen is None:
                return worker
            worker = seen
            if not worker["draining"]:
                raise Permanent(f"engine {engine} is no longer draining: its drain was undone, or it was added again")
            attached = any(node["kind"] == "gateway" and node["attached"] for node in status["nodes"])
            known = attached and status["uptime_s"] >= KNOWN_AFTER_S
            empty = _count(worker) == 0 and known
            words = _there(worker) if known or _count(worker) else "no gateway has reported its requests yet"
        empty_since_s = (empty_since_s or now_s) if empty else None
        if empty_since_s is not None and now_s - empty_since_s >= EMPTY_FOR_S:
            return worker
        if timeout_s and now_s - began_s >= timeout_s:
            raise Permanent(f"engine {engine} is not empty after {timeout_s:g} s and is still draining: {words}")


def _count(worker: dict[str, Any]) -> int:
    """Return the number of requests on the engine as reported by the gateways. If the engine is healthy and itself
    reports a larger number, return that number."""
    own = worker["running"] + worker["waiting"] if worker["health"] == "ok" else 0
    return int(max(worker["requests"], own))


def _there(worker: dict[str, Any]) -> str:
    count = _count(worker)
    return "1 request" if count == 1 else f"{count} requests"


def _accepts_requests(worker: dict[str, Any]) -> bool:
    return not worker["draining"] and (worker["health"] == "ok" or not worker["reported"])


def state(worker: dict[str, Any]) -> str:
    """Return the state of an engine: `serving`, `draining` or `drained`."""
    if not worker["draining"]:
        return "serving"
    return "draining" if worker["requests"] else "drained"


def _remarks(workers: list[dict[str, Any]]) -> list[str]:
    lines = list(map(escape, remarks(workers)))
    if alone := ", ".join(worker["engine_id"] for worker in workers if not worker["reported"]):
        reason = "its health is judged by gateways only, and it is not balanced"
        lines.append(escape(f"no agent reports {alone}: {reason}"))
    return lines


COLUMNS: Columns = {
    "engine": "engine_id",
    "state": state,
    "health": lambda worker: worker["health"] if worker["reported"] else "no agent",
    "requests": "requests",
    "run": lambda worker: worker["running"] if worker["reported"] else None,
    "wait": lambda worker: worker["waiting"] if worker["reported"] else None,
    "pool": "pool",
    "weights": "policy_version",
    "configuration": "configuration",
    "url": "url",
}
