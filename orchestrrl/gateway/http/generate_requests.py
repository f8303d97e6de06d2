"""Parse requests to vLLM's endpoint /inference/v1/generate, which have tokens as their prompt and the sampling
parameters in an object of their own. The functions have no side effects."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.gateway.http.field_types import MOST_ID, is_token_ids, shown, with_types
from orchestrrl.gateway.moves.generate_fields import OUTPUT_MODES, SAMPLING_PARAMS, is_multimodal, sampling_params
from orchestrrl.gateway.moves.reseed import seed_of


def generate_faults(body: Mapping[str, Any], faulty: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the faults of the body without those of its sampling parameters. Each fault is a field and a message.
    `faulty` names the fields whose faults are already known."""
    if body.get(SAMPLING_PARAMS) is None:
        yield SAMPLING_PARAMS, "must be an object, got nothing"
    ids = body.get("token_ids")
    if "token_ids" not in faulty and (ids is None or not is_token_ids(ids)):
        wanted = f"must be a non-empty list of token ids below {MOST_ID}"
        yield "token_ids", f"{wanted}, got {'nothing' if ids is None else shown(ids)}"
    mode = body.get("output_mode")
    if "output_mode" not in faulty and mode not in (None, *OUTPUT_MODES):
        yield "output_mode", f"must be one of {', '.join(OUTPUT_MODES)}, got {shown(mode)}"


def typed_generate(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with integer fields converted to int and flags converted to bool, in the body and in its sampling
    parameters. The body must be valid."""
    endpoint = CompletionEndpoint.GENERATE
    return {**with_types(endpoint, body), SAMPLING_PARAMS: with_types(endpoint, sampling_params(body))}


def sample_body(shared: Mapping[str, Any], sample: int | None) -> dict[str, Any]:
    """Return the body for one sample. `shared` is the body of all samples. `sample` is the index of the sample, which
    is added to the seed as in vLLM, or None if there is one sample."""
    sampling = {name: value for name, value in sampling_params(shared).items() if name != "n"}
    if sample is not None and (seed := seed_of(sampling)) is not None:
        sampling["seed"] = seed + sample
    return {**shared, SAMPLING_PARAMS: sampling}


def whole_prompt(body: Mapping[str, Any]) -> list[int] | None:
    """Return the prompt's token ids, or None if images, audio or video add tokens to them."""
    ids: list[int] = body["token_ids"]
    return None if is_multimodal(body) else ids
