"""Format responses of the simulated engine: vLLM's JSON for completions and chats, and its metrics page. The
module has no side effects."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.engines.handover import EXTERNAL_SOURCE
from orchestrrl.engines.vllm_info import BEGAN_AT, COUNTED_SINCE
from orchestrrl.lab.simulated_engine.endings import AnswerPart, ResponseText
from orchestrrl.lab.simulated_engine.requests import SimulatedCompletion
from orchestrrl.lab.simulated_engine.runtime import Runtime
from orchestrrl.lab.simulated_engine.sampling import SimulatedRequest
from orchestrrl.lab.simulated_engine.tokens import TokenModel, likeliest

DONE = b"data: [DONE]\n\n"


class TokenFormatter:
    """Formats tokens and log-probabilities in OpenAI's JSON. `as_ids` replaces the text of tokens by `token_id:N`."""

    def __init__(self, model: TokenModel, *, as_ids: bool = False) -> None:
        self._model = model
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._model.detokenize([token])

    def chat_logprobs(self, part: AnswerPart, top_logprobs: int) -> dict[str, Any]:
        """Return the log-probabilities of a chat, with the `top_logprobs` first alternatives of each token."""
        return {"content": [self._chat_entry(*pair, top_logprobs) for pair in _pairs(part)]}

    def _chat_entry(self, token: int, logprob: float, top_logprobs: int) -> dict[str, Any]:
        tops = self.alternatives(token, logprob, top_logprobs)[:top_logprobs]
        # As in vLLM, `bytes` is the text of the generated token even if `token` is its id.
        return {
            **logprob_entry(self.text(token), logprob, self._model.detokenize([token])),
            "top_logprobs": [logprob_entry(text, each) for text, each in tops],
        }

    def completion_logprobs(self, part: AnswerPart, top_logprobs: int, text_offset: int) -> dict[str, Any]:
        """Return the log-probabilities of a completion. `text_offset` is the length of the text before the part."""
        tokens = [self.text(token) for token in part.token_ids]
        return {
            "text_offset": list(accumulate(map(len, tokens[:-1]), initial=text_offset)) if tokens else [],
            "token_logprobs": part.logprobs,
            "tokens": tokens,
            # vLLM's dictionary includes the chosen token in addition to the alternatives.
            "top_logprobs": [dict(self.alternatives(*pair, top_logprobs)) for pair in _pairs(part)],
        }

    def alternatives(self, token: int, logprob: float, count: int) -> list[tuple[str, float]]:
        found = likeliest(token, logprob, count, self._model.vocab_size)
        return [(self.text(each), its_logprob) for each, its_logprob, _ in found]

    def prompt_logprobs(self, context: Sequence[int], alternatives: int) -> list[dict[str, Any] | None]:
        """Return one dictionary of log-probabilities per token of the prompt, or None for the first token. If
        `alternatives` is not 0, each dictionary also contains the most likely token."""
        rows: list[dict[str, Any] | None] = [None]
        computed = self._model.prompt_logprobs(context)
        for token, (logprob, first, first_logprob) in zip(context[1:], computed, strict=True):
            row = {str(token): self._ranked(token, logprob, round(first_logprob - logprob) + 1)}
            if alternatives:
                row.setdefault(str(first), self._ranked(first, first_logprob, 1))
            rows.append(row)
        return rows

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._model.detokenize([token])}


def _pairs(part: AnswerPart) -> Iterator[tuple[int, float]]:
    return zip(part.token_ids, part.logprobs, strict=True)


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


@dataclass(slots=True)
class _Choice:
    """The state of one choice of a completion or chat."""

    request: SimulatedRequest
    text: ResponseText
    text_offset: int = 0
    tokens: int = 0


