"""Choose where in a Ray cluster an engine's processes run. `ray_cluster.py` calls this module.

A part describes the GPUs that one process needs on one node: `{"process", "node": the fleet's number, "local": [GPUs as
numbered on the node], "units": the number of GPUs}`. A seat describes a bundle that one actor of a process uses:
`{"process", "seat", "node": Ray's id, "address", "group", "bundle", "units"}`. A process runs in its first seat; its
other seats only hold resources.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import ray
from ray.util import placement_group, placement_group_table

POLL_S = 0.1
SETTLE_S = 2.0  # Ray's view of free resources may lag by this
NODE_SHARE = 0.001  # requested of a node's own resource, to tie a bundle to it
Json = dict[str, Any]


class RayRefusal(Exception):
    """Raised if a call is refused or fails. `kind` is retryable, permanent or unknown, and determines which error of
    orchestrrl.core.errors the caller raises."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EnginePlaces:
    """Assigns the parts of an engine to bundles. RayDeployer provides `settings`."""

    def __init__(self, settings: Json) -> None:
        self._settings = settings

    def resources(self, units: int) -> dict[str, float]:
        return {name: amount * units for name, amount in self._settings["per_gpu"].items()}

    def own(self, name: str, parts: Sequence[Json], is_over: Callable[[], bool]) -> list[Json]:
        """Create a placement group with one bundle for each part, on the part's node, and return the seats. Raises
        RayRefusal if a node has too few free resources, or if `is_over` returns True before the group is created."""
        nodes = [self._node(part["node"]) for part in parts]
        bundles = [
            {**self.resources(part["units"]), f"node:{node['NodeManagerAddress']}": NODE_SHARE}
            for part, node in zip(parts, nodes, strict=True)
        ]
        distinct = len({node["NodeID"] for node in nodes})
        strategy = "STRICT_PACK" if distinct == 1 else "STRICT_SPREAD" if distinct == len(parts) else "PACK"
        began_s = time.monotonic()
        group = placement_group(bundles, strategy=strategy, name=name, lifetime="detached")
        while (state := placement_group_table(group).get("state")) != "CREATED":
            missing = self._missing(parts, nodes) if time.monotonic() - began_s > SETTLE_S else []
            if missing or is_over():
                why = "; ".join(missing) or f"its placement group is {str(state).lower()}"
                raise RayRefusal("retryable", f"Ray does not have enough resources for placement group {name}: {why}")
            time.sleep(POLL_S)
        seats: list[Json] = []
        for bundle, (part, node) in enumerate(zip(parts, nodes, strict=True)):
            place = {"node": node["NodeID"], "address": node["NodeManagerAddress"]}
            _seat(seats, part["process"], **place, group=group.id.hex(), bundle=bundle, units=part["units"])
        return seats

    def _node(self, place: int) -> Json:
        """Return Ray's record of the fleet's node number `place`. If the settings list no nodes, return the only node
        with the needed resources. Raises RayRefusal if no such node exists or the choice is ambiguous."""
        alive = [node for node in ray.nodes() if node["Alive"]]
        names: list[str] = self._settings["nodes"]
        if names and place >= len(names):
            raise RayRefusal(
                "permanent",
                f"node {place} of the fleet has no address, because only these nodes are configured:"
                f" {', '.join(names)}; list all nodes in `fleet.deployer.options.nodes`",
            )
        if names:
            found = [n for n in alive if names[place] in (n["NodeManagerAddress"], n["NodeManagerHostname"])]
        else:
            found = [n for n in alive if all(n["Resources"].get(name) for name in self._settings["per_gpu"])]
        if len(found) == 1 and (names or place == 0):
            return dict(found[0])
        seen = ", ".join(sorted(node["NodeManagerAddress"] for node in alive)) or "none"
        if names:
            raise RayRefusal("retryable", f"Ray has no node {names[place]}; Ray's nodes: {seen}")
        wanted = " and ".join(self._settings["per_gpu"])
        if not found:
            raise RayRefusal("retryable", f"no Ray node offers the resources {wanted}; Ray's nodes: {seen}")
        raise RayRefusal(
            "permanent",
            f"node {place} of the fleet could be any of Ray's nodes ({seen}); set `fleet.deployer.options.nodes`",
        )

    def _missing(self, parts: Sequence[Json], nodes: Sequence[Json]) -> list[str]:
        """Return one message for each node and resource of which too little is free for the parts."""
        free = ray._private.state.available_resources_per_node()
        need: dict[str, int] = {}
        for part, node in zip(parts, nodes, strict=True):
            need[node["NodeID"]] = need.get(node["NodeID"], 0) + part["units"]
        return [
            f"{node['NodeManagerAddress']} has {has:g} of its {node['Resources'].get(name, 0):g} {name} free, "
            f"{amount:g} needed"
            for node in {node["NodeID"]: node for node in nodes}.values()
            for name, amount in self.resources(need[node["NodeID"]]).items()
            if (has := free.get(node["NodeID"], {}).get(name, 0.0)) < amount
        ]

    def offered(self, parts: Sequence[Json]) -> list[Json]:
        """Return the seats of the parts, in bundles that the RL job has reserved for engines. Each GPU of the fleet
        corresponds to one slot of a bundle on the GPU's node. The slots of a node are numbered in the order of groups
        and bundles. Raises RayRefusal if a node has too few slots."""
        offer = self._offer()
        seats: list[Json] = []
        for part in parts:
            node_id, address, slots = self._offered_node(offer, part["node"])
            beyond = [gpu for gpu in part["local"] if gpu >= len(slots)]
            if beyond:
                name = ", ".join(self._settings["placement_groups"])
                raise RayRefusal(
                    "retryable",
                    f"placement groups {name} offer {len(slots)} GPUs on {address}, too few for GPUs {beyond} of node"
                    f" {part['node']}",
                )
            units: dict[tuple[str, int], int] = {}
            for gpu in part["local"]:
                units[slots[gpu]] = units.get(slots[gpu], 0) + 1
            place = {"node": node_id, "address": address}
            for (group, bundle), count in units.items():
                _seat(seats, part["process"], **place, group=group, bundle=bundle, units=count)
        return seats

    def _offer(self) -> dict[str, list[tuple[str, int]]]:
        """Return the slots of each node with reserved bundles, by the node's id in Ray. A slot is a (group, bundle)
        pair, and each GPU of a bundle is one slot."""
        patterns = self._settings["placement_groups"]
        tables = [
            table
            for table in placement_group_table().values()
            if table["state"] == "CREATED" and any(fnmatchcase(table["name"], pattern) for pattern in patterns)
        ]
        if not tables:
            raise RayRefusal("retryable", f"no placement group that matches {' or '.join(patterns)} is ready")
        offer: dict[str, list[tuple[str, int]]] = {}
        for table in sorted(tables, key=lambda table: (len(table["name"]), table["name"], table["placement_group_id"])):
            for bundle, resources in sorted(table["bundles"].items()):
                count = min(int(resources.get(name, 0) // each) for name, each in self._settings["per_gpu"].items())
                slots = offer.setdefault(table["bundles_to_node_id"][bundle], [])
                slots += [(table["placement_group_id"], bundle)] * count
        return {node: slots for node, slots in offer.items() if slots}

    def _offered_node(
        self, offer: Mapping[str, list[tuple[str, int]]], place: int
    ) -> tuple[str, str, list[tuple[str, int]]]:
        """Return the id, address and slots of the fleet's node number `place`. If the settings list no nodes, nodes are
        numbered in the order of `offer`."""
        if self._settings["nodes"]:
            node = self._node(place)
            return node["NodeID"], node["NodeManagerAddress"], offer.get(node["NodeID"], [])
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        if place >= len(offer):
            has = ", ".join(addresses.get(node, node) for node in offer) or "none"
            raise RayRefusal("retryable", f"the placement groups have no GPUs on node {place}; nodes with GPUs: {has}")
        node_id = [*offer][place]
        return node_id, addresses[node_id], offer[node_id]


def _seat(seats: list[Json], process: int, **where: Any) -> None:
    seat = sum(each["process"] == process for each in seats)
    seats.append({"process": process, "seat": seat, **where})
