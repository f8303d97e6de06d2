"""The command lines of an engine: from its layout, its GPUs and the user's own arguments to processes. Pure.

One place for every deployer. A layout says `--tensor-parallel-size`, `--pipeline-parallel-size`, `--data-parallel-size`
and `--enable-expert-parallel` (vLLM spreads experts over all of an engine's TP x DP GPUs, or over none). An engine over
several nodes is a process on each of them, all but the first without an API (`--headless`); which flags each gets is
told by vLLM's documents on parallel serving and its engine/arg_utils.py (0.32). vLLM's parser has read all of them;
engines over nodes and AFD have not been run here.

AFD is vllm-project/afd-plugin, experimental: vLLM with the plugin installed, two groups of processes, the side in
`--additional-config` under `afd` (its README, recipes and afd_plugin/config.py, for vLLM 0.30.0). Of its connectors
P2pNcclAFDConnector is rendered. The plugin takes two overlapped micro-batches and no more (`--enable-dbo`), and no
fewer attention than FFN ranks; that the ratio must be whole was so for vLLM 0.26, and is not checked.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from orchestrrl.deployers.user_arguments import SET, UNSET, Argument, Owned, read_arguments, replaced
from orchestrrl.engines import handover
from orchestrrl.errors import ProblemFaults, shorten
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

AFD_CONNECTOR = "P2pNcclAFDConnector"
AFD_MICRO_BATCHES = (1, 2)
PORTS_PER_GPU = 4  # HTTP, data parallel, the group's own rendezvous, AFD's
ADDITIONAL = "--additional-config"

# What a layout may decide, with what vLLM does where it is left out.
DECIDED: Mapping[str, str | None] = {
    "--model": None,
    "--host": None,
    "--port": None,
    "--uds": None,
    "--tensor-parallel-size": "1",
    "--pipeline-parallel-size": "1",
    "--prefill-context-parallel-size": "1",
    "--data-parallel-size": "1",
    "--data-parallel-size-local": None,
    "--data-parallel-start-rank": None,
    "--data-parallel-rank": None,
    "--data-parallel-address": None,
    "--data-parallel-rpc-port": None,
    "--data-parallel-backend": "mp",
    "--data-parallel-external-lb": UNSET,
    "--data-parallel-hybrid-lb": UNSET,
    "--data-parallel-multi-port-external-lb": UNSET,
    "--enable-expert-parallel": UNSET,
    "--nnodes": "1",
    "--node-rank": "0",
    "--master-addr": None,
    "--master-port": None,
    "--headless": UNSET,
    "--api-server-count": "1",
}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"  # vLLM's CPU build; a GPU's id stands for some cores


class Role(StrEnum):
    """What one process of an engine does."""

    SERVER = "server"  # it answers requests
    NODE = "node"  # part of the engine on a further node
    FFN = "ffn"
    FFN_NODE = "ffn node"


@dataclass(frozen=True, slots=True)
class Launch:
    """What engines have in common. Paths are those on the engines' machines."""

    python: str  # of vLLM's own environment
    model: str  # a name or a folder
    device: Device = Device.CUDA
    host: str = "127.0.0.1"  # that they listen on
    served_model_name: str = ""  # by default the model's
    nodes: tuple[str, ...] = ()  # addresses; node n has the GPUs from n * per_node
    per_node: int = 8
    first_port: int = 8100  # each GPU of a node has its own four from there: an engine uses those of its lowest GPU
    cores_per_gpu: int = 0  # CPU alone: GPU g stands for so many cores from g * cores_per_gpu; 0: not bound
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_directory: str = ""  # through which engines of one configuration hand over KV; empty: they do not
    where: str = "launch"  # what to call this in messages


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine to start. What is said of its configuration goes before what all have in common."""

    engine: EngineId
    configuration: ConfigurationId
    parallelism: Parallelism
    gpus: tuple[GpuId, ...]  # empty: not bound to any; then it is one process
    port: int | None = None  # for HTTP, instead of that of its lowest GPU
    max_sequences: int | None = None  # of the whole engine
    weights: str = ""  # folder of a checkpoint to begin with; empty: the model's own
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """One process: what it is started with, and on which node."""

    role: Role
    node: int
    gpus: tuple[GpuId, ...]
    environment: Mapping[str, str]
    program: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        return self.program + self.arguments

    def shell(self) -> str:
        """To be pasted into a shell: a line for each variable and each flag."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines.append(shlex.join(self.program))
        for word in self.arguments:
            if word.startswith("-"):
                lines.append("    " + shlex.quote(word))
            else:
                lines[-1] += " " + shlex.quote(word)
        return " \\\n".join(lines)


