"""The JSON of vLLM 0.32's endpoints for tokens and responses, as recorded from a server. `shape_of` reduces an answer
to its keys and types."""

from typing import Any


def shape_of(value: Any) -> Any:
    """Return a JSON value with each scalar replaced by the name of its type, and each list by its first item."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape_of(item) for item in value[:1]]
    return "null" if value is None else type(value).__name__


def logprobs_shape(content: list[dict[str, Any]]) -> Any:
    """Return the shape of log-probabilities with text, taken from a token whose text is not empty."""
    return shape_of([entry for entry in content if entry["bytes"]])


def _shape(**fields: Any) -> dict[str, Any]:
    return fields


def _nulls(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, "null")


_TOTALS = _shape(prompt_tokens="int", total_tokens="int", completion_tokens="int")
_USAGE = {**_TOTALS, **_nulls("prompt_tokens_details", "completion_tokens_details")}
_TOKEN = _shape(token_id="int", logprob="float", rank="int")
_TEXT_TOKEN = _shape(token="str", logprob="float", bytes=["int"])
TEXT_LOGPROBS = [{**_TEXT_TOKEN, "top_logprobs": [_TEXT_TOKEN]}]
TOKEN_LOGPROBS = {"content": [{**_TOKEN, "top_logprobs": [_TOKEN]}]}
_VERSIONS = [_shape(version="str", start="int", end="int")]

GENERATE_CHOICE = {
    **_shape(index="int", finish_reason="str", stop_reason="null", token_ids=["int"], weight_versions=_VERSIONS),
    **_nulls("routed_experts", "sampling_mask", "logprobs"),
}
GENERATED = {
    **_shape(request_id="str", model="str", created="int", usage=_USAGE, output_mode="str", choices=[GENERATE_CHOICE]),
    **_nulls("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics"),
    **_nulls("kv_transfer_params", "ec_transfer_params"),
}
GENERATE_EVENT = _shape(request_id="str", usage="null", output_mode="str", choices=[GENERATE_CHOICE])
GENERATE_RUNNING_CHOICE = {**GENERATE_CHOICE, "finish_reason": "null", "weight_versions": "null"}
GENERATE_USAGE_EVENT = _shape(request_id="str", usage=_TOTALS, output_mode="str", choices=[])

SAMPLING_PARAMS = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), "float"),
    "temperature": "float",
    **_shape(stop=[], stop_token_ids=[], bad_words=[], output_kind="int"),
    **_shape(skip_clone="bool", skip_reading_prefix_cache="bool"),
}
SAMPLED_PARAMS = {**SAMPLING_PARAMS, "top_p": "float", "min_p": "float"}  # without greedy decoding
RENDERED = {
    **_shape(request_id="str", token_ids=["int"], sampling_params=SAMPLING_PARAMS, output_mode="str"),
    **_shape(stream="bool", priority="int"),
    **_nulls("token_offsets", "features", "content_parts", "model", "reasoning_ended", "reasoning_parser_kwargs"),
    **_nulls("return_token_ids", "stream_options", "cache_salt", "kv_transfer_params", "ec_transfer_params"),
}

_DERENDERED = {
    **_shape(id="str", object="str", created="int", model="str", usage=_USAGE),
    **_nulls("service_tier", "system_fingerprint", "kv_transfer_params", "ec_transfer_params", "metrics"),
}
_DERENDERED_CHOICE = {
    **_shape(index="int", finish_reason="str"),
    **_nulls("logprobs", "stop_reason", "token_ids", "routed_experts"),
}
_MESSAGE = {
    **_shape(role="str", content="str"),
    **_nulls("refusal", "annotations", "audio", "function_call", "reasoning"),
}
DERENDERED_CHAT = {
    **_DERENDERED,
    **_nulls("prompt_logprobs", "prompt_token_ids", "prompt_text"),
    "choices": [{**_DERENDERED_CHOICE, "message": _MESSAGE}],
}
DERENDERED_COMPLETION = {
    **_DERENDERED,
    "choices": [{**_DERENDERED_CHOICE, "text": "str", **_nulls("prompt_logprobs", "prompt_token_ids")}],
}

_TEXT_PART = _shape(annotations=[], text="str", type="str", logprobs="null")
_ITEM = _shape(id="str", content=[_TEXT_PART], role="str", status="str", type="str", phase="null")
_RESPONSES_USAGE = _shape(
    input_tokens="int",
    input_tokens_details=_shape(
        cached_tokens="int", cache_write_tokens="int", input_tokens_per_turn=[], cached_tokens_per_turn=[]
    ),
    output_tokens="int",
    output_tokens_details=_shape(
        reasoning_tokens="int", tool_output_tokens="int", output_tokens_per_turn=[], tool_output_tokens_per_turn=[]
    ),
    total_tokens="int",
)
RESPONSE = {
    **_shape(id="str", created_at="int", model="str", object="str", status="str", output=[_ITEM], tools=[]),
    **_shape(incomplete_details={"reason": "str"}, usage=_RESPONSES_USAGE, max_output_tokens="int"),
    **_shape(parallel_tool_calls="bool", background="bool"),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), "float"),
    **dict.fromkeys(("tool_choice", "service_tier", "truncation"), "str"),
    **_nulls("instructions", "metadata", "max_tool_calls", "previous_response_id", "prompt", "reasoning", "text"),
    **_nulls("top_logprobs", "user", "kv_transfer_params", "ec_transfer_params", "input_messages", "output_messages"),
}
RESPONSE_EVENTS = (
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
)
_EVENT = _shape(type="str", sequence_number="int")
_PART_EVENT = {**_EVENT, **_shape(content_index="int", item_id="str", output_index="int")}
RESPONSE_EVENT_SHAPES = {
    "response.output_item.added": {
        **_EVENT,
        **_shape(item={**_ITEM, "content": []}, output_index="int"),
    },
    "response.content_part.added": {**_PART_EVENT, "part": {**_TEXT_PART, "logprobs": []}},
    "response.output_text.delta": {**_PART_EVENT, **_shape(delta="str", logprobs=[])},
    "response.output_text.done": {**_PART_EVENT, **_shape(text="str", logprobs=[])},
    "response.content_part.done": {**_PART_EVENT, "part": _TEXT_PART},
    "response.output_item.done": {**_EVENT, **_shape(item=_ITEM, output_index="int")},
    "response.completed": {**_EVENT, "response": RESPONSE},
}
