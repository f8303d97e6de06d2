"""Render the command lines of an engine from its layout, its GPUs and the user's arguments, without side effects.

All deployers use this module. `layout_flags.py` determines the processes and flags of a layout; `user_arguments.py`
determines the arguments that a user may add.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from orchestrrl.core.addresses import http_url
from orchestrrl.core.config.launch import EngineDevice, EngineProduct
from orchestrrl.core.errors import ProblemFaults, shorten
from orchestrrl.engines import handover, vllm_weight_flags
from orchestrrl.fleet.deployers import layout_flags
from orchestrrl.fleet.deployers.layout_flags import NodeProcesses, ProcessRole, VllmProcesses
from orchestrrl.fleet.deployers.user_arguments import SET, OwnedFlags, VllmArgument, read_arguments, replaced
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """The launch settings that all engines share. Paths refer to the engines' machines."""

    python: str  # the interpreter of the engines' own environment
    model: str  # a name or a folder
    engine: EngineProduct = EngineProduct.VLLM
    device: EngineDevice = EngineDevice.CUDA
    host: str = "127.0.0.1"  # the address to listen on
    served_model_name: str = ""  # default: the model's name
    nodes: tuple[str, ...] = ()  # addresses; node n has the GPUs from n * per_node
    per_node: int = 8
    first_port: int = 8100  # four ports per GPU of a node; an engine uses those of its lowest GPU
    last_port: int = 0  # remaining ports up to this one are spare; 0: any port is spare
    cores_per_gpu: int = 0  # for CPU: GPU g means this many cores from g * cores_per_gpu; 0: not bound
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    kv_directory: str = ""  # where engines of one configuration exchange KV; empty: no exchange
    weight_backend: bool = False  # vLLM receives weight versions from OrchestrRL's weight backend


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The specification of one engine to start. Its arguments and environment override those in EngineLaunch."""

    engine: EngineId
    configuration: ConfigurationId
    parallelism: Parallelism
    gpus: tuple[GpuId, ...]  # empty: bound to none, in one process
    port: int | None = None  # for HTTP; None: that of its lowest GPU
    max_sequences: int | None = None  # of the whole engine
    weights: str = ""  # folder of the initial checkpoint; empty: the model's own
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)  # default flags that a user's arguments may replace


@dataclass(frozen=True, slots=True)
class CommandLine:
    """One process of an engine: its program and arguments, and the node that it runs on."""

    role: ProcessRole
    node: int
    gpus: tuple[GpuId, ...]
    environment: Mapping[str, str]
    program: tuple[str, ...]
    arguments: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        return self.program + self.arguments

    def shell(self) -> str:
        """Return the command line in shell syntax, with one line per environment variable and per flag."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines.append(shlex.join(self.program))
        for word in self.arguments:
            if word.startswith("-"):
                lines.append("    " + shlex.quote(word))
            else:
                lines[-1] += " " + shlex.quote(word)
        return " \\\n".join(lines)


def render(spec: EngineSpec, launch: EngineLaunch) -> tuple[CommandLine, ...]:
    """Return the command lines of one engine's processes; the first process serves requests. Raises ProblemFaults with
    every fault of the spec."""
    if launch.engine is EngineProduct.SIMULATED:
        return (_render_simulated(spec, launch),)
    misplaced = _layout_faults(spec, launch)
    given, faults = _given(spec, launch)
    faults += _environment_faults(spec, launch)
    # Arguments are checked against the layout even if it cannot be placed, so that all faults are reported at once.
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


def url_of(spec: EngineSpec, launch: EngineLaunch) -> str:
    """Return the URL at which the engine will serve requests."""
    group = _groups(spec, launch)[0]
    host, node = launch.host, group.parts[0].node
    if host in ("0.0.0.0", "::"):
        host = launch.nodes[node] if node < len(launch.nodes) else "127.0.0.1"
    return http_url(host, _http_port(spec, group))


