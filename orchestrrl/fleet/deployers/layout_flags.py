"""Which processes a layout takes, and the flags of vLLM that make each its part. Pure.

A layout says `--tensor-parallel-size`, `--pipeline-parallel-size`, `--data-parallel-size` and
`--enable-expert-parallel` (vLLM spreads experts over all of an engine's TP x DP GPUs, or over none). An engine over
several nodes is a process on each of them, all but the first without an API (`--headless`); which flags each gets is
told by vLLM's documents on parallel serving and its engine/arg_utils.py (0.32). vLLM's parser has read all of them;
engines over nodes and AFD have not been run here.

AFD is vllm-project/afd-plugin, experimental: vLLM with the plugin installed, two groups of processes, the side in
`--additional-config` under `afd` (its README, recipes and afd_plugin/config.py, for vLLM 0.30.0). Of its connectors
P2pNcclAFDConnector is rendered. The plugin takes two overlapped micro-batches and no more (`--enable-dbo`), and no
fewer attention than FFN ranks; that the ratio must be whole was so for vLLM 0.26, and is not checked.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from orchestrrl.fleet.deployers.user_arguments import DECIDED, SET, UNSET, VllmArgument
from planner.model import Configuration, GpuId, Parallelism

PORTS_PER_GPU = 4  # HTTP, data parallel, the group's own rendezvous, AFD's
AFD_CONNECTOR = "P2pNcclAFDConnector"
AFD_MICRO_BATCHES = (1, 2)
ADDITIONAL = "--additional-config"


def decided_for(group: "VllmProcesses") -> dict[str, str | None]:
    """Those of DECIDED that users may not say otherwise for this one."""
    decided = dict(DECIDED)
    if len(group.parts) == 1:  # on one node Ray may place the replicas, as elastic EP needs it
        del decided["--data-parallel-backend"]
    if group.afd is not None:
        decided["--enable-dbo"] = UNSET
    return decided


class ProcessRole(StrEnum):
    """What one process of an engine does."""

    SERVER = "server"  # it answers requests
    NODE = "node"  # part of the engine on a further node
    FFN = "ffn"
    FFN_NODE = "ffn node"


class NodeProcesses(NamedTuple):
    """What of a group lies on one node."""

    node: int
    gpus: tuple[GpuId, ...]


class VllmProcesses(NamedTuple):
    """Processes that make up one vLLM: a whole engine, or one side of it under AFD."""

    parallelism: Parallelism
    parts: tuple[NodeProcesses, ...]
    roles: tuple[ProcessRole, ProcessRole]  # of the first process, of the others
    port: int  # the first of four
    afd: Mapping[str, object] | None = None


def groups(
    p: Parallelism, gpus: Sequence[GpuId], per_node: int, nodes: Sequence[str], first_port: int
) -> tuple[VllmProcesses, ...]:
    """The vLLMs that a layout takes, the one that answers requests first. Without GPUs it is one, on no node."""
    gpus, whole = sorted(gpus), (ProcessRole.SERVER, ProcessRole.NODE)

    def port_of(held: Sequence[GpuId]) -> int:
        """No other engine has the GPU, so none has its ports."""
        return first_port + PORTS_PER_GPU * (min(held, default=0) % per_node)

    if not p.afd:
        parts = shares(gpus, per_node) or (NodeProcesses(0, ()),)
        return (VllmProcesses(p, parts, whole, port_of(gpus)),)
    attention, ffn = gpus[: p.attention_gpus], gpus[p.attention_gpus :]
    attending, serving, port = shares(attention, per_node), shares(ffn, per_node), port_of(ffn)
    head = serving[0].node
    alone = len(shares(gpus, per_node)) == 1
    afd: dict[str, object] = {
        "connector": AFD_CONNECTOR,
        "host": "127.0.0.1" if alone or head >= len(nodes) else nodes[head],
        "port": port + 3,
        "num_attention_ranks": p.attention_gpus,
        "num_ffn_ranks": p.ffn_gpus,
    }
    sides = (
        Parallelism(tp=p.tp, dp=p.attention_gpus // p.tp, ep=p.attention_gpus),
        Parallelism(dp=p.ffn_gpus, ep=p.ffn_gpus),
    )
    return (
        VllmProcesses(sides[0], attending, whole, port_of(attention), {"role": "attention", **afd}),
        VllmProcesses(sides[1], serving, (ProcessRole.FFN, ProcessRole.FFN_NODE), port, {"role": "ffn", **afd}),
    )


def shares(gpus: Sequence[GpuId], per_node: int) -> tuple[NodeProcesses, ...]:
    """The GPUs by node, both in order."""
    nodes = sorted({gpu // per_node for gpu in gpus})
    return tuple(NodeProcesses(node, tuple(sorted(gpu for gpu in gpus if gpu // per_node == node))) for node in nodes)


def size_flags(p: Parallelism) -> dict[str, str]:
    flags = {"--tensor-parallel-size": str(p.tp)}
    if p.pp > 1:
        flags["--pipeline-parallel-size"] = str(p.pp)
    if p.dp > 1:
        flags["--data-parallel-size"] = str(p.dp)
    if p.ep > 1:
        flags["--enable-expert-parallel"] = SET
    return flags


def parallel_flags(group: VllmProcesses, place: int, nodes: Sequence[str]) -> dict[str, str]:
    """How the GPUs of a group work together, for its process on one of the nodes."""
    p, parts, flags = group.parallelism, group.parts, size_flags(group.parallelism)
    if group.afd is not None:
        flags["--enable-expert-parallel"] = SET
    if place == 0 and p.dp > 1:
        # By default there are as many servers behind the port as replicas, and what ends or stops requests by name
        # reaches one of them.
        flags["--api-server-count"] = "1"
    if len(parts) == 1:
        return flags
    head, share, replica = nodes[parts[0].node], len(parts[0].gpus), p.tp * p.pp
    if p.dp > 1:
        flags |= {"--data-parallel-address": head, "--data-parallel-rpc-port": str(group.port + 1)}
    if share < replica:
        flags |= {"--nnodes": str(len(parts)), "--node-rank": str(place)}
        flags |= {"--master-addr": head, "--master-port": str(group.port + 2)}
    else:
        flags["--data-parallel-size-local"] = str(share // replica)
        if place:
            flags["--data-parallel-start-rank"] = str(place * share // replica)
    if place:
        flags["--headless"] = SET
    return flags


def additional_config(
    afd: Mapping[str, object], given: Sequence[VllmArgument]
) -> tuple[str, list[VllmArgument], list[str]]:
    """The plugin's settings inside whatever else the user has there; the user's other arguments; faults."""
    others: list[VllmArgument] = []
    faults: list[str] = []
    merged: dict[str, object] = {}
    for argument in given:
        if argument.flag != ADDITIONAL:
            others.append(argument)
            continue
        try:
            found = None if argument.dotted else json.loads(argument.value)
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            faults.append(f"{argument.path}: must be one JSON object where a layout is AFD, got {argument.text!r}")
        elif "afd" in found:
            faults.append(f"{argument.path}: contradicts {ADDITIONAL}'s `afd` of the layout, got {argument.text!r}")
        else:
            merged = found
    return json.dumps({**merged, "afd": afd}), others, faults


# --- simulated engines

SIMULATED_PROGRAM = ("-m", "orchestrrl", "engine", "simulated")

# By itself it takes contexts of so many tokens, and wants KV for one of them, in blocks.
CONTEXT_TOKENS = 32_768
BLOCK_TOKENS = 16

# What a layout may decide, with what it does where they are left out.
_SIZES = "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel"
SIMULATED_DECIDED = {flag: DECIDED[flag] for flag in ("--host", "--port", *_SIZES)}


def simulated_costs(configuration: Configuration, p: Parallelism) -> dict[str, str]:
    """So that it takes what the planner counts on. Its replicas have these each, for their share of the sequences."""
    kv_tokens = max(BLOCK_TOKENS, configuration.kv_capacity_tokens // p.dp)
    costs = {
        "--alpha-s": repr(configuration.alpha_s),
        "--beta-s": repr(configuration.beta_s * p.dp),
        "--gamma-s": repr(configuration.gamma_s * p.dp),
        "--prefill-tokens-per-s": repr(configuration.prefill_tokens_per_s / p.dp),
        "--kv-capacity-tokens": str(kv_tokens),
    }
    if kv_tokens < CONTEXT_TOKENS:
        costs["--max-model-len"] = str(kv_tokens // BLOCK_TOKENS * BLOCK_TOKENS)
    return costs
