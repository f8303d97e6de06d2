"""Format responses of the simulated engine: vLLM's JSON for completions and chats, and its metrics page. The functions
have no side effects."""

import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from orchestrrl.engines.base import CompletionEndpoint
from orchestrrl.engines.handover import EXTERNAL_SOURCE
from orchestrrl.engines.vllm_info import BEGAN_AT, COUNTED_SINCE
from orchestrrl.lab.simulated_engine.requests import SimulatedRequest
from orchestrrl.lab.simulated_engine.runtime import AnswerPart, Runtime
from orchestrrl.lab.simulated_engine.tokens import FIRST_WORD, TokenModel


class Formatter:
    """The formatter of one response, which returns the response's tokens as stream events or as one JSON object."""

    def __init__(
        self, request: SimulatedRequest, response_id: str, created: int, model_name: str, model: TokenModel
    ) -> None:
        self._request = request
        self._model = model
        self._chat = request.endpoint is CompletionEndpoint.CHAT
        kind = "chat.completion" if self._chat else "text_completion"
        self._head = {"id": response_id, "object": kind, "created": created, "model": model_name}
        self._stream_head = {**self._head, "object": f"{kind}.chunk" if self._chat else kind}
        self._prompt_ids = list(request.prompt_ids) if request.body.return_token_ids else None
        self._sent_prompt = False
        self._text_offset = 0

    def opening(self) -> list[bytes]:
        """Return the stream events before the first token. A chat has one event with the role and the prompt's token
        ids. A completion has none."""
        if not self._chat:
            return []
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [_event({**self._stream_head, "choices": [choice], "prompt_token_ids": self._prompt_ids})]

    def part(self, part: AnswerPart) -> bytes:
        """Return one stream event with newly generated tokens."""
        choice = self._choice(part, "delta")
        if not self._chat:
            choice["prompt_token_ids"] = None if self._sent_prompt else self._prompt_ids
            self._sent_prompt = True
        return _event({**self._stream_head, "choices": [choice]})

    def closing(self, completion_tokens: int) -> list[bytes]:
        """Return the stream events after the last token. If the request asks for it, the first of these events contains
        the usage."""
        done = [b"data: [DONE]\n\n"]
        options = self._request.body.stream_options
        if options is None or not options.include_usage:
            return done
        return [_event({**self._stream_head, "choices": [], "usage": self._usage(completion_tokens)}), *done]

    def whole(self, part: AnswerPart) -> dict[str, Any]:
        """Return the whole response as one JSON object. `part` contains all tokens of the response."""
        choice = self._choice(part, "message")
        answer = {**self._head, "choices": [choice], "usage": self._usage(len(part.token_ids))}
        of_prompt = answer if self._chat else choice
        of_prompt["prompt_token_ids"] = self._prompt_ids
        if self._request.body.prompt_logprobs is not None:
            of_prompt["prompt_logprobs"] = self._prompt_logprobs(self._request.body.prompt_logprobs)
        return answer

    def _choice(self, part: AnswerPart, of_chat: str) -> dict[str, Any]:
        """Return the `choice` of a stream event or a whole response. `of_chat` is the key of a chat message, `delta` or
        `message`. Stop tokens are included in the token ids but not in the text."""
        text = self._model.detokenize(part.token_ids if part.stop_reason is None else part.token_ids[:-1])
        message = {"content": text} if of_chat == "delta" else {"role": "assistant", "content": text}
        return {
            "index": 0,
            **({of_chat: message} if self._chat else {"text": text}),
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "token_ids": part.token_ids if self._request.body.return_token_ids else None,
        }

    def _prompt_logprobs(self, alternatives: int) -> list[dict[str, Any] | None]:
        """Return one dictionary of log-probabilities per token of the prompt, or None for the first token. If
        `alternatives` is not 0, each dictionary also contains the most likely token."""
        context = self._request.prompt_ids
        rows: list[dict[str, Any] | None] = [None]
        computed = self._model.prompt_logprobs(context, self._request.seed)
        for token, (logprob, first, first_logprob) in zip(context[1:], computed, strict=True):
            row = {str(token): self._ranked(token, logprob, 1 if token == first else 2)}
            if alternatives:
                row.setdefault(str(first), self._ranked(first, first_logprob, 1))
            rows.append(row)
        return rows

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._model.detokenize([token])}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = len(self._request.prompt_ids)
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if self._request.top_logprobs is None:
            return None
        tokens = [self._model.detokenize([token]) for token in part.token_ids]
        tops = [self._alternatives(*pair) for pair in zip(part.token_ids, part.logprobs, strict=True)]
        rows = list(zip(tokens, part.logprobs, tops, strict=True))
        if self._chat:
            return {"content": [{**_entry(t, p), "top_logprobs": [_entry(*x) for x in top]} for t, p, top in rows]}
        *offsets, self._text_offset = accumulate(map(len, tokens), initial=self._text_offset)
        # vLLM's dictionary includes the chosen token even if no alternatives were requested.
        top_logprobs = [dict(top or [(token, logprob)]) for token, logprob, top in rows]
        return {"text_offset": offsets, "token_logprobs": part.logprobs, "tokens": tokens, "top_logprobs": top_logprobs}

    def _alternatives(self, token: int, logprob: float) -> list[tuple[str, float]]:
        """Return the requested number of alternatives as pairs of text and log-probability. The first is the generated
        token. The others are arbitrary tokens, each 1 nat less likely than the previous one."""
        words = self._model.vocab_size - FIRST_WORD
        ids = [token] + [FIRST_WORD + (token + k) % words for k in range(1, self._request.top_logprobs or 0)]
        wanted = ids[: self._request.top_logprobs]
        return [(self._model.detokenize([other]), logprob - k) for k, other in enumerate(wanted)]


def _entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _event(value: Mapping[str, Any]) -> bytes:
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
