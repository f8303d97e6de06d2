"""`orchestrrl engine`: engines that come with OrchestrRL."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.groups import group
from orchestrrl.cli.output import reporting_errors
from orchestrrl.core.errors import Permanent, ProblemFaults, faults_of

if TYPE_CHECKING:
    from orchestrrl.lab.simulated_engine.server import SimulatedOptions


def simulated(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 0,
    model_name: Annotated[str, typer.Option(help="Name of the served model.")] = "simulated",
    model_root: Annotated[
        str, typer.Option(help="Published name of the model that it claims to run, as vLLM's `root`.")
    ] = "Qwen/Qwen2.5-14B-Instruct",
    gpu: Annotated[
        str, typer.Option(help="GPU that it claims to run on, as `nvidia-smi -L` names it; empty: CPUs.")
    ] = "NVIDIA H800",
    alpha_s: Annotated[float, typer.Option(help="Step time: fixed part.")] = 0.0184,
    beta_s: Annotated[float, typer.Option(help="Step time: per sequence.")] = 8.1e-05,
    gamma_s: Annotated[float, typer.Option(help="Step time: per resident KV token.")] = 4.1e-08,
    prefill_tokens_per_s: Annotated[
        float | None, typer.Option(help="Prefill rate; without it prefill takes no time.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most sequences in a batch.")] = 48,
    kv_capacity_tokens: Annotated[int, typer.Option(help="KV cache.")] = 262144,
    block_tokens: Annotated[int, typer.Option(help="KV block size.")] = 16,
    max_model_len: Annotated[int, typer.Option(help="Longest context, in tokens.")] = 32768,
    vocab_size: Annotated[int, typer.Option(help="Token ids.")] = 32000,
    seed: Annotated[int, typer.Option(help="Seed of the weights; replicas share it.")] = 0,
    lengths: Annotated[
        Path | None,
        typer.Option(help="YAML with quantiles, tokens and correlation of answer lengths."),
    ] = None,
    kv_directory: Annotated[
        Path | None,
        typer.Option(help="Directory in common with engines that hand the KV of requests over to each other."),
    ] = None,
    kv_bytes_per_token: Annotated[float, typer.Option(help="KV of a token.")] = 196608,
    kv_gbps: Annotated[float, typer.Option(help="Rate at which KV comes.")] = 400.0,
    kv_latency_s: Annotated[float, typer.Option(help="What every transfer of KV waits.")] = 0.002,
    weights: Annotated[
        Path | None, typer.Option(help="Folder of weights to begin with, instead of those of the seed.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(help="As it says that it is laid out.")] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(help="The same.")] = 1,
    data_parallel_size: Annotated[
        int, typer.Option(help="Replicas: each has the seats, KV and rates that are named here.")
    ] = 1,
    enable_expert_parallel: Annotated[bool, typer.Option("--enable-expert-parallel", help="As it says.")] = False,
    enable_sleep_mode: Annotated[bool, typer.Option("--enable-sleep-mode", help="It can sleep and wake up.")] = False,
    enable_elastic_ep: Annotated[
        bool, typer.Option("--enable-elastic-ep", help="It can go on with other numbers of replicas.")
    ] = False,
    load_s: Annotated[float, typer.Option(help="Virtual seconds to load weights.")] = 0.0,
    load_s_per_gb: Annotated[float, typer.Option(help="And for each GB of them.")] = 0.0,
    sleep_s: Annotated[float, typer.Option(help="To fall asleep, and to wake up.")] = 0.0,
    scale_s: Annotated[float, typer.Option(help="To go on with another number of replicas.")] = 0.0,
    start_delay_s: Annotated[float, typer.Option(help="Listen so many virtual seconds later.")] = 0.0,
    fail_start: Annotated[bool, typer.Option("--fail-start", help="Fault: end with an error instead.")] = False,
    hang: Annotated[bool, typer.Option("--hang", help="Fault: listen, and never answer.")] = False,
    wrong_answers: Annotated[
        bool, typer.Option("--wrong-answers", help="Fault: answer out of other weights than it has.")
    ] = False,
    misreport: Annotated[
        list[str] | None, typer.Option(metavar="tp|pp|dp|ep=N", help="Fault: say that it is laid out so; repeat it.")
    ] = None,
    refuse_load: Annotated[
        list[int] | None, typer.Option(help="Fault: say no to this load of weights, counted from 1; repeat it.")
    ] = None,
    tear_load: Annotated[
        list[int] | None, typer.Option(help="Fault: fail halfway through this load of weights; repeat it.")
    ] = None,
    speed: Annotated[float, typer.Option(help="Virtual seconds per second.")] = 1.0,
    tick_s: Annotated[float, typer.Option(help="Seconds between looks at the clock.")] = 0.02,
) -> None:
    """Serve a simulated engine with vLLM's HTTP surface until SIGTERM. Its URL is the first line of output.

    A decode step takes `alpha + beta*sequences + gamma*kv_tokens` virtual seconds, and the tokens are a function of the
    prompt and the seeds, so that a request continued on another engine can be checked token by token.
    """
    import asyncio

    given: dict[str, Any] = {
        "model_name": model_name,
        "model_root": model_root,
        "gpu": gpu,
        "alpha_s": alpha_s,
        "beta_s": beta_s,
        "gamma_s": gamma_s,
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "max_num_seqs": max_num_seqs,
        "kv_capacity_tokens": kv_capacity_tokens,
        "block_tokens": block_tokens,
        "max_model_len_tokens": max_model_len,
        "vocab_size": vocab_size,
        "seed": seed,
        "kv_directory": kv_directory,
        "kv_bytes_per_token": kv_bytes_per_token,
        "kv_gbps": kv_gbps,
        "kv_latency_s": kv_latency_s,
        "weights": weights,
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "data_parallel_size": data_parallel_size,
        "enable_expert_parallel": enable_expert_parallel,
        "enable_sleep_mode": enable_sleep_mode,
        "enable_elastic_ep": enable_elastic_ep,
        "load_s": load_s,
        "load_s_per_gb": load_s_per_gb,
        "sleep_s": sleep_s,
        "scale_s": scale_s,
        "faults": {
            "start_delay_s": start_delay_s,
            "fail_start": fail_start,
            "hang": hang,
            "wrong_answers": wrong_answers,
            "misreport": dict(_pair(words) for words in misreport or ()),
            "refuse_loads": refuse_load or (),
            "tear_loads": tear_load or (),
        },
        "speed": speed,
        "tick_s": tick_s,
    }
    with reporting_errors():
        if lengths is not None:
            given["lengths"] = _read_yaml(lengths)
        parsed = _options(given)
        keep_loaded()
        asyncio.run(_serve(parsed, host, port))


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

    serving = asyncio.create_task(_until_cancelled(options, host, port))
    for number in (signal.SIGTERM, signal.SIGINT):  # also while it has not begun to listen
        asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


async def _until_cancelled(options: "SimulatedOptions", host: str, port: int) -> None:
    import asyncio

    from orchestrrl.lab.simulated_engine.server import SimulatedServer

    try:
        async with SimulatedServer(options, host=host, port=port) as server:
            typer.echo(server.url)
            await asyncio.Event().wait()
    except OSError as error:
        raise Permanent(f"cannot listen on {host}:{port}: {error}") from error


def register(app: typer.Typer) -> None:
    example = "Example: `orchestrrl engine simulated --port 8100 --speed 30 --max-num-seqs 48`"
    group(app, "engine").command(epilog=example)(simulated)
