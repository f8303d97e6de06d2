"""`orchestrrl engine`: engines that come with OrchestrRL."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import with_flags
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.errors import Permanent, ProblemFaults, faults_of

if TYPE_CHECKING:
    from orchestrrl.lab.simulated_engine.server import SimulatedOptions


@dataclass(frozen=True, kw_only=True)
class SimulatedFlags:
    """The options of `orchestrrl engine simulated`; most of them are options of the engine, by the same name."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0
    model_name: Annotated[str, typer.Option(help="Name of the served model.")] = "simulated"
    model_root: Annotated[
        str, typer.Option(help="Published name of the model that it claims to run, as vLLM's `root`.")
    ] = "Qwen/Qwen2.5-14B-Instruct"
    gpu: Annotated[
        str, typer.Option(help="GPU that it claims to run on, as `nvidia-smi -L` names it; empty: CPUs.")
    ] = "NVIDIA H800"
    alpha_s: Annotated[float, typer.Option(help="Step time: fixed part.")] = 0.0184
    beta_s: Annotated[float, typer.Option(help="Step time: per sequence.")] = 8.1e-05
    gamma_s: Annotated[float, typer.Option(help="Step time: per resident KV token.")] = 4.1e-08
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="Prefill rate; without it prefill takes no time.")
    ] = None
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in a batch.")] = 48
    kv_capacity_tokens: Annotated[int, typer.Option(help="KV cache.")] = 262144
    block_tokens: Annotated[int, typer.Option(help="KV block size.")] = 16
    max_model_len_tokens: Annotated[int, typer.Option("--max-model-len", help="Longest context, in tokens.")] = 32768
    vocab_size: Annotated[int, typer.Option(help="Token ids.")] = 32000
    seed: Annotated[int, typer.Option(help="Seed of the weights; replicas share it.")] = 0
    lengths: Annotated[
        Path | None, typer.Option(help="YAML with quantiles, tokens and correlation of answer lengths.")
    ] = None
    kv_directory: Annotated[
        Path | None,
        typer.Option(help="Directory in common with engines that hand the KV of requests over to each other."),
    ] = None
    kv_bytes_per_token: Annotated[float, typer.Option(help="KV of a token.")] = 196608
    kv_gbps: Annotated[float, typer.Option(help="Rate at which KV comes.")] = 400.0
    kv_latency_s: Annotated[float, typer.Option(help="What every transfer of KV waits.")] = 0.002
    weights: Annotated[
        Path | None, typer.Option(help="Folder of weights to begin with, instead of those of the seed.")
    ] = None
    tensor_parallel_size: Annotated[int, typer.Option(help="As it says that it is laid out.")] = 1
    pipeline_parallel_size: Annotated[int, typer.Option(help="The same.")] = 1
    data_parallel_size: Annotated[
        int, typer.Option(help="Replicas: each has the seats, KV and rates that are named here.")
    ] = 1
    enable_expert_parallel: Annotated[bool, typer.Option("--enable-expert-parallel", help="As it says.")] = False
    enable_sleep_mode: Annotated[bool, typer.Option("--enable-sleep-mode", help="It can sleep and wake up.")] = False
    enable_elastic_ep: Annotated[
        bool, typer.Option("--enable-elastic-ep", help="It can go on with other numbers of replicas.")
    ] = False
    load_s: Annotated[float, typer.Option(help="Virtual seconds to load weights.")] = 0.0
    load_s_per_gb: Annotated[float, typer.Option(help="And for each GB of them.")] = 0.0
    sleep_s: Annotated[float, typer.Option(help="To fall asleep, and to wake up.")] = 0.0
    scale_s: Annotated[float, typer.Option(help="To go on with another number of replicas.")] = 0.0
    start_delay_s: Annotated[float, typer.Option(help="Listen so many virtual seconds later.")] = 0.0
    fail_start: Annotated[bool, typer.Option("--fail-start", help="Fault: end with an error instead.")] = False
    hang: Annotated[bool, typer.Option("--hang", help="Fault: listen, and never answer.")] = False
    wrong_answers: Annotated[
        bool, typer.Option("--wrong-answers", help="Fault: answer out of other weights than it has.")
    ] = False
    misreport: Annotated[
        list[str] | None, typer.Option(metavar="tp|pp|dp|ep=N", help="Fault: say that it is laid out so; repeat it.")
    ] = None
    refuse_loads: Annotated[
        list[int] | None,
        typer.Option("--refuse-load", help="Fault: say no to this load of weights, counted from 1; repeat it."),
    ] = None
    tear_loads: Annotated[
        list[int] | None,
        typer.Option("--tear-load", help="Fault: fail halfway through this load of weights; repeat it."),
    ] = None
    speed: Annotated[float, typer.Option(help="Virtual seconds per second.")] = 1.0
    tick_s: Annotated[float, typer.Option(help="Seconds between looks at the clock.")] = 0.02


OF_FAULTS = ("start_delay_s", "fail_start", "hang", "wrong_answers", "misreport", "refuse_loads", "tear_loads")


@with_flags(SimulatedFlags)
def simulated(flags: SimulatedFlags) -> None:
    """Serve a simulated engine with vLLM's HTTP surface until SIGTERM. Its URL is the first line of output.

    A decode step takes `alpha + beta*sequences + gamma*kv_tokens` virtual seconds, and the tokens are a function of the
    prompt and the seeds, so that a request continued on another engine can be checked token by token.

    Example: `orchestrrl engine simulated --port 8100 --speed 30 --max-num-seqs 48`
    """
    given = dict(vars(flags))
    host, port = given.pop("host"), given.pop("port")
    faults = {name: value for name in OF_FAULTS if (value := given.pop(name)) is not None}
    given["faults"] = {**faults, "misreport": dict(map(_pair, flags.misreport or ()))}
    if flags.lengths is None:
        del given["lengths"]
    else:
        given["lengths"] = _read_yaml(flags.lengths)
    options = _options(given)
    keep_loaded()
    until_stopped(_serve(options, host, port))


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProblemFaults([f"lengths: cannot be read: {error}"]) from error


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _options(given: dict[str, Any]) -> "SimulatedOptions":
    from pydantic import ValidationError

    from orchestrrl.lab.simulated_engine.server import SimulatedOptions

    try:
        return SimulatedOptions.model_validate(given)
    except ValidationError as error:
        raise ProblemFaults([fault.removeprefix("faults.") for fault in faults_of(error, SimulatedOptions)]) from error


async def _serve(options: "SimulatedOptions", host: str, port: int) -> None:
    import asyncio

    from orchestrrl.lab.simulated_engine.server import SimulatedServer

    try:
        async with SimulatedServer(options, host=host, port=port) as server:
            typer.echo(server.url)
            await asyncio.Event().wait()
    except OSError as error:
        raise Permanent(f"cannot listen on {host}:{port}: {error}") from error
