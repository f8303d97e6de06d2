"""Start, inspect and stop the engines of one fleet in a Ray cluster. The module runs in the process of a RayDriver.

Each engine has a record in the cluster's key-value store. The record is written first and deleted last, so that every
interrupted start is detected. Each engine has its own placement group, unless the RL job has reserved bundles for
engines (`ray_places.py`). An engine's detached actors are named `ENGINE#PROCESS.SEAT` and are in the fleet's namespace.

The process needs only Ray, the standard library and the modules that this module imports. `ray.py` starts the process
and calls it. Each line of standard input is a call, `{"id", "call", ...}`: `call` names a method of RayCluster, and the
other fields are its arguments. Each line of standard output is the response to a call, `{"id", "value"}` or
`{"id", "error": {"kind", "message"}}`. Responses are in order of completion. The first call is `open`, which creates
the RayCluster from the field `settings`. The process exits when its standard input is closed.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util import list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrrl.fleet.deployers import machine, ray_keeper
from orchestrrl.fleet.deployers.ray_places import POLL_S, EnginePlaces, Json, RayRefusal

STORE = b"orchestrrl"
CUT_SHORT = "its start was interrupted"
AT_ONCE = 32  # concurrent calls
log = logging.getLogger("orchestrrl.ray")


class RayCluster:
    """The engines of one fleet in a Ray cluster. RayDeployer provides `settings`."""

    def __init__(self, settings: Json) -> None:
        self._settings = settings
        self._namespace: str = settings["namespace"]
        self._prefix = quote(self._namespace, safe="") + "/"
        self._places = EnginePlaces(settings)
        # Sent to workers by value: they may not have these modules.
        ray.cloudpickle.register_pickle_by_value(machine)
        ray.cloudpickle.register_pickle_by_value(ray_keeper)
        self._supervisor = Path(ray_keeper.__file__).with_name("ray_supervisor.py").read_text()
        self._claiming = threading.Lock()
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._unwanted: Counter[str] = Counter()  # stops that wait until a start is abandoned

    def open(self) -> Json:
        address = self._settings["address"]
        try:
            ray.init(address=address, namespace=self._namespace, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise RayRefusal("retryable", f"cannot connect to a Ray cluster at {address}: {error}") from error
        return {"version": ray.__version__}

    # Start, in two calls: the command lines can only be rendered once the place is known.

    def claim(self, engine: str, spec: Json, gpus: list[int], parts: list[Json], host: str, ports: list[Json]) -> Json:
        """Claim the GPUs for an engine, reserve bundles and actors for its parts, and reserve the first free port of
        `ports` on `host` for its first process. Return `{"places": [...]}` with the place of each process, or
        `{"found": state}` if the engine exists already. If an earlier start with the same spec was interrupted, its
        remains are removed and the engine is claimed again."""
        with self._turns[engine]:
            with self._claiming:
                records = self._records()
                if engine in records:
                    found = self._states({engine: records[engine]})[0]
                    if found["detail"] != CUT_SHORT or records[engine]["spec"] != spec:
                        return {"found": found}
                    self._remove(engine)
                    del records[engine]
                owner = {gpu: other for other, record in records.items() for gpu in record["gpus"]}
                if taken := [f"{gpu} by {owner[gpu]}" for gpu in gpus if gpu in owner]:
                    why = f"engine {engine} needs GPUs that are in use: {', '.join(taken)}"
                    raise RayRefusal("permanent", why)
                record: Json = {"spec": spec, "gpus": gpus, "seats": [], "url": ""}
                if self._settings["placement_groups"]:
                    record["seats"] = self._places.offered(parts)
                self._write(engine, record)
            deadline_s = time.monotonic() + self._settings["start_within_s"]

            def is_over() -> bool:
                return engine in self._unwanted or time.monotonic() > deadline_s

            try:
                if not self._settings["placement_groups"]:
                    record["seats"] = self._places.own(self._prefix + engine, parts, is_over)
                    self._write(engine, record)
                self._refuse_unreachable(engine, record["seats"][0]["address"], host)
                return {"places": self._seated(engine, record["seats"], host, ports, is_over)}
            except BaseException:
                self._clear(engine)
                raise

    def launch(self, engine: str, url: str, lines: list[Json]) -> Json:
        """Run one command line for each process of the engine, and return the engine's state. Each element of `lines`
        is `{"argv", "environment", "gpus"}`."""
        with self._turns[engine]:
            record = self._records().get(engine)
            if record is None:
                raise RayRefusal("retryable", f"engine {engine} was stopped before it was ready")
            # Written first: a record without a URL has no processes.
            record["url"] = url
            self._write(engine, record)
            calls = []
            for process, line in enumerate(lines):
                environment = {**line["environment"], ray_keeper.MARK: self._prefix + engine}
                if "GPU" in self._settings["per_gpu"]:
                    environment["CUDA_VISIBLE_DEVICES"] = ",".join(line["gpus"])
                actor = ray.get_actor(_name(engine, process, 0), namespace=self._namespace)
                logged = f"{self._settings['log_folder']}/{quote(engine, safe='')}.{process}.log"
                calls.append(actor.launch.remote(self._supervisor, line["argv"], environment, logged))
            ray.get(calls, timeout=self._settings["answer_within_s"])
            return self._states({engine: record})[0]

    # Inspect.

    def list_engines(self) -> list[Json]:
        """Return the states of all engines of the fleet. This includes engines of which only a placement group or an
        actor is left."""
        records: dict[str, Json | None] = {**self._records()}
        for engine in [*self._groups(), *(name.rpartition("#")[0] for name in self._actors())]:
            records.setdefault(engine, None)
        return self._states(records)

    def state_of(self, engine: str) -> Json | None:
        return next((state for state in self.list_engines() if state["engine"] == engine), None)

    def _states(self, records: Mapping[str, Json | None]) -> list[Json]:
        """Return `{"engine", "record", "life", "detail"}` for each engine in `records`. The engines' actors are queried
        in parallel."""
        present, lost = set(self._actors()), self._lost_nodes()
        asked = {}
        for engine, record in records.items():
            for seat in record["seats"] if record is not None else ():
                name = _name(engine, seat["process"], seat["seat"])
                if name in present and seat["seat"] == 0:
                    with contextlib.suppress(ValueError):  # it ended just now
                        asked[name] = ray.get_actor(name, namespace=self._namespace).report.remote()
        limit_s = self._settings["answer_within_s"]
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
        states = []
        for engine, record in sorted(records.items()):
            life, detail = self._life(engine, record, present, asked, lost)
            states.append({"engine": engine, "record": record, "life": life, "detail": detail})
        return states

    def _life(
        self, engine: str, record: Json | None, present: set[str], asked: Mapping[str, Any], lost: Mapping[str, str]
    ) -> tuple[str, str]:
        if record is None or not record["url"]:
            return "ended", CUT_SHORT
        for seat in record["seats"]:
            name, node = _name(engine, seat["process"], seat["seat"]), seat["address"]
            if seat["node"] in lost:
                return "unknown", f"Ray has lost node {node}: {lost[seat['node']]}"
            if name not in present:
                return "ended", f"Ray has ended its actor {name} on {node}"
            if seat["seat"] == 0:
                life, detail = self._process_life(name, node, asked.get(name))
                if life != "alive":
                    return life, detail
        return "alive", ""

    def _process_life(self, name: str, node: str, asked: Any) -> tuple[str, str]:
        gone = f"Ray has ended its actor {name} on {node}"
        if asked is None:
            return "ended", gone
        try:
            report = ray.get(asked, timeout=0)
        except (GetTimeoutError, ActorUnavailableError):
            return "unknown", f"its actor {name} on {node} does not answer"
        except RayActorError as error:
            return "ended", f"{gone}: {str(error).splitlines()[0]}"
        if report["running"]:
            return "alive", ""
        if report["running"] is None:
            return "ended", CUT_SHORT
        how = "was killed" if report["status"] is None else f"exited with status {report['status']}"
        return "ended", f"process {report['pid']} on {node} {how}; the end of {report['log']}:\n{report['tail']}"

    # Stop.

    def stop(self, engine: str) -> None:
        """Stop an engine. If the engine is being started, the start is abandoned."""
        self._unwanted[engine] += 1
        try:
            with self._turns[engine]:
                self._remove(engine)
        finally:
            self._unwanted[engine] -= 1
            self._unwanted += Counter()  # drops zeros

    def _remove(self, engine: str) -> None:
        record = self._records().get(engine)
        if record is None and engine not in self._groups() and not self._named(engine):
            return
        if not self._clear(engine):
            raise RayRefusal("unknown", f"engine {engine} may still be running, because a node is not responding")

    def _clear(self, engine: str) -> bool:
        """Remove the engine's processes, actors and placement group, then its record, and return True. If any of these
        may still exist, keep the record and return False."""
        record = self._records().get(engine)
        ended = self._end(engine) if record is not None and record["url"] else set()
        for name in self._named(engine):
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name, namespace=self._namespace))
        lost = self._lost_nodes()
        seats = record["seats"] if record is not None else ()
        unsure = {s["node"] for s in seats if s["seat"] == 0 and _name(engine, s["process"], 0) not in ended}
        # A node that Ray has declared dead returns under another id, without its processes.
        if record is not None and record["url"] and not self._sweep(engine, unsure - lost.keys()):
            return False
        group = self._groups().get(engine)
        if group is not None:
            remove_placement_group(group)
        deadline_s = time.monotonic() + self._settings["answer_within_s"]
        while self._named(engine) or engine in self._groups():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        _internal_kv_del(self._key(engine), namespace=STORE)
        return True

    def _end(self, engine: str) -> set[str]:
        """Order the engine's actors to end their processes gracefully. Return the names of the actors whose processes
        have ended."""
        calls = {}
        grace_s = self._settings["grace_s"]
        for name in self._named(engine):
            with contextlib.suppress(ValueError):
                calls[name] = ray.get_actor(name, namespace=self._namespace).end.remote(grace_s)
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=grace_s + self._settings["answer_within_s"])
        ended = set()
        for name, call in calls.items():
            with contextlib.suppress(GetTimeoutError, RayActorError):
                if ray.get(call, timeout=0):
                    ended.add(name)
        return ended

    def _sweep(self, engine: str, nodes: Iterable[str]) -> bool:
        """Kill the engine's processes on these nodes, where the engine's actors could not end them. Return whether no
        process is left."""
        patience_s, limit_s = 3.0, 10.0
        swept = ray.remote(ray_keeper.swept)
        calls = [
            swept.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                self._prefix + engine, patience_s, limit_s
            )
            for node in sorted(nodes)
        ]
        try:
            return all(ray.get(calls, timeout=limit_s + self._settings["answer_within_s"])) if calls else True
        except GetTimeoutError:
            for call in calls:
                ray.cancel(call, force=True)
            return False

    def _seated(
        self, engine: str, seats: Sequence[Json], host: str, ports: list[Json], is_over: Callable[[], bool]
    ) -> list[Json]:
        """Start an actor for each seat, in the bundle of the seat. Return `{"address", "gpus": [Ray's ids], "port"}` of
        each process. The port is 0 for all processes but the first. Raises RayRefusal if `is_over` returns True before
        all actors have started, or if no port is free."""
        calls = []
        for seat in seats:
            group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(seat["group"])))
            actor = (
                ray.remote(ray_keeper.PlaceKeeper)
                .options(
                    name=_name(engine, seat["process"], seat["seat"]),
                    namespace=self._namespace,
                    lifetime="detached",
                    max_restarts=0,
                    max_concurrency=8,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, seat["bundle"]),
                    **_actor_resources(self._places.resources(seat["units"])),
                )
                .remote()
            )
            first = seat["process"] == seat["seat"] == 0
            calls.append(actor.place.remote(host, ports if first else []))
        waiting = calls
        while waiting and not is_over():
            _, waiting = ray.wait(calls, num_returns=len(calls), timeout=POLL_S)
        if waiting:
            behind = [seat for seat, call in zip(seats, calls, strict=True) if call in waiting]
            where = ", ".join(sorted({f"bundle {seat['bundle']} on {seat['address']}" for seat in behind}))
            raise RayRefusal("retryable", f"Ray started no actor for engine {engine} in {where}, which may be in use")
        places: list[Json] = []
        try:
            answers = ray.get(calls)
        except RayTaskError as error:
            raise RayRefusal("retryable", f"engine {engine} cannot be started: {error.cause}") from error
        for seat, found in zip(seats, answers, strict=True):
            if seat["seat"] == 0:
                places.append(found)
            else:
                places[-1]["gpus"] += found["gpus"]
        return places

    # Records, and the fleet's objects in Ray.

    def _refuse_unreachable(self, engine: str, address: str, host: str) -> None:
        local = host in ("localhost", "::1") or host.startswith("127.")
        if local and address not in ("127.0.0.1", "::1", ray.util.get_node_ip_address()):
            why = f"it would listen on {host} of {address}, which only {address} can reach"
            raise RayRefusal("permanent", f"engine {engine}: {why}; set fleet.launch.host to 0.0.0.0")

    def _key(self, engine: str) -> bytes:
        return (self._prefix + engine).encode()

    def _write(self, engine: str, record: Json) -> None:
        _internal_kv_put(self._key(engine), json.dumps(record).encode(), overwrite=True, namespace=STORE)

    def _records(self) -> dict[str, Json]:
        found = {}
        for key in _internal_kv_list(self._prefix.encode(), namespace=STORE):
            text = _internal_kv_get(key, namespace=STORE)
            if text is not None:
                found[key.decode().removeprefix(self._prefix)] = json.loads(text)
        return found

    def _groups(self) -> dict[str, PlacementGroup]:
        return {
            table["name"].removeprefix(self._prefix): PlacementGroup(
                ray.PlacementGroupID(bytes.fromhex(table["placement_group_id"]))
            )
            for table in placement_group_table().values()
            if table["name"].startswith(self._prefix) and table["state"] != "REMOVED"
        }

    def _actors(self) -> list[str]:
        return [name for name in list_named_actors() if "#" in name]

    def _named(self, engine: str) -> list[str]:
        return [name for name in self._actors() if name.rpartition("#")[0] == engine]

    def _lost_nodes(self) -> dict[str, str]:
        return {node["NodeID"]: node.get("DeathReasonMessage") or "dead" for node in ray.nodes() if not node["Alive"]}


def _name(engine: str, process: int, seat: int) -> str:
    return f"{engine}#{process}.{seat}"


def _actor_resources(resources: Mapping[str, float]) -> Json:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: Json = {"num_cpus": 0, "resources": {n: a for n, a in resources.items() if n not in named}}
    return options | {named[name]: amount for name, amount in resources.items() if name in named}


def main() -> None:
    # Keep Ray's own output apart from answers.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s")
    writing = threading.Lock()

    def carry_out(number: int, call: Callable[..., Any], arguments: Json) -> None:
        try:
            answer: Json = {"value": call(**arguments)}
        except RayRefusal as refusal:
            answer = {"error": {"kind": refusal.kind, "message": str(refusal)}}
        except Exception as error:
            log.exception("call %s failed", number)
            answer = {"error": {"kind": "lost", "message": f"{type(error).__name__}: {error}"}}
        with writing, contextlib.suppress(OSError):
            output.write(json.dumps({"id": number, **answer}) + "\n")
            output.flush()

    cluster: RayCluster | None = None
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in sys.stdin:
            asked = json.loads(line)
            number, name = asked.pop("id"), asked.pop("call")
            if name == "open":
                cluster = RayCluster(asked.pop("settings"))
                carry_out(number, cluster.open, asked)
            else:
                pool.submit(carry_out, number, getattr(cluster, name), asked)
        # Do not wait for calls that hang: the next driver finds what they began.
        os._exit(0)
