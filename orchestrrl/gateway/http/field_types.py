"""Parse the JSON of a request's body, and check that known fields have the types that engines expect. The functions
have no side effects.

A body that passes these checks can be sent to any engine: its text is valid Unicode, its numbers are finite, and it is
not nested too deeply to be serialised again. The engine itself checks and reports invalid ranges and combinations.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from orchestrrl.core.errors import cut, few, path_of
from orchestrrl.engines.base import CompletionEndpoint

MOST_DEPTH = 128  # nesting depth of objects and lists
MOST_FAULTS = 64  # faults reported at most
MOST_ID = 2**32  # token ids are below this


_values = reprlib.Repr()
_values.maxstring = _values.maxother = _values.maxlong = 60


class HttpRefusal(ValueError):
    """Raised to refuse a request with HTTP status `status`. `param` names the field or header at fault."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.headers = headers or {}  # headers of the response


def name_set(names: str) -> frozenset[str]:
    """Return the whitespace-separated names as a set."""
    return frozenset(names.split())


def read_json(data: bytes) -> Any:
    """Return the parsed JSON document. Raises HttpRefusal if `data` is not JSON or has values that cannot be forwarded
    to an engine."""
    try:
        text = data.decode(json.detect_encoding(data))
        value = json.loads(text)
    except RecursionError as error:
        wrong = f"the body cannot be parsed: it must be nested at most {MOST_DEPTH} levels deep"
        raise HttpRefusal(wrong) from error
    except ValueError as error:
        raise HttpRefusal(f"the body is not valid JSON: {error}") from error
    raise_faults(_unfit(value, (), escapes="\\ud" in text or "\\uD" in text))
    return value


def shown(value: object) -> str:
    """Return a short representation of a value for error messages."""
    return cut(_values.repr(value), 80)


def raise_faults(faults: Iterable[tuple[str, str]]) -> None:
    """Raise HttpRefusal with the faults if there are any. Each fault consists of the path of a field and a message."""
    if found := list(islice(faults, MOST_FAULTS)):
        raise HttpRefusal(few([f"{path}: {wrong}" for path, wrong in found]), found[0][0])


def _unfit(value: Any, path: tuple[int | str, ...], *, escapes: bool) -> Iterator[tuple[str, str]]:
    """Yield the path and message of each fault that makes the value unsuitable for any engine. `path` is the position
    of the value in the body. `escapes` is True if the text may contain lone surrogates."""
    kind = type(value)
    if kind is dict or kind is list:
        if len(path) >= MOST_DEPTH:
            yield path_of(path[:1]), f"must be nested at most {MOST_DEPTH} levels deep, got {shown(value)}"
        elif kind is dict:
            for name, item in value.items():
                if escapes and not _is_unicode(name):
                    yield path_of((*path, name)), f"must have a name without lone surrogates, got {shown(name)}"
                if type(item) is not int:
                    yield from _unfit(item, (*path, name), escapes=escapes)
        elif not set(map(type, value)) <= {int}:  # lists of token ids are long
            for index, item in enumerate(value):
                yield from _unfit(item, (*path, index), escapes=escapes)
    elif kind is float and not math.isfinite(value):
        yield path_of(path), f"must be a finite number, got {value!r}"
    elif escapes and kind is str and not _is_unicode(value):
        yield path_of(path), f"must be text without lone surrogates, got {shown(value)}"


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- types of fields -------------------------------------------------------------------------------------------------


def is_whole(value: object) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def is_token_ids(items: list[Any]) -> bool:
    """Return whether the list is a prompt: not empty, and of integers that an array can hold. The engine checks the
    ids."""
    return set(map(type, items)) == {int} and min(items) >= 0 and max(items) < MOST_ID


def _of(*kinds: type) -> Callable[[object], bool]:
    return lambda value: type(value) in kinds


def _list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: type(value) is list and set(map(type, value)) <= {kind}


def _is_flag(value: object) -> bool:
    return type(value) is bool or (type(value) is int and value in (0, 1))


def _is_biases(value: object) -> bool:
    return type(value) is dict and set(map(type, value.values())) <= {int, float}


def _is_messages(value: object) -> bool:
    return type(value) is list and all(type(item) is dict and _is_message(item) for item in value)


