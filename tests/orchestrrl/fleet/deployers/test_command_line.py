"""Tests of command lines, read back by an independent parser: the layout, the GPUs, and the user's arguments."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.engines import handover
from orchestrrl.fleet.deployers.command_line import CommandLine, EngineLaunch, EngineSpec, render, url_of
from orchestrrl.fleet.deployers.layout_flags import ProcessRole
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

LAUNCH = EngineLaunch(python="/opt/vllm/bin/python", model="org/model", nodes=tuple(f"10.0.0.{n}" for n in range(64)))


def spec(parallelism: Parallelism, gpus: Sequence[int] | None = None, **more: object) -> EngineSpec:
    held = tuple(map(GpuId, range(parallelism.gpus) if gpus is None else gpus))
    made = EngineSpec(EngineId("e0"), ConfigurationId("wide"), parallelism, held)
    return replace(made, **more)  # type: ignore[arg-type]


def faults(engine: EngineSpec, launch: EngineLaunch = LAUNCH) -> list[str]:
    with pytest.raises(ProblemFaults) as caught:
        render(engine, launch)
    return caught.value.faults


def read(line: CommandLine) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    for flag, default in (
        ("tensor-parallel-size", 1),
        ("pipeline-parallel-size", 1),
        ("data-parallel-size", 1),
        ("data-parallel-size-local", None),
        ("data-parallel-start-rank", None),
        ("data-parallel-rpc-port", None),
        ("nnodes", 1),
        ("node-rank", 0),
        ("master-port", None),
        ("port", None),
        ("api-server-count", None),
        ("max-num-seqs", None),
    ):
        parser.add_argument(f"--{flag}", type=int, default=default)
    for flag in ("data-parallel-address", "master-addr", "host", "model", "served-model-name", "tokenizer"):
        parser.add_argument(f"--{flag}")
    for flag in ("additional-config", "kv-transfer-config", "weight-transfer-config"):
        parser.add_argument(f"--{flag}", type=json.loads, default={})
    for flag in ("enable-expert-parallel", "headless", "enable-dbo"):
        parser.add_argument(f"--{flag}", action="store_true")
    found, others = parser.parse_known_args(line.arguments)
    found.others = others
    return found


def gpus_of(line: CommandLine, per_node: int) -> list[int]:
    return [line.node * per_node + int(gpu) for gpu in line.environment["CUDA_VISIBLE_DEVICES"].split(",")]


@dataclass(frozen=True)
class Placed:
    parallelism: Parallelism
    gpus: tuple[int, ...]
    per_node: int


SIZES = st.sampled_from((1, 2, 4, 8))


@st.composite
def layouts(draw: st.DrawFn) -> Parallelism:
    if draw(st.booleans()):
        tp, ffn = draw(SIZES), draw(SIZES)
        attention = max(tp, ffn) * draw(st.sampled_from((1, 2)))
        return Parallelism(tp=tp, attention_gpus=attention, ffn_gpus=ffn, micro_batches=draw(st.sampled_from((1, 2))))
    tp, pp, dp = draw(SIZES), draw(SIZES), draw(SIZES)
    return Parallelism(tp=tp, pp=pp, dp=dp, ep=draw(st.sampled_from((1, tp * dp))))


@st.composite
def placed(draw: st.DrawFn) -> Placed:
    """Generate placements: inside a node, or on whole nodes that need not be adjacent; AFD's sides on nodes of their
    own, or on one."""
    layout = draw(layouts())
    sides = (layout.attention_gpus, layout.ffn_gpus) if layout.afd else (layout.gpus,)
    per_node = draw(SIZES)
    if layout.gpus <= per_node:
        node = draw(st.integers(0, 5))
        local = draw(st.permutations(range(per_node)))[: layout.gpus]
        return Placed(layout, tuple(node * per_node + gpu for gpu in local), per_node)
    per_node = min(max(per_node, layout.gpus // 16), *sides)  # all powers of two: sides fill whole nodes
    count = layout.gpus // per_node
    nodes = draw(st.lists(st.integers(0, 63), min_size=count, max_size=count, unique=True))
    gpus = [node * per_node + gpu for node in nodes for gpu in range(per_node)]
    return Placed(layout, tuple(gpus), per_node)


def ranks(lines: Sequence[CommandLine]) -> list[int]:
    """Return each GPU's rank in a group, by the flags of its processes, as vLLM counts them: data parallel
    outermost."""
    found = []
    for line in lines:
        flags = read(line)
        replica = flags.tensor_parallel_size * flags.pipeline_parallel_size
        if flags.nnodes > 1:
            local = replica * flags.data_parallel_size // flags.nnodes
            first = flags.node_rank * local
        else:
            local = replica * (flags.data_parallel_size_local or flags.data_parallel_size)
            first = replica * (flags.data_parallel_start_rank or 0)
        assert local == len(line.gpus)
        found += range(first, first + local)
    return found


def check_group(lines: Sequence[CommandLine], per_node: int) -> None:
    """Check that the processes of one vLLM find each other, and that only the first has an API."""
    head, *others = map(read, lines)
    assert ranks(lines) == list(range(sum(len(line.gpus) for line in lines)))
    assert (head.headless, head.host) == (False, "127.0.0.1")
    assert all(flags.headless and flags.host is None and flags.port is None for flags in others)
    shared = {
        (f.data_parallel_address, f.data_parallel_rpc_port, f.master_addr, f.master_port) for f in (head, *others)
    }
    assert len(shared) == 1
    if others:
        address = LAUNCH.nodes[lines[0].node]
        assert (head.data_parallel_address or address, head.master_addr or address) == (address, address)
        assert head.data_parallel_address or head.master_addr
        assert (head.nnodes > 1) == (head.master_addr is not None)
        assert [line.node for line in lines] == sorted({line.node for line in lines})
    assert head.api_server_count == (1 if head.data_parallel_size > 1 else None)


@given(placed())
def test_command_line_parses_back_to_its_layout_and_gpus(case: Placed) -> None:
    layout, launch = case.parallelism, replace(LAUNCH, per_node=case.per_node)
    lines = render(spec(layout, case.gpus), launch)
    for line in lines:
        assert gpus_of(line, case.per_node) == list(line.gpus)
        assert max(Counter(word for word in line.argv if word.startswith("--")).values()) == 1
        assert read(line).others == []
    held = [gpu for line in lines for gpu in line.gpus]
    assert sorted(held) == sorted(case.gpus)
    attention = [line for line in lines if line.role in (ProcessRole.SERVER, ProcessRole.NODE)]
    ffn = lines[len(attention) :]
    check_group(attention, case.per_node)
    head = read(lines[0])
    if not layout.afd:
        assert ffn == ()
        ep = head.tensor_parallel_size * head.data_parallel_size if head.enable_expert_parallel else 1
        found = Parallelism(
            tp=head.tensor_parallel_size, pp=head.pipeline_parallel_size, dp=head.data_parallel_size, ep=ep
        )
        assert found == layout
        return
    check_group(ffn, case.per_node)
    other = read(ffn[0])
    assert (head.tensor_parallel_size, head.data_parallel_size) == (layout.tp, layout.attention_gpus // layout.tp)
    assert other.data_parallel_size == layout.ffn_gpus
    sides = ((attention[0].node, head), (ffn[0].node, other))
    bound = [(node, port) for node, f in sides for port in (f.port, f.data_parallel_rpc_port, f.master_port) if port]
    bound.append((ffn[0].node, other.additional_config["afd"]["port"]))
    assert len(set(bound)) == len(bound)
    for line in lines:
        flags = read(line)
        role = "attention" if line in attention else "ffn"
        assert flags.enable_expert_parallel
        assert flags.enable_dbo == (layout.micro_batches == 2)
        afd = flags.additional_config["afd"]
        assert afd["role"] == role
        assert (afd["num_attention_ranks"], afd["num_ffn_ranks"]) == (layout.attention_gpus, layout.ffn_gpus)
        alone = len({line.node for line in lines}) == 1
        assert afd["host"] == ("127.0.0.1" if alone else LAUNCH.nodes[ffn[0].node])
        assert afd["port"] == other.additional_config["afd"]["port"]


OWN = (
    ("--max-model-len", "4096"),
    ("--gpu_memory_utilization=0.9",),
    ("--max-num-seqs", "3"),
    ("-O2",),
    ("--seed", "-1"),
    ("--compilation-config.cudagraph_mode", "NONE"),
    ("--enforce-eager",),
    ("--logits-processors", "a:B", "c:D"),
)


@given(placed(), st.lists(st.sampled_from(OWN), unique=True))
def test_user_arguments_are_kept_and_replace_usual_flags(case: Placed, own: list[tuple[str, ...]]) -> None:
    words = tuple(word for argument in own for word in argument)
    launch = replace(LAUNCH, per_node=case.per_node, arguments=words)
    for line in render(spec(case.parallelism, case.gpus, max_sequences=1024), launch):
        assert line.arguments[len(line.arguments) - len(words) :] == words
        assert line.argv.count("--max-num-seqs") == 1
        assert (read(line).max_num_seqs == 3) == (("--max-num-seqs", "3") in own)


def test_max_sequences_are_divided_by_replicas() -> None:
    seats = [Parallelism(tp=2), Parallelism(dp=4), Parallelism(tp=2, attention_gpus=8, ffn_gpus=4)]
    found = [read(render(spec(layout, max_sequences=1024), replace(LAUNCH, per_node=16))[0]) for layout in seats]
    assert [flags.max_num_seqs for flags in found] == [1024, 256, 256]


SPELLINGS = (
    ("--tensor-parallel-size", "4"),
    ("--tensor_parallel_size=4",),
    ("--tensor-parallel-s", "4"),
    ("-tp", "4"),
    ("-tp=4",),
    ("--pipeline-parallel-size", "2"),
    ("-pp", "2"),
    ("-dp", "2"),
    ("--data-parallel-rank", "0"),
    ("--enable-expert-parallel",),
    ("-ep",),
    ("-n2",),
    ("--nnodes=2",),
    ("--headless",),
    ("--api-server-count", "2"),
    ("--port", "1234"),
    ("--host=0.0.0.0",),
    ("--model", "another"),
)


@pytest.mark.parametrize("words", SPELLINGS, ids=" ".join)
def test_argument_that_contradicts_the_layout_is_a_fault(words: tuple[str, ...]) -> None:
    given = ("--seed", "1", *words)
    (fault,) = faults(spec(Parallelism(tp=2)), replace(LAUNCH, arguments=given))
    assert fault.startswith("fleet.launch.arguments[2]: contradicts ")
    assert "wide" in fault
    assert fault.endswith(f"got {' '.join(words)!r}")


def test_contradiction_fault_names_the_layout_value() -> None:
    (fault,) = faults(spec(Parallelism(tp=2)), replace(LAUNCH, arguments=("-tp", "4")))
    assert fault == "fleet.launch.arguments[0]: contradicts `--tensor-parallel-size 2` of wide, got '-tp 4'"
    (fault,) = faults(spec(Parallelism(tp=2, ep=2)), replace(LAUNCH, arguments=("--no-enable-expert-parallel",)))
    assert "contradicts `--enable-expert-parallel` of wide" in fault
    (fault,) = faults(spec(Parallelism(tp=2)), replace(LAUNCH, arguments=("-ep",)))
    assert "contradicts wide, which does not set --enable-expert-parallel" in fault


@pytest.mark.parametrize(
    "words", [("--data-parallel-backend", "ray"), ("-dpb", "ray"), ("--data_parallel_backend=ray",)]
)
def test_ray_backend_is_accepted_on_one_node_only(words: tuple[str, ...]) -> None:
    """Elastic EP needs this; over several nodes it would start processes other than the rendered ones."""
    launch = replace(LAUNCH, arguments=words)
    (line,) = render(spec(Parallelism(dp=8, ep=8)), launch)
    assert line.argv[-len(words) :] == words
    (fault,) = faults(spec(Parallelism(dp=16, ep=16)), launch)
    assert "contradicts wide, which does not set --data-parallel-backend" in fault


def test_argument_that_repeats_the_layout_is_rendered_once() -> None:
    repeated = (
        "-tp",
        "2",
        "--pipeline_parallel_size=1",
        "--model",
        "org/model",
        "--no-enable-expert-parallel",
        "--seed",
        "1",
    )
    (line,) = render(spec(Parallelism(tp=2)), replace(LAUNCH, arguments=repeated))
    assert line.argv == render(spec(Parallelism(tp=2)), replace(LAUNCH, arguments=("--seed", "1")))[0].argv


def test_configuration_arguments_override_shared_ones() -> None:
    launch = replace(LAUNCH, arguments=("--max-model-len", "1", "--seed", "2"), environment={"A": "1", "B": "1"})
    engine = spec(Parallelism(), arguments=("--max_model_len=3",), environment={"B": "2"})
    (line,) = render(engine, launch)
    assert line.arguments[-3:] == ("--seed", "2", "--max_model_len=3")
    assert (line.environment["A"], line.environment["B"]) == ("1", "2")


def test_all_faults_are_reported_at_once() -> None:
    launch = replace(
        LAUNCH,
        arguments=("stray", "-tp", "4"),
        environment={"CUDA_VISIBLE_DEVICES": "7", "not a name": "x"},
    )
    assert faults(spec(Parallelism(tp=2, ep=4), (0, 0, 1)), launch) == [
        "wide.ep: must be 1 or tp x dp (2) for vLLM, got 4",
        "e0.gpus: must be 2 different GPUs for wide, got [0, 0, 1]",
        "fleet.launch.arguments[0]: must begin with a flag such as --max-model-len, got 'stray'",
        "fleet.launch.environment.CUDA_VISIBLE_DEVICES: contradicts `CUDA_VISIBLE_DEVICES=0,0,1` of e0's GPUs, got '7'",
        "fleet.launch.environment: must contain valid shell variable names, got 'not a name'",
        "fleet.launch.arguments[1]: contradicts `--tensor-parallel-size 2` of wide, got '-tp 4'",
    ]


@pytest.mark.parametrize(
    ("layout", "gpus", "words"),
    [
        (Parallelism(tp=8), range(4, 12), None),  # half of each of two nodes: equal shares
        (Parallelism(tp=4), (6, 7, 8, 9), None),
        (Parallelism(tp=4), (7, 8, 9, 10), "3 on node 1"),
        (Parallelism(tp=6), (0, 1, 8, 9, 16, 17), None),
        (Parallelism(tp=2, dp=3), (0, 1, 2, 8, 9, 10), "3 on node 0"),
        (Parallelism(attention_gpus=2, ffn_gpus=4), range(6), "ffn_gpus: must be <= attention_gpus"),
        (Parallelism(attention_gpus=4, ffn_gpus=2, micro_batches=3), range(6), "must be 1 or 2 (afd-plugin), got 3"),
        (Parallelism(attention_gpus=4, ffn_gpus=2, pp=2), range(6), "pp: must be 1 under AFD"),
        (Parallelism(tp=4, attention_gpus=6, ffn_gpus=2), range(8), "a multiple of tp (4), got 6"),
        (Parallelism(attention_gpus=4, ffn_gpus=2), (), "must be given"),
    ],
)
def test_invalid_gpu_placement_is_a_fault(layout: Parallelism, gpus: Sequence[int], words: str | None) -> None:
    engine = spec(layout, gpus)
    if words is None:
        assert [gpu for line in render(engine, LAUNCH) for gpu in line.gpus] == list(gpus)
    else:
        assert any(words in fault for fault in faults(engine))


def test_missing_node_address_is_a_fault_only_if_needed() -> None:
    launch = replace(LAUNCH, nodes=("a",))
    render(spec(Parallelism(tp=4), range(16, 20)), launch)
    (fault,) = faults(spec(Parallelism(tp=16), range(8, 24)), launch)
    assert fault == "fleet.launch.nodes: must include the addresses of nodes 1, 2, got ['a']"


def test_engines_on_one_node_have_different_ports() -> None:
    urls = [url_of(spec(Parallelism(tp=2), (at, at + 1)), LAUNCH) for at in range(0, 8, 2)]
    assert urls == [f"http://127.0.0.1:{port}" for port in (8100, 8108, 8116, 8124)]
    everywhere = replace(LAUNCH, host="0.0.0.0")
    assert url_of(spec(Parallelism(), (17,), port=9), everywhere) == "http://10.0.0.2:9"
    assert url_of(spec(Parallelism()), replace(LAUNCH, host="::1")) == "http://[::1]:8100"


def test_cpu_build_maps_gpus_to_cores() -> None:
    launch = replace(LAUNCH, device=EngineDevice.CPU, cores_per_gpu=1, per_node=64)
    (line,) = render(spec(Parallelism(tp=2), (1, 0)), launch)
    assert line.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert line.program[1:] == ("-m", "vllm.entrypoints.openai.api_server")
    assert read(line).model == "org/model"
    (line,) = render(spec(Parallelism(tp=2), (2, 3)), replace(launch, cores_per_gpu=4))
    assert line.environment["VLLM_CPU_OMP_THREADS_BIND"] == "8-11|12-15"
    for unbound in (spec(Parallelism(), ()), spec(Parallelism(), (3,))):
        cores = launch.cores_per_gpu if not unbound.gpus else 0
        (line,) = render(unbound, replace(launch, cores_per_gpu=cores))
        assert line.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    bound = replace(launch, environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert "contradicts `VLLM_CPU_OMP_THREADS_BIND=0` of e0's GPUs" in faults(spec(Parallelism()), bound)[0]
    assert faults(spec(Parallelism(attention_gpus=1, ffn_gpus=1)), launch)[0].startswith(
        "fleet.launch.device: must be cuda"
    )


def test_kv_is_shared_among_engines_of_one_configuration() -> None:
    launch = replace(LAUNCH, kv_directory="/dev/shm/kv", environment={"PYTHONPATH": "/mine"})
    (line,) = render(spec(Parallelism(tp=2)), launch)
    assert line.environment["PYTHONPATH"] == f"{handover.MODULE_FOLDER}:/mine"
    config = read(line).kv_transfer_config
    assert config["kv_connector_extra_config"] == {"shared_storage_path": "/dev/shm/kv/wide"}
    theirs = replace(launch, arguments=("--kv-transfer-config.kv_role", "kv_producer"))
    assert "contradicts `--kv-transfer-config" in faults(spec(Parallelism(tp=2)), theirs)[0]
    (line,) = render(spec(Parallelism(tp=2)), replace(theirs, kv_directory=""))
    assert line.arguments[-2:] == ("--kv-transfer-config.kv_role", "kv_producer")


def test_weight_backend_is_ours_unless_the_user_sets_one() -> None:
    launch = replace(LAUNCH, weight_backend=True)
    (line,) = render(spec(Parallelism(tp=2)), launch)
    assert line.environment["PYTHONPATH"] == str(handover.MODULE_FOLDER)
    assert read(line).weight_transfer_config == {"backend": "orchestrrl"}
    assert list(handover.MODULE_FOLDER.glob("*.dist-info/entry_points.txt"))  # where vLLM finds it
    theirs = replace(launch, arguments=("--weight-transfer-config", '{"backend": "nccl"}'))
    (line,) = render(spec(Parallelism(tp=2)), theirs)
    assert read(line).weight_transfer_config == {"backend": "nccl"}


def test_checkpoint_replaces_model_weights_under_the_model_name() -> None:
    (line,) = render(spec(Parallelism(), weights="/ckpt/7"), LAUNCH)
    flags = read(line)
    assert line.program[-1] == "/ckpt/7"
    assert (flags.tokenizer, flags.served_model_name) == ("org/model", "org/model")


def test_afd_plugin_settings_are_merged_with_the_users() -> None:
    layout = Parallelism(attention_gpus=2, ffn_gpus=1)
    mine = replace(LAUNCH, arguments=("--additional-config", '{"x": 1}'))
    assert [read(line).additional_config["x"] for line in render(spec(layout), mine)] == [1, 1]
    for words in (("--additional-config", '{"afd": {}}'), ("--additional-config.x", "1"), ("--additional-config", "{")):
        assert "fleet.launch.arguments[0]: " in faults(spec(layout), replace(LAUNCH, arguments=words))[0]
    assert "--enable-dbo" in faults(spec(layout), replace(LAUNCH, arguments=("--enable-dbo",)))[0]
    render(spec(Parallelism()), replace(LAUNCH, arguments=("--enable-dbo",)))