class _Part(NamedTuple):
    """What of a group lies on one node."""

    node: int
    gpus: tuple[GpuId, ...]


class _Group(NamedTuple):
    """Processes that make up one vLLM: a whole engine, or one side of it under AFD."""

    parallelism: Parallelism
    parts: tuple[_Part, ...]
    roles: tuple[Role, Role]  # of the first process, of the others
    port: int  # the first of four
    afd: Mapping[str, object] | None = None


def render(spec: EngineSpec, launch: Launch) -> tuple[CommandLine, ...]:
    """The processes of one engine, the one that answers requests first. Raises ProblemFaults with every fault."""
    misplaced = _layout_faults(spec, launch)
    given, faults = _given(spec, launch)
    faults += _environment_faults(spec, launch)
    # Arguments are checked against the layout even where it cannot be placed, so that nothing waits for a second run.
    placed = replace(spec, gpus=()) if misplaced else spec
    lines = []
    for group in () if misplaced and spec.parallelism.afd else _groups(placed, launch):
        for place in range(len(group.parts)):
            line, more = _command_line(placed, launch, group, place, given)
            lines.append(line)
            faults += more
    if misplaced or faults:
        raise ProblemFaults(list(dict.fromkeys(misplaced + faults)))
    return tuple(lines)


def url_of(spec: EngineSpec, launch: Launch) -> str:
    """Where the engine will answer requests."""
    group = _groups(spec, launch)[0]
    host, node = launch.host, group.parts[0].node
    if host in ("0.0.0.0", "::"):
        host = launch.nodes[node] if node < len(launch.nodes) else "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{_http_port(spec, group)}"