def ports_to_try(spec: EngineSpec, launch: EngineLaunch) -> list[tuple[int, bool]]:
    """Return the ports that `hold_port` should try, in order, as pairs (port, whether to reuse the address). The
    engine's own port comes first, without reuse. If the spec sets this port, the same port with reuse comes second. The
    spare ports of the launch settings follow or, if `last_port` is not set, port 0, which means any port."""
    own = urlsplit(url_of(spec, launch)).port or 0
    first_spare = launch.first_port + layout_flags.PORTS_PER_GPU * launch.per_node
    spare = range(first_spare, launch.last_port + 1) if launch.last_port else (0,)
    return [(own, False), *([(own, True)] if spec.port is not None else []), *((port, False) for port in spare)]


def _render_simulated(spec: EngineSpec, launch: EngineLaunch) -> CommandLine:
    """Return the command line of a simulated engine, which is one process for any layout and uses no real GPU. Raises
    ProblemFaults if the GPUs, the user's arguments or the environment are invalid."""
    given, faults = _given(spec, launch)
    group = _groups(spec, launch)[0]
    values = {"--host": launch.host, "--port": str(_http_port(spec, group))}
    values |= layout_flags.size_flags(spec.parallelism)
    if spec.weights:
        values["--weights"] = spec.weights
    if launch.kv_directory:
        values["--kv-directory"] = str(_kv_folder(spec, launch))
    usual = {"--model-name": launch.served_model_name or launch.model, **spec.usual}
    if spec.max_sequences is not None:
        usual["--max-num-seqs"] = str(max(1, spec.max_sequences // spec.parallelism.dp))
    words, more = OwnedFlags(values, {}, layout_flags.SIMULATED_DECIDED, spec.configuration).merge(given, usual)
    faults = [*_gpu_faults(spec), *faults, *_environment_faults(spec, launch), *more]
    if faults:
        raise ProblemFaults(list(dict.fromkeys(faults)))
    return CommandLine(
        role=ProcessRole.SERVER,
        node=group.parts[0].node,
        gpus=tuple(sorted(spec.gpus)),
        environment={**launch.environment, **spec.environment},
        program=(launch.python, *layout_flags.SIMULATED_PROGRAM),
        arguments=tuple(words),
    )


def _layout_faults(spec: EngineSpec, launch: EngineLaunch) -> list[str]:
    p, name = spec.parallelism, spec.configuration
    faults = []
    ranks = p.tp * p.dp
    if p.ep not in (1, ranks) and not p.afd:
        faults.append(f"{name}.ep: must be 1 or tp x dp ({ranks}) for vLLM, got {p.ep}")
    if p.afd:
        if p.attention_gpus % p.tp:
            faults.append(f"{name}.attention_gpus: must be a multiple of tp ({p.tp}), got {p.attention_gpus}")
        if p.attention_gpus < p.ffn_gpus:
            faults.append(f"{name}.ffn_gpus: must be <= attention_gpus ({p.attention_gpus}), got {p.ffn_gpus}")
        if p.micro_batches not in layout_flags.AFD_MICRO_BATCHES:
            faults.append(f"{name}.micro_batches: must be 1 or 2 (afd-plugin), got {p.micro_batches}")
        if p.pp > 1:
            faults.append(f"{name}.pp: must be 1 under AFD, got {p.pp}")
        if launch.device is EngineDevice.CPU:
            faults.append(f"fleet.launch.device: must be cuda for {name}, which uses AFD, got 'cpu'")
    faults += _gpu_faults(spec)
    if not spec.gpus and p.afd:
        faults.append(f"{spec.engine}.gpus: must be given for {name}, which uses AFD, got none")
    return faults if faults or not spec.gpus else _placement_faults(spec, launch)


def _gpu_faults(spec: EngineSpec) -> list[str]:
    wanted, faults = spec.parallelism.gpus, []
    if spec.gpus and (len(set(spec.gpus)), len(spec.gpus)) != (wanted, wanted):
        wish = f"must be {wanted} different GPUs for {spec.configuration}"
        faults.append(f"{spec.engine}.gpus: {wish}, got {shorten(list(spec.gpus))}")
    if any(gpu < 0 for gpu in spec.gpus):
        faults.append(f"{spec.engine}.gpus: must be >= 0, got {shorten(list(spec.gpus))}")
    return faults


def _placement_faults(spec: EngineSpec, launch: EngineLaunch) -> list[str]:
    """Return the faults of the placement on nodes. If a vLLM instance spans several nodes, each node must have the same
    number of the instance's GPUs. In addition, either each node must hold whole replicas, or each replica must use all
    of the instance's GPUs on its nodes."""
    faults = []
    for group in _groups(spec, launch):
        sizes = {len(part.gpus) for part in group.parts}
        replica, share = group.parallelism.tp * group.parallelism.pp, min(sizes)
        if len(group.parts) > 1 and (len(sizes) > 1 or (share % replica and replica % share)):
            lie = ", ".join(f"{len(part.gpus)} on node {part.node}" for part in group.parts)
            wish = f"must be equal shares: whole replicas ({replica} GPUs each) per node, or whole nodes per replica"
            faults.append(f"{spec.engine}.gpus: {wish}, got {lie}")
    nodes = {part.node for part in layout_flags.shares(spec.gpus, launch.per_node)}
    unknown = sorted(node for node in nodes if node >= len(launch.nodes))
    if len(nodes) > 1 and unknown:
        missing = ", ".join(map(str, unknown))
        faults.append(f"fleet.launch.nodes: must include the addresses of nodes {missing}, got {list(launch.nodes)}")
    if launch.device is EngineDevice.CPU and len(nodes) > 1:
        faults.append(f"{spec.engine}.gpus: must be on one node if device is cpu, got nodes {sorted(nodes)}")
    return faults


def _given(spec: EngineSpec, launch: EngineLaunch) -> tuple[list[VllmArgument], list[str]]:
    common, faults = read_arguments("fleet.launch.arguments", launch.arguments)
    own, more = read_arguments(f"fleet.launch.configurations.{spec.configuration}.arguments", spec.arguments)
    return replaced(common, own), faults + more


def _environment_faults(spec: EngineSpec, launch: EngineLaunch) -> list[str]:
    pinned, faults = _pinned(spec.gpus, launch), []
    own = f"fleet.launch.configurations.{spec.configuration}.environment"
    for path, variables in (("fleet.launch.environment", launch.environment), (own, spec.environment)):
        for name, value in variables.items():
            if not _VARIABLE.fullmatch(name):
                faults.append(f"{path}: must contain valid shell variable names, got {name!r}")
            if name in pinned and (spec.parallelism.afd or pinned[name] != value):
                theirs = f"`{name}={pinned[name]}` of {spec.engine}'s GPUs"
                faults.append(f"{path}.{name}: contradicts {theirs}, got {value!r}")
    return faults


def _groups(spec: EngineSpec, launch: EngineLaunch) -> tuple[VllmProcesses, ...]:
    layout = spec.parallelism if launch.engine is EngineProduct.VLLM else Parallelism()
    return layout_flags.groups(layout, spec.gpus, launch.per_node, launch.nodes, launch.first_port)


def _command_line(
    spec: EngineSpec, launch: EngineLaunch, group: VllmProcesses, place: int, given: Sequence[VllmArgument]
) -> tuple[CommandLine, list[str]]:
    part = group.parts[place]
    model, serving = spec.weights or launch.model, place == 0
    # `vllm serve` of the CPU build does not start: it requires a distribution of another name.
    if launch.device is EngineDevice.CPU:
        program = [launch.python, "-m", "vllm.entrypoints.openai.api_server"]
        values = {"--model": model}
    else:
        program = [launch.python, "-m", "vllm.entrypoints.cli.main", "serve", model]
        values = {}
    if serving:
        values |= {"--host": launch.host, "--port": str(_http_port(spec, group))}
    values |= layout_flags.parallel_flags(group, place, launch.nodes)
    faults: list[str] = []
    if group.afd is not None:
        values |= {"--enable-dbo": SET} if spec.parallelism.micro_batches > 1 else {}
        values[layout_flags.ADDITIONAL], given, faults = layout_flags.additional_config(group.afd, given)
    if launch.kv_directory and group.roles[0] is ProcessRole.SERVER:
        flag, config = handover.vllm_arguments(_kv_folder(spec, launch))
        values[flag] = config
    usual = _usual(spec, launch)
    if launch.weight_backend and group.roles[0] is ProcessRole.SERVER:
        usual |= dict([vllm_weight_flags.VLLM_ARGUMENTS])
    by = spec.configuration if group.afd is None else f"{spec.configuration}'s {group.afd['role']} side"
    words, more = OwnedFlags(values, {"--model": model}, layout_flags.decided_for(group), by).merge(given, usual)
    line = CommandLine(
        role=group.roles[0 if serving else 1],
        node=part.node,
        gpus=part.gpus,
        environment=_environment(spec, launch, group, part),
        program=tuple(program),
        arguments=tuple(words),
    )
    return line, faults + more


def _kv_folder(spec: EngineSpec, launch: EngineLaunch) -> Path:
    return Path(launch.kv_directory) / quote(spec.configuration, safe="+")


def _http_port(spec: EngineSpec, group: VllmProcesses) -> int:
    return spec.port if spec.port is not None and group.roles[0] is ProcessRole.SERVER else group.port


def _usual(spec: EngineSpec, launch: EngineLaunch) -> dict[str, str]:
    """Return the default flags that a user's arguments may replace."""
    usual = dict(spec.usual)
    if spec.weights:
        usual |= {"--tokenizer": launch.model, "--served-model-name": launch.model}
    if launch.served_model_name:
        usual["--served-model-name"] = launch.served_model_name
    if spec.max_sequences is not None:
        # vLLM counts sequences per replica.
        replicas = spec.parallelism.attention_gpus // spec.parallelism.tp or spec.parallelism.dp
        usual["--max-num-seqs"] = str(max(1, spec.max_sequences // replicas))
    return usual


def _pinned(gpus: Sequence[GpuId], launch: EngineLaunch) -> dict[str, str]:
    """Return the environment variables that bind a process to its GPUs or, if engines run on CPUs, to the cores that
    represent these GPUs. The GPUs are numbered as on the node."""
    local = [gpu % launch.per_node for gpu in sorted(gpus)]
    n = launch.cores_per_gpu
    if not local or launch.engine is EngineProduct.SIMULATED:
        return {}
    if launch.device is EngineDevice.CUDA:
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, local))}
    if not n:
        return {}
    cores = (str(g * n) if n == 1 else f"{g * n}-{g * n + n - 1}" for g in local)
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(cores)}


def _environment(spec: EngineSpec, launch: EngineLaunch, group: VllmProcesses, part: NodeProcesses) -> dict[str, str]:
    ours = {"VLLM_SERVER_DEV_MODE": "1"}  # /pause, /abort_requests and the other control endpoints
    if launch.device is EngineDevice.CPU:
        ours["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by default all servers bind to the same core
    if group.afd is not None:
        ours["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # as in the plugin's examples
    pinned = _pinned(part.gpus, launch)
    made = {**pinned, **ours, **launch.environment, **spec.environment, **pinned}
    if (launch.kv_directory or launch.weight_backend) and group.roles[0] is ProcessRole.SERVER:
        made["PYTHONPATH"] = ":".join(filter(None, (str(handover.MODULE_FOLDER), made.get("PYTHONPATH"))))
    return made
