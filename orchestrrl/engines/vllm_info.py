"""Parse a vLLM server's `/server_info?config_format=json` and its metrics page, without I/O.

The presence of an endpoint does not show that a feature works: `/sleep` and `/scale_elastic_ep` exist even if the
engine supports neither. On CPU, `/sleep` returns 200 and frees nothing.
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
TIMEOUT_S = 60.0  # for the first answer, the server collects facts about its host, which takes seconds

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
GENERATED = "vllm:generation_tokens_total"
PROMPT = "vllm:prompt_tokens_total"
PREEMPTIONS = "vllm:num_preemptions_total"
CACHE_CONFIG = "vllm:cache_config_info"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"  # absent in some versions
_NAMES = (RUNNING, WAITING, KV_USAGE, GENERATED, PROMPT, PREEMPTIONS, CACHE_CONFIG, BY_SOURCE)
_SAMPLES = tuple(f"{name}{{" for name in _NAMES)


@dataclass(frozen=True, slots=True)
class VllmServerInfo:
    """The configuration of a vLLM server. A field is also None or False if the server does not report its value. Only
    the layout can change while the server runs."""

    max_sequences: int | None = None  # sum over the server's replicas
    replicas: int | None = None  # data-parallel replicas including those of other servers; `serving` has its own
    sleep: bool = False  # --enable-sleep-mode
    elastic_ep: bool = False  # --enable-elastic-ep
    weight_backend: str | None = None  # --weight-transfer-config
    serving: ServingFacts = field(default_factory=ServingFacts)
    routed_experts: bool = False  # --enable-return-routed-experts
    paths: frozenset[str] = frozenset()  # paths of its API
    token_ids: bool = False  # requests may set return_token_ids
    derenders_after_prompt: bool = False  # derender decodes tokens as the continuation of a prompt, like the engine


def read_server_info(answer: Mapping[str, Any]) -> VllmServerInfo:
    """Parse an answer of /server_info. Raises ValueError, KeyError, TypeError or AttributeError if the answer is
    malformed."""
    config = answer["vllm_config"]
    if not isinstance(config, dict):  # some versions do not return JSON here
        return VllmServerInfo()
    parallel = config.get("parallel_config", {})
    seats = config["scheduler_config"]["max_num_seqs"]
    return VllmServerInfo(
        max_sequences=int(seats) * _replicas_served(parallel),  # vLLM's limit is per replica
        replicas=ranks(parallel.get("data_parallel_size")),
        sleep=config.get("model_config", {}).get("enable_sleep_mode") is True,
        elastic_ep=parallel.get("enable_elastic_ep") is True,
        weight_backend=(config.get("weight_transfer_config") or {}).get("backend"),
        serving=_serving(config, answer.get("system_env")),
        # The section depends on the version.
        routed_experts=any(
            (config.get(part) or {}).get("enable_return_routed_experts") is True
            for part in ("aux_output_config", "model_config")
        ),
    )


def _serving(config: Mapping[str, Any], system: object) -> ServingFacts:
    """Return the facts that determine the engine's step times. `system` has vLLM's facts about its host. It is None if
    the server's version does not report them."""
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
    """Return the start time of the server process from its metrics page. It differs between successive processes at one
    URL. Returns "" if the page lacks the start time, for example because several processes act as one server."""
    return min(_after(metrics_page, BEGAN_AT), default="")


def server_identity(metrics_page: str) -> str:
    """Return an identity of the server process: its start time (10 ms resolution) and the creation time of its token
    counter (1 us resolution). All readers get the same identity for one process, regardless of the address that they
    use.

    Returns "" if either time is missing. This is the case if several processes act as one server, or if the server's
    environment disables series with creation times. The start time alone does not distinguish servers that were started
    together.
    """
    began = began_at(metrics_page)
    created = min(_after(metrics_page, COUNTED_SINCE), default="")  # minimum over the replicas in the process
    identity = f"{began}/{created}"
    return identity if began and created and len(identity) <= MOST_IDENTITY and identity.isprintable() else ""


def _after(metrics_page: str, series: str) -> list[str]:
    return [line.rpartition(" ")[2] for line in metrics_page.splitlines() if line.startswith(series)]


def parse_metrics(text: str) -> EngineSample:
    """Parse vLLM's `/metrics` page. Values are totals over the data-parallel engines of one server, except KV usage,
    which is their mean.

    Raises ValueError or KeyError if a series is missing or has an invalid value.
    """
    # Most of the page consists of histograms, which are expensive to parse and not needed.
    wanted = "\n".join(line for line in text.splitlines() if line.startswith(_SAMPLES))
    values: dict[str, list[float]] = {}
    capacity_tokens, loaded_tokens = 0, None
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            if not (math.isfinite(sample.value) and sample.value >= 0):
                raise ValueError(f"{sample.name}: must be a finite number >= 0, got {sample.value}")
            values.setdefault(sample.name, []).append(sample.value)
            if sample.name == CACHE_CONFIG:
                # Each engine of a server has a line, and each line counts the blocks of all engines.
                line_tokens = int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"])
                capacity_tokens = max(capacity_tokens, line_tokens)
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
    """Return whether any replica is asleep. Return True if the page lacks the sleep state, because this function is
    called only after `/is_sleeping` has reported a sleeping or paused engine."""
    lines = [line for line in metrics_page.splitlines() if line.startswith(f"{SLEEP_STATE}{{")]
    awake = [float(line.rpartition(" ")[2]) for line in lines if 'sleep_state="awake"' in line]
    return min(awake, default=0.0) == 0


def _replicas_served(parallel: Mapping[str, Any]) -> int:
    """Return the number of data-parallel replicas that the server itself runs. It runs all replicas of the deployment,
    unless a load balancer distributes requests over several servers."""
    outside = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
    return int(parallel.get("data_parallel_size_local" if outside else "data_parallel_size") or 1)
