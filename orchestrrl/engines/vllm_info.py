"""Read what a vLLM server tells of itself, in `/server_info?config_format=json` and in its metrics. Pure.

Its endpoints do not tell: `/sleep` and `/scale_elastic_ep` are there also where the engine cannot do either. On CPU,
`/sleep` even answers 200, and frees nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from orchestrrl.engines.base import EngineSample
from orchestrrl.engines.handover import EXTERNAL_SOURCE
from orchestrrl.engines.serving import CPU, ServingFacts, gpu_of, kv_bits, listed_gpus, named, ranks, weight_bits

PATH = "/server_info?config_format=json"
MOST_IDENTITY = 256  # characters
BEGAN_AT = "process_start_time_seconds "
COUNTED_SINCE = "vllm:generation_tokens_created{"
SLEEP_STATE = "vllm:engine_sleep_state"
TIMEOUT_S = 60.0  # the first answer collects facts about the machine, which takes seconds

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
GENERATED = "vllm:generation_tokens_total"
PROMPT = "vllm:prompt_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
CACHE_CONFIG = "vllm:cache_config_info"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"  # not every version has it
_NAMES = (RUNNING, WAITING, KV_USAGE, GENERATED, PROMPT, PREEMPTIONS, CACHE_CONFIG, BY_SOURCE)
_SAMPLES = tuple(f"{name}{{" for name in _NAMES)


@dataclass(frozen=True, slots=True)
class VllmServerInfo:
    """What is None or False was not told, or is not so. All but the layout stays while the server runs."""

    max_sequences: int | None = None  # of the whole server
    replicas: int | None = None  # data-parallel ones, those of other servers included: `serving` has its own
    sleep: bool = False  # --enable-sleep-mode
    elastic_ep: bool = False  # --enable-elastic-ep
    weight_backend: str | None = None  # --weight-transfer-config
    serving: ServingFacts = field(default_factory=ServingFacts)
    routed_experts: bool = False  # --enable-return-routed-experts
    paths: frozenset[str] = frozenset()  # of its API
    token_ids: bool = False  # requests may ask for those of answers


def read_server_info(answer: Mapping[str, Any]) -> VllmServerInfo:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is no such answer."""
    config = answer["vllm_config"]
    if not isinstance(config, dict):  # versions that know no JSON here
        return VllmServerInfo()
    parallel = config.get("parallel_config", {})
    seats = config["scheduler_config"]["max_num_seqs"]
    return VllmServerInfo(
        max_sequences=int(seats) * _replicas_served(parallel),  # vLLM counts them for each replica
        replicas=ranks(parallel.get("data_parallel_size")),
        sleep=config.get("model_config", {}).get("enable_sleep_mode") is True,
        elastic_ep=parallel.get("enable_elastic_ep") is True,
        weight_backend=(config.get("weight_transfer_config") or {}).get("backend"),
        serving=_serving(config, answer.get("system_env")),
        # Versions have it in the one or the other.
        routed_experts=any(
            (config.get(part) or {}).get("enable_return_routed_experts") is True
            for part in ("aux_output_config", "model_config")
        ),
    )


def _serving(config: Mapping[str, Any], system: object) -> ServingFacts:
    """`system`: what vLLM collected of its host, absent in some versions."""
    model, parallel, cache = (_section(config, name) for name in ("model_config", "parallel_config", "cache_config"))
    device = named(_section(config, "device_config").get("device"))
    gpu, why = "", ""
    if device.startswith(CPU):
        why = "the engine runs on CPUs"
    elif isinstance(system, dict) and (listed := listed_gpus(system.get("nvidia_gpu_models"))):
        gpu, why = gpu_of(listed)
    return ServingFacts(
        model=named(model.get("model")),
        weight_bits=weight_bits(model.get("dtype"), model.get("quantization")),
        kv_bits=kv_bits(cache.get("cache_dtype")),
        tp=ranks(parallel.get("tensor_parallel_size")),
        pp=ranks(parallel.get("pipeline_parallel_size")),
        dp=ranks(_replicas_served(parallel)) if "data_parallel_size" in parallel else None,
        ep=flag if isinstance(flag := parallel.get("enable_expert_parallel"), bool) else None,
        device=device,
        gpu=gpu,
        gpu_detail=why,
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def began_at(metrics_page: str) -> str:
    """When the server's process was started, as its metrics tell it: two that have one URL in turn differ in it. Empty
    where it is not told, as by several processes that answer as one server."""
    return min(_after(metrics_page, BEGAN_AT), default="")


def server_identity(metrics_page: str) -> str:
    """Identify the server's process: by when it was started, which is told to 10 ms, and when it began to count tokens,
    which is told to a microsecond. Whoever reads the page of one process reads the same, by whatever address.

    Empty where either is missing, as where several processes answer as one server, or where its environment
    switches such series off: the first alone does not tell apart servers that were started together.
    """
    began = began_at(metrics_page)
    created = min(_after(metrics_page, COUNTED_SINCE), default="")  # of the replicas in the process
    identity = f"{began}/{created}"
    return identity if began and created and len(identity) <= MOST_IDENTITY and identity.isprintable() else ""


def _after(metrics_page: str, series: str) -> list[str]:
    return [line.rpartition(" ")[2] for line in metrics_page.splitlines() if line.startswith(series)]


def parse_metrics(text: str) -> EngineSample:
    """vLLM's `/metrics`, summed over the engines of one server (data parallelism), with the mean of their KV usage.

    Raises ValueError or KeyError for a page that lacks any of them, or has what is no count.
    """
    # Most of the page is histograms, which cost much to parse and say nothing here.
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_SAMPLES))
    values: dict[str, list[float]] = {}
    capacity_tokens, loaded_tokens = 0, None
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if not (math.isfinite(sample.value) and sample.value >= 0):
                raise ValueError(f"{sample.name}: must be a finite number >= 0, got {sample.value}")
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == CACHE_CONFIG:
                # Each of a server's engines has a line, and in each line are the blocks of them all.
                told_tokens = int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"])
                capacity_tokens = max(capacity_tokens, told_tokens)
            elif sample.name == BY_SOURCE and sample.labels["source"] == EXTERNAL_SOURCE:
                loaded_tokens = (loaded_tokens or 0) + int(sample.value)
    return EngineSample(
        running=int(sum(values[RUNNING])),
        waiting=int(sum(values[WAITING])),
        kv_usage_fraction=sum(values[KV_USAGE]) / len(values[KV_USAGE]),
        kv_capacity_tokens=capacity_tokens,
        generation_tokens_total=int(sum(values[GENERATED])),
        prompt_tokens_total=max(0, int(sum(values[PROMPT])) - (loaded_tokens or 0)),
        preemptions_total=int(sum(values[PREEMPTIONS])),
        loaded_tokens_total=loaded_tokens,
        server=server_identity(text),
    )


def is_asleep(metrics_page: str) -> bool:
    """Whether any replica is; so where the page does not tell, since `/is_sleeping` did."""
    lines = [line for line in metrics_page.splitlines() if line.startswith(f"{SLEEP_STATE}{{")]
    awake = [float(line.rpartition(" ")[2]) for line in lines if 'sleep_state="awake"' in line]
    return min(awake, default=0.0) == 0


def _replicas_served(parallel: Mapping[str, Any]) -> int:
    """By this server: all of them, unless a balancer before several servers knows of the others."""
    outside = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
    return int(parallel.get("data_parallel_size_local" if outside else "data_parallel_size") or 1)