def _is_message(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    parts = type(content) is list and all(type(part) in (dict, str) for part in content)  # vLLM also accepts texts
    return type(message.get("role")) is str and (content is None or type(content) is str or parts)


_Type = tuple[str, Callable[[object], bool]]
_WHOLE: _Type = ("a whole number", is_whole)
_NUMBER: _Type = ("a number", _of(int, float))
_FLAG: _Type = ("true or false", _is_flag)
_TEXT: _Type = ("text", _of(str))
_TEXTS: _Type = ("a list of texts", _list_of(str))
_IDS: _Type = ("a list of token ids", _list_of(int))
_OBJECT: _Type = ("an object", _of(dict))
_OBJECTS: _Type = ("a list of objects", _list_of(dict))


def _fields_of(kind: _Type, names: str) -> dict[str, _Type]:
    return dict.fromkeys(names.split(), kind)


_COMMON_TYPES: Mapping[str, _Type] = {
    **_fields_of(
        _WHOLE,
        """
        best_of group_enough max_completion_tokens max_tokens max_version_lag min_tokens n priority prompt_logprobs
        routed_experts_prompt_start seed stream_interval thinking_token_budget top_k top_logprobs
        truncate_prompt_tokens
        """,
    ),
    **_fields_of(
        _NUMBER, "frequency_penalty length_penalty min_p presence_penalty repetition_penalty temperature top_p"
    ),
    **_fields_of(
        _FLAG,
        """
        add_generation_prompt add_special_tokens continue_final_message echo ignore_eos include_reasoning
        include_stop_str_in_output parallel_tool_calls return_policy_versions return_prompt_text return_token_ids
        return_token_offsets return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stream
        use_beam_search watermarking
        """,
    ),
    **_fields_of(_TEXT, "cache_salt chat_template model request_id session_id suffix user"),
    **_fields_of(
        _OBJECT,
        """
        chat_template_kwargs ec_transfer_params kv_transfer_params media_io_kwargs mm_processor_kwargs
        repetition_detection response_format stream_options structured_outputs vllm_xargs
        """,
    ),
    **_fields_of(_IDS, "allowed_token_ids logprob_token_ids stop_token_ids"),
    "bad_words": _TEXTS,
    "stop": ("text or a list of texts", lambda value: _TEXT[1](value) or _TEXTS[1](value)),
    "logit_bias": ("an object of numbers", _is_biases),
    "tools": _OBJECTS,
    "documents": _OBJECTS,
    "tool_choice": ("text or an object", _of(str, dict)),
}
_TYPES: Mapping[CompletionEndpoint, Mapping[str, _Type]] = {
    CompletionEndpoint.COMPLETIONS: {**_COMMON_TYPES, "logprobs": _WHOLE},
    CompletionEndpoint.CHAT: {
        **_COMMON_TYPES,
        "logprobs": _FLAG,
        "messages": ("a list of objects with a role and a content", _is_messages),
    },
    # The fields of the body and of its object `sampling_params`.
    CompletionEndpoint.GENERATE: {
        **_COMMON_TYPES,
        "logprobs": _WHOLE,
        **_fields_of(_WHOLE, "prompt_logprob_start"),
        **_fields_of(_FLAG, "detokenize flat_logprobs reasoning_ended skip_clone skip_reading_prefix_cache"),
        **_fields_of(_OBJECT, "extra_args features reasoning_parser_kwargs sampling_params"),
        **_fields_of(_IDS, "token_ids trace_decode_token_ids"),
        "content_parts": _OBJECTS,
        "output_mode": _TEXT,
    },
}

TYPED_FIELDS = frozenset(_TYPES[CompletionEndpoint.COMPLETIONS]) | frozenset(_TYPES[CompletionEndpoint.CHAT])


def type_faults(endpoint: CompletionEndpoint, body: Mapping[str, Any]) -> dict[str, str]:
    """Return an error message, by field name, for each known field whose type differs from the type that engines
    expect. A null value is treated as absent, and unknown fields are ignored."""
    faults = {}
    for name, value in body.items():
        expected = _TYPES[endpoint].get(name)
        if expected is not None and value is not None and not expected[1](value):
            faults[name] = f"must be {expected[0]}, got {shown(value)}"
    return faults


def with_types(endpoint: CompletionEndpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with integer fields converted to int and flags converted to bool. The body must be valid. The
    conversion is needed because engines also accept 16.0 as an integer and 1 as a flag."""
    read = dict(body)
    for name, value in body.items():
        expected = _TYPES[endpoint].get(name)
        if expected is _WHOLE and type(value) is float:
            read[name] = int(value)
        elif expected is _FLAG and value is not None:
            read[name] = bool(value)
    return read