def shares(gpus: Sequence[GpuId], per_node: int) -> tuple[_Part, ...]:
    """The GPUs by node, both in order."""
    nodes = sorted({gpu // per_node for gpu in gpus})
    return tuple(_Part(node, tuple(sorted(gpu for gpu in gpus if gpu // per_node == node))) for node in nodes)


def _layout_faults(spec: EngineSpec, launch: Launch) -> list[str]:
    p, name = spec.parallelism, spec.configuration
    faults = []
    ranks = p.tp * p.dp
    if p.ep not in (1, ranks) and not p.afd:
        faults.append(f"{name}.ep: must be 1 or tp x dp ({ranks}), as vLLM spreads experts, got {p.ep}")
    if p.afd:
        if p.attention_gpus % p.tp:
            faults.append(f"{name}.attention_gpus: must be a multiple of tp ({p.tp}), got {p.attention_gpus}")
        if p.attention_gpus < p.ffn_gpus:
            faults.append(f"{name}.ffn_gpus: must be <= attention_gpus ({p.attention_gpus}), got {p.ffn_gpus}")
        if p.micro_batches not in AFD_MICRO_BATCHES:
            faults.append(f"{name}.micro_batches: afd-plugin overlaps two at most, got {p.micro_batches}")
        if p.pp > 1:
            faults.append(f"{name}.pp: must be 1 under AFD, got {p.pp}")
        if launch.device is Device.CPU:
            faults.append(f"{launch.where}.device: must be cuda for {name}, which is AFD, got 'cpu'")
    if spec.gpus and (len(set(spec.gpus)), len(spec.gpus)) != (p.gpus, p.gpus):
        faults.append(f"{spec.engine}.gpus: must be {p.gpus} different GPUs for {name}, got {shorten(list(spec.gpus))}")
    if any(gpu < 0 for gpu in spec.gpus):
        faults.append(f"{spec.engine}.gpus: must be >= 0, got {shorten(list(spec.gpus))}")
    if not spec.gpus and p.afd:
        faults.append(f"{spec.engine}.gpus: must be named for {name}, which is AFD, got none")
    return faults if faults or not spec.gpus else _placement_faults(spec, launch)


def _placement_faults(spec: EngineSpec, launch: Launch) -> list[str]:
    """Where the GPUs lie: in equal shares, so that replicas fit on nodes or nodes into replicas."""
    faults = []
    for group in _groups(spec, launch):
        sizes = {len(part.gpus) for part in group.parts}
        replica, share = group.parallelism.tp * group.parallelism.pp, min(sizes)
        if len(group.parts) > 1 and (len(sizes) > 1 or (share % replica and replica % share)):
            lie = ", ".join(f"{len(part.gpus)} on node {part.node}" for part in group.parts)
            wish = f"must lie in equal shares of whole replicas ({replica} GPUs each), or replicas be of whole nodes"
            faults.append(f"{spec.engine}.gpus: {wish}, got {lie}")
    nodes = {part.node for part in shares(spec.gpus, launch.per_node)}
    unknown = sorted(node for node in nodes if node >= len(launch.nodes))
    if len(nodes) > 1 and unknown:
        missing = ", ".join(map(str, unknown))
        faults.append(f"{launch.where}.nodes: must have the addresses of nodes {missing} too, got {list(launch.nodes)}")
    if launch.device is Device.CPU and len(nodes) > 1:
        faults.append(f"{spec.engine}.gpus: must lie on one node where device is cpu, got nodes {sorted(nodes)}")
    return faults


def _given(spec: EngineSpec, launch: Launch) -> tuple[list[Argument], list[str]]:
    common, faults = read_arguments(f"{launch.where}.arguments", launch.arguments)
    own, more = read_arguments(f"{launch.where}.configurations.{spec.configuration}.arguments", spec.arguments)
    return replaced(common, own), faults + more


def _environment_faults(spec: EngineSpec, launch: Launch) -> list[str]:
    pinned, faults = _pinned(spec.gpus, launch), []
    for path, variables in _environments(spec, launch):
        for name, value in variables.items():
            if not _VARIABLE.fullmatch(name):
                faults.append(f"{path}: must have names that a shell takes, got {name!r}")
            for ours in pinned:
                if name == ours and (spec.parallelism.afd or pinned[name] != value):
                    theirs = f"`{ours}={pinned[ours]}` of {spec.engine}'s GPUs"
                    faults.append(f"{path}.{name}: contradicts {theirs}, got {value!r}")
    return faults


def _environments(spec: EngineSpec, launch: Launch) -> tuple[tuple[str, Mapping[str, str]], ...]:
    own = f"{launch.where}.configurations.{spec.configuration}.environment"
    return (f"{launch.where}.environment", launch.environment), (own, spec.environment)


def _groups(spec: EngineSpec, launch: Launch) -> tuple[_Group, ...]:
    p, gpus = spec.parallelism, sorted(spec.gpus)
    whole = (Role.SERVER, Role.NODE)
    if not p.afd:
        parts = shares(gpus, launch.per_node) or (_Part(0, ()),)
        return (_Group(p, parts, whole, _first_port(gpus, launch)),)
    attention, ffn = gpus[: p.attention_gpus], gpus[p.attention_gpus :]
    port, parts = _first_port(ffn, launch), shares(ffn, launch.per_node)
    afd: dict[str, object] = {
        "connector": AFD_CONNECTOR,
        "host": _address(launch, parts[0].node, spec),
        "port": port + 3,
        "num_attention_ranks": p.attention_gpus,
        "num_ffn_ranks": p.ffn_gpus,
    }
    layout = Parallelism(tp=p.tp, dp=p.attention_gpus // p.tp, ep=p.attention_gpus)
    attending = shares(attention, launch.per_node)
    return (
        _Group(layout, attending, whole, _first_port(attention, launch), {"role": "attention", **afd}),
        _Group(
            Parallelism(dp=p.ffn_gpus, ep=p.ffn_gpus), parts, (Role.FFN, Role.FFN_NODE), port, {"role": "ffn", **afd}
        ),
    )


def _first_port(gpus: Sequence[GpuId], launch: Launch) -> int:
    """No other engine has the GPU, so none has its ports."""
    return launch.first_port + PORTS_PER_GPU * (min(gpus, default=0) % launch.per_node)


def _address(launch: Launch, node: int, spec: EngineSpec) -> str:
    """A node's address for the other processes of the engine."""
    alone = all(gpu // launch.per_node == node for gpu in spec.gpus)
    return "127.0.0.1" if alone or node >= len(launch.nodes) else launch.nodes[node]


def _command_line(
    spec: EngineSpec, launch: Launch, group: _Group, place: int, given: Sequence[Argument]
) -> tuple[CommandLine, list[str]]:
    part = group.parts[place]
    model, serving = spec.weights or launch.model, place == 0
    # The CPU build's own `vllm serve` does not start: it asks for a distribution of another name.
    if launch.device is Device.CPU:
        program = [launch.python, "-m", "vllm.entrypoints.openai.api_server"]
        values = {"--model": model}
    else:
        program = [launch.python, "-m", "vllm.entrypoints.cli.main", "serve", model]
        values = {}
    if serving:
        values |= {"--host": launch.host, "--port": str(_http_port(spec, group))}
    values |= _parallel(group, place, launch)
    faults: list[str] = []
    if group.afd is not None:
        values |= {"--enable-dbo": SET} if spec.parallelism.micro_batches > 1 else {}
        values[ADDITIONAL], given, faults = _additional(group.afd, given)
    if launch.kv_directory and group.roles[0] is Role.SERVER:
        flag, config = handover.vllm_arguments(Path(launch.kv_directory) / quote(spec.configuration, safe="+"))
        values[flag] = config
    by = spec.configuration if group.afd is None else f"{spec.configuration}'s {group.afd['role']} side"
    may_decide = DECIDED if group.afd is None else {**DECIDED, "--enable-dbo": UNSET}
    words, more = Owned(values, {"--model": model}, may_decide, by).merge(given, _usual(spec, launch))
    line = CommandLine(
        role=group.roles[0 if serving else 1],
        node=part.node,
        gpus=part.gpus,
        environment=_environment(spec, launch, group, part),
        program=tuple(program),
        arguments=tuple(words),
    )
    return line, faults + more


def _http_port(spec: EngineSpec, group: _Group) -> int:
    return spec.port if spec.port is not None and group.roles[0] is Role.SERVER else group.port


def _parallel(group: _Group, place: int, launch: Launch) -> dict[str, str]:
    """How the GPUs of a group work together, for its process on one of the nodes."""
    p, parts = group.parallelism, group.parts
    flags = {"--tensor-parallel-size": str(p.tp)}
    if p.pp > 1:
        flags["--pipeline-parallel-size"] = str(p.pp)
    if p.dp > 1:
        flags["--data-parallel-size"] = str(p.dp)
    if p.ep > 1 or group.afd is not None:
        flags["--enable-expert-parallel"] = SET
    if place == 0 and p.dp > 1:
        # By default there are as many servers behind the port as replicas, and what ends or stops requests by name
        # reaches one of them.
        flags["--api-server-count"] = "1"
    if len(parts) == 1:
        return flags
    head, share, replica = launch.nodes[parts[0].node], len(parts[0].gpus), p.tp * p.pp
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


def _usual(spec: EngineSpec, launch: Launch) -> dict[str, str]:
    """What a user may say otherwise."""
    usual = {}
    if spec.weights:
        usual = {"--tokenizer": launch.model, "--served-model-name": launch.model}
    if launch.served_model_name:
        usual["--served-model-name"] = launch.served_model_name
    if spec.max_sequences is not None:
        # vLLM counts them for each replica.
        replicas = spec.parallelism.attention_gpus // spec.parallelism.tp or spec.parallelism.dp
        usual["--max-num-seqs"] = str(max(1, spec.max_sequences // replicas))
    return usual


def _additional(afd: Mapping[str, object], given: Sequence[Argument]) -> tuple[str, list[Argument], list[str]]:
    """The plugin's settings inside whatever else the user has there."""
    others: list[Argument] = []
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


def _pinned(gpus: Sequence[GpuId], launch: Launch) -> dict[str, str]:
    """What binds a process to its GPUs, numbered as its node does."""
    local = [gpu % launch.per_node for gpu in sorted(gpus)]
    if not local or (launch.device is Device.CPU and not launch.cores_per_gpu):
        return {}
    if launch.device is Device.CUDA:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, local))}
    n = launch.cores_per_gpu
    cores = (str(g * n) if n == 1 else f"{g * n}-{g * n + n - 1}" for g in local)
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)}


def _environment(spec: EngineSpec, launch: Launch, group: _Group, part: _Part) -> dict[str, str]:
    ours = {"VLLM_SERVER_DEV_MODE": "1"}  # /pause, /abort_requests and the other control endpoints
    if launch.device is Device.CPU:
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by itself each server binds to the same core as the others
    if group.afd is not None:
        ours["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # as the plugin's examples have it
    made = {**_pinned(part.gpus, launch), **ours}
    for _, variables in _environments(spec, launch):
        made |= variables
    made |= _pinned(part.gpus, launch)
    if launch.kv_directory and group.roles[0] is Role.SERVER:
        made["PYTHONPATH"] = ":".join(filter(None, (str(handover.MODULE_FOLDER), made.get("PYTHONPATH"))))
    return made