class CompletionFormatter:
    """Formats the answer to a completion or chat."""

    def __init__(
        self, completion: SimulatedCompletion, response_id: str, created: int, model_name: str, model: TokenModel
    ) -> None:
        self._body = completion.body
        self._tokens = TokenFormatter(model, as_ids=bool(completion.body.return_tokens_as_token_ids))
        self._choices = [_Choice(request, ResponseText(request, model)) for request in completion.requests]
        self._prompt_tokens = sum(len(request.prompt_ids) for request in completion.requests[:: completion.choices])
        self._chat = completion.endpoint is CompletionEndpoint.CHAT
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": created, "model": model_name}
        self._stream_head = {**self._head, "object": f"{kind}.chunk" if self._chat else kind}

    def opening(self) -> list[bytes]:
        """Return the stream events before the first token. Each choice of a chat has one event with the role and the
        prompt's token ids. A completion has none."""
        if not self._chat:
            return []
        message = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        choices = [{"index": index, **message} for index in range(len(self._choices))]
        prompt = {"prompt_token_ids": self._prompt(0)}
        return [event({**self._stream_head, "choices": [choice], **prompt}) for choice in choices]

    def part(self, choice: int, part: AnswerPart) -> bytes:
        state = self._choices[choice]
        is_first = state.tokens == 0
        formatted = self._choice(choice, part, "delta")
        if state.tokens == 0:  # vLLM omits the last chunk of a request that was aborted before its first token
            return b""
        if not self._chat:
            formatted["prompt_token_ids"] = self._prompt(choice) if is_first else None
        return event({**self._stream_head, "choices": [formatted]})

    def closing(self) -> list[bytes]:
        """Return the stream events after the last token. If the request asks for it, the first of these events contains
        the usage."""
        options = self._body.stream_options
        if options is None or not options.include_usage:
            return [DONE]
        return [event({**self._stream_head, "choices": [], "usage": self._usage()}), DONE]

    def whole(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        choices = [self._choice(index, part, "message") for index, part in enumerate(parts)]
        answer = {**self._head, "choices": choices, "usage": self._usage()}
        for index, choice in enumerate(choices[:1] if self._chat else choices):
            of_prompt = answer if self._chat else choice
            of_prompt["prompt_token_ids"] = self._prompt(index)
            if self._body.prompt_logprobs is not None:
                prompt_ids = self._choices[index].request.prompt_ids
                of_prompt["prompt_logprobs"] = self._tokens.prompt_logprobs(prompt_ids, self._body.prompt_logprobs)
        return answer

    def _prompt(self, choice: int) -> list[int] | None:
        return list(self._choices[choice].request.prompt_ids) if self._body.return_token_ids else None

    def _choice(self, choice: int, part: AnswerPart, of_chat: str) -> dict[str, Any]:
        """Return the `choice` of a stream event or a whole response. `of_chat` is the key of a chat message, `delta` or
        `message`. A stop token or stop string is included in the token ids, but not in the text by default."""
        state = self._choices[choice]
        state.tokens += len(part.token_ids)
        text = state.text.add(part)
        message = {"content": text} if of_chat == "delta" else {"role": "assistant", "content": text}
        return {
            "index": choice,
            **({of_chat: message} if self._chat else {"text": text}),
            "logprobs": self._logprobs(state, part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "token_ids": part.token_ids if self._body.return_token_ids else None,
        }

    def _usage(self) -> dict[str, int]:
        return usage_of(self._prompt_tokens, sum(choice.tokens for choice in self._choices))

    def _logprobs(self, state: _Choice, part: AnswerPart) -> dict[str, Any] | None:
        if state.request.top_logprobs is None:
            return None
        if self._chat:
            return self._tokens.chat_logprobs(part, state.request.top_logprobs)
        logprobs = self._tokens.completion_logprobs(part, state.request.top_logprobs, state.text_offset)
        state.text_offset += sum(map(len, logprobs["tokens"]))
        return logprobs


def logprob_entry(token: str, logprob: float, text: str | None = None) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list((token if text is None else text).encode())}


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def metrics_page(runtime: Runtime, model_name: str, asleep: bool = False) -> str:
    """Return the `/metrics` page, which contains the metrics of vLLM that this engine can compute."""
    scheduler, waiting, loaded = runtime.scheduler, runtime.waiting, runtime.loaded_tokens_total
    by_source = {"local_compute": runtime.prompt_tokens_total - loaded, EXTERNAL_SOURCE: loaded}
    sleep = {"awake": not asleep, "weights_offloaded": asleep, "discard_all": False}
    # Name, type, additional label, and the number for each value of that label.
    families: list[tuple[str, str, str, Mapping[str, float]]] = [
        ("num_requests_running", "gauge", "", {"": runtime.running}),
        ("num_requests_waiting", "gauge", "", {"": waiting}),
        ("num_requests_waiting_by_reason", "gauge", "reason", {"capacity": waiting, "deferred": 0}),
        ("kv_cache_usage_perc", "gauge", "", {"": runtime.kv_usage_fraction}),
        ("num_preemptions_total", "counter", "", {"": scheduler.preemptions_total}),
        ("prompt_tokens_total", "counter", "", {"": runtime.prompt_tokens_total}),
        ("prompt_tokens_by_source_total", "counter", "source", by_source),
        ("generation_tokens_total", "counter", "", {"": scheduler.generated_tokens_total}),
        ("request_success_total", "counter", "finished_reason", runtime.finished_total),
        ("engine_sleep_state", "gauge", "sleep_state", sleep),
    ]
    labels = f'engine="0",model_name="{model_name}"'
    lines = []
    for name, kind, label, numbers in families:
        lines.append(f"# TYPE vllm:{name} {kind}")
        for value, number in numbers.items():
            own = f',{label}="{value}"' if label else ""
            lines.append(f"vllm:{name}{{{labels}{own}}} {float(number)}")
    shape = scheduler.shape
    config = f'block_size="{shape.block_tokens}",engine="0",num_gpu_blocks="{shape.blocks}"'
    lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{config}}} 1.0"]
    lines += ["# TYPE process_start_time_seconds gauge", f"{BEGAN_AT}{runtime.began_s!r}"]
    lines += ["# TYPE vllm:generation_tokens_created gauge", f"{COUNTED_SINCE}{labels}}} {runtime.began_s!r}"]
    return "\n".join(lines) + "\n"
