"""Determine which processes a layout needs, and the vLLM flags of each process, without side effects.

A layout maps to `--tensor-parallel-size`, `--pipeline-parallel-size`, `--data-parallel-size` and
`--enable-expert-parallel`. (In vLLM, expert parallelism covers either all of an engine's TP x DP GPUs or none.) An
engine over several nodes has a process on each node. Only the first process serves the API; the flag `--headless`
disables the API in the other processes. The flags of each process follow vLLM's documentation on parallel serving and
its engine/arg_utils.py (0.32). vLLM's parser accepts all of these flags. Multi-node engines and AFD have not been
tested with real engines.

AFD requires the experimental plugin vllm-project/afd-plugin in vLLM's environment. An AFD engine has two groups of
processes. The section `afd` of `--additional-config` defines the side of each group, as described in the plugin's
README, recipes and afd_plugin/config.py for vLLM 0.30.0. The rendered connector is P2pNcclAFDConnector. The plugin
overlaps at most two micro-batches (`--enable-dbo`), and needs at least as many attention ranks as FFN ranks. vLLM 0.26
required the number of attention ranks to be a multiple of the number of FFN ranks; this condition is not checked.
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
    """Return the flags that the layout decides for this group, so that users may not change them. Each flag is mapped
    to its default in vLLM, or to None if it has no default."""
    decided = dict(DECIDED)
    if len(group.parts) == 1:  # on one node Ray may place the replicas; elastic EP needs that
        del decided["--data-parallel-backend"]
    if group.afd is not None:
        decided["--enable-dbo"] = UNSET
    return decided


class ProcessRole(StrEnum):
    """The role of one process of an engine."""

    SERVER = "server"  # serves requests
    NODE = "node"  # part of the engine on a further node
    FFN = "ffn"
    FFN_NODE = "ffn node"


class NodeProcesses(NamedTuple):
    """The GPUs of a process group on one node."""

    node: int
    gpus: tuple[GpuId, ...]


class VllmProcesses(NamedTuple):
    """The processes that make up one vLLM instance: a whole engine, or one side of an AFD engine."""

    parallelism: Parallelism
    parts: tuple[NodeProcesses, ...]
    roles: tuple[ProcessRole, ProcessRole]  # of the first process, and of the others
    port: int  # the first of four
    afd: Mapping[str, object] | None = None


def groups(
    p: Parallelism, gpus: Sequence[GpuId], per_node: int, nodes: Sequence[str], first_port: int
) -> tuple[VllmProcesses, ...]:
    """Return the vLLM instances of a layout. The first instance serves requests. If `gpus` is empty, return one
    instance that is not bound to GPUs."""
    gpus, whole = sorted(gpus), (ProcessRole.SERVER, ProcessRole.NODE)

    def port_of(held: Sequence[GpuId]) -> int:
        """Return the first port of the lowest of these GPUs. A GPU belongs to one engine, so its ports also belong to
        only that engine."""
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
    """Return the GPUs grouped by node. Nodes, and the GPUs of each node, are in ascending order."""
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
    """Return the parallelism flags of the process with index `place` in a group. `nodes` contains the addresses of all
    nodes."""
    p, parts, flags = group.parallelism, group.parts, size_flags(group.parallelism)
    if group.afd is not None:
        flags["--enable-expert-parallel"] = SET
    if place == 0 and p.dp > 1:
        # By default each replica has a server behind the port, and a call that aborts or stops requests by id reaches
        # only one of them.
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
    """Return three values: the user's `--additional-config` with the AFD plugin's settings merged into it, the user's
    other arguments, and the faults."""
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
            faults.append(f"{argument.path}: must be one JSON object for an AFD layout, got {argument.text!r}")
        elif "afd" in found:
            faults.append(f"{argument.path}: must not set `afd`, which the layout sets, got {argument.text!r}")
        else:
            merged = found
    return json.dumps({**merged, "afd": afd}), others, faults


# --- simulated engines

SIMULATED_PROGRAM = ("-m", "orchestrrl", "engine", "simulated")

# The engine's default context limit in tokens. Its KV cache must hold one such context, in blocks.
CONTEXT_TOKENS = 32_768
BLOCK_TOKENS = 16

# The flags that a layout may decide, with the engine's defaults.
_SIZES = "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--enable-expert-parallel"
SIMULATED_DECIDED = {flag: DECIDED[flag] for flag in ("--host", "--port", *_SIZES)}


def simulated_costs(configuration: Configuration, p: Parallelism) -> dict[str, str]:
    """Return flags that give a simulated engine the step times of the planner's cost model. Each replica serves an
    equal share of the sequences."""
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
