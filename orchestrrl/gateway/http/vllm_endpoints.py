"""The endpoints of vLLM's HTTP server, and how the gateway serves each. This module performs no I/O.

The table names every endpoint that the gateway passes through. An engine's other endpoints are not passed through,
because they might change one engine of the fleet. Names and behaviour are those of vLLM 0.32 (vllm/entrypoints).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from orchestrrl.gateway.http.field_types import name_set


class EndpointHandling(StrEnum):
    """A way in which the gateway serves an endpoint of vLLM."""

    GATEWAY = "gateway"  # the gateway answers, and requests have records in its ledger
    MODEL = "model"  # passed to one engine; it runs the model, so it counts as load and waits for the pause barrier
    STATELESS = "stateless"  # passed to one engine at any time; it neither runs the model nor changes the engine
    RESPONSE = "response"  # passed to the engine that holds the response
    WORLD_SIZE = "world size"  # the sum over the fleet's engines
    LOAD = "load"  # the gateway's own number of requests
    REFUSED = "refused"  # the fleet does not offer it


@dataclass(frozen=True, slots=True)
class VllmEndpoint:
    """One endpoint. `path` is a template as in an engine's OpenAPI document."""

    path: str
    handling: EndpointHandling
    methods: tuple[str, ...] = ("POST",)
    instead: str = ""  # what to use instead of a refused endpoint


RESPONSES = "/v1/responses"
ONE_RESPONSE = "/v1/responses/{response_id}"
_CANCEL = "/v1/responses/{response_id}/cancel"

_PATHS: Mapping[EndpointHandling, frozenset[str]] = {
    EndpointHandling.GATEWAY: name_set(
        "/v1/completions /v1/chat/completions /inference/v1/generate /v1/models /health /metrics /version"
    ),
    EndpointHandling.MODEL: name_set(
        """
        /v1/responses /v1/messages /v1/chat/completions/batch /cohere/v2/chat /v1/systemone /generative_scoring
        /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank
        /v1/audio/transcriptions /v1/audio/translations
        """
    ),
    EndpointHandling.STATELESS: name_set(
        """
        /tokenize /detokenize /tokenizer_info /server_info /v1/messages/count_tokens
        /v1/completions/render /v1/chat/completions/render /v1/messages/render /v1/responses/render
        /cohere/v2/chat/render /v1/completions/derender /v1/chat/completions/derender
        """
    ),
    EndpointHandling.RESPONSE: frozenset({ONE_RESPONSE, _CANCEL}),
    EndpointHandling.WORLD_SIZE: name_set("/get_world_size"),
    EndpointHandling.LOAD: name_set("/load"),
}
_READ = name_set(
    """
    /v1/models /health /metrics /version /load /tokenizer_info /server_info /get_world_size /is_paused /is_sleeping
    /weight_info /fault_tolerance/status /kv_event_sources /v1/realtime /docs
    """
) | {ONE_RESPONSE}

# Paths that the fleet does not offer, by what to use instead.
_INSTEAD: Mapping[str, frozenset[str]] = {
    "use /orchestrrl/pause, /orchestrrl/resume and /orchestrrl/barrier of the operator API, or `orchestrrl pause`,"
    " `orchestrrl resume` and `orchestrrl barrier`": name_set("/pause /resume /is_paused"),
    "use /orchestrrl/cancel of the operator API, or `orchestrrl cancel`": name_set(
        "/abort_requests /inference/v1/abort_requests"
    ),
    "publish weights to the whole fleet, or pause it with `orchestrrl pause` and update each engine": name_set(
        """
        /init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update /start_draft_weight_update
        /update_weights /finish_weight_update /update_weight_version /weight_checker
        """
    ),
    "`orchestrrl engines list` shows the weights of each engine": name_set("/weight_info"),
    "`orchestrrl pause` discards the KV cache of every engine": name_set("/reset_prefix_cache"),
    "`orchestrrl redeploy` changes the fleet's parallelism": name_set("/scale_elastic_ep /is_scaling_elastic_ep"),
    "load the adapter on each engine; the gateway then routes requests by their model": name_set(
        "/v1/load_lora_adapter /v1/unload_lora_adapter"
    ),
    "send the request to the endpoint of its kind, for example /v1/completions": name_set("/invocations"),
    "use /health": name_set("/ping"),
    "call the engine itself": name_set(
        """
        /sleep /wake_up /is_sleeping /release_kv_cache_memory /reset_mm_cache /reset_encoder_cache /collective_rpc
        /start_profile /stop_profile /fault_tolerance/apply /fault_tolerance/status /kv_event_sources /v1/realtime /docs
        """
    ),
}


def _methods(path: str) -> tuple[str, ...]:
    return ("GET", "POST") if path == "/ping" else ("GET",) if path in _READ else ("POST",)


ENDPOINTS: Mapping[str, VllmEndpoint] = {
    **{
        path: VllmEndpoint(path, handling, _methods(path))
        for handling, paths in _PATHS.items()
        for path in sorted(paths)
    },
    **{
        path: VllmEndpoint(path, EndpointHandling.REFUSED, _methods(path), instead)
        for instead, paths in _INSTEAD.items()
        for path in sorted(paths)
    },
}


def path_hint(path: str) -> str:
    """Return a hint for a path without an endpoint, or "" if no endpoint differs from it by one `/v1` only."""
    near = next((other for other in (f"/v1{path}", path.removeprefix("/v1")) if other in ENDPOINTS), None)
    return f"; the endpoint is {near}: check /v1 in the base URL" if near else ""


def find_endpoint(path: str) -> tuple[VllmEndpoint, str] | None:
    """Return the endpoint at a path, and the id of the response that the path names, or "". Return None if vLLM has no
    endpoint there."""
    if (endpoint := ENDPOINTS.get(path)) is not None and "{" not in path:
        return endpoint, ""
    prefix, _, rest = path.partition(f"{RESPONSES}/")
    response_id, _, action = rest.partition("/")
    if prefix or not response_id or action not in ("", "cancel") or path.endswith("/"):
        return None
    return ENDPOINTS[_CANCEL if action else ONE_RESPONSE], response_id
