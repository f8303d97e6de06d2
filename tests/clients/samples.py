"""The samples that an answer of the gateway contains, and the requests to a bare server that reproduce them. The
functions have no side effects.

A seeded sample that was moved states the position and the seed of each part. A bare server reproduces each part with
one request. A greedy sample equals one request. The tokens of a sample without a seed cannot be reproduced; the bare
server scores them instead.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"

# Sampling fields that change tokens, which a reference request repeats ...
_REPEATED = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "model"}
)
# ... fields that the reference request sets itself ...
_SET = frozenset({"prompt", "token_ids", "seed", "max_tokens", "max_completion_tokens", "n", "logprobs"})
# ... and fields that change no token.
_WITHOUT_EFFECT = frozenset(
    {
        *("messages", "stream", "stream_options", "top_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        *("sampling_params", "output_kind", "prompt_logprobs", "skip_special_tokens", "request_id", "features"),
        *("cache_salt", "session_id", "user"),
    }
)


@dataclass
class ClientSample:
    """One generated sequence of an answer."""

    prompt_ids: list[int]
    fields: Mapping[str, Any]  # the request's sampling fields
    index: int  # among the samples of its prompt
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reseeded: list[dict[str, int]] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        """Add a choice of a whole answer or of a stream's event."""
        self.token_ids += choice.get("token_ids") or []
        logprobs = choice.get("logprobs") or {}
        self.logprobs += logprobs.get("token_logprobs") or []
        self.logprobs += [entry["logprob"] for entry in logprobs.get("content") or []]
        self.reseeded += choice.get("reseeded") or []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def greedy(self) -> bool:
        return self.fields.get("temperature") == 0

    @property
    def reproducible(self) -> bool:
        return self.greedy or self.fields.get("seed") is not None

    @property
    def own_seed(self) -> int | None:
        seed = self.fields.get("seed")
        return None if seed is None else seed + self.index

    def references(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """Yield the requests that reproduce the parts of this sample, each with its first position and its end. A
        request for the last part ends like the sample: at its limit, or at a token that ends the answer."""
        kept = {name: value for name, value in self.fields.items() if name in _REPEATED}
        limit = self.fields.get("max_completion_tokens") or self.fields["max_tokens"]
        starts = [(0, self.own_seed), *((each["position"], each["seed"]) for each in self.reseeded)]
        for (start, seed), (end, _) in pairwise([*starts, (limit, None)]):
            prompt = [*self.prompt_ids, *self.token_ids[:start]]
            own = {"prompt": prompt, "max_tokens": end - start, "seed": seed, "logprobs": 0, "return_token_ids": True}
            yield {**kept, **own}, start, min(end, len(self.token_ids))

    def scoring(self) -> dict[str, Any]:
        """Return the request whose answer contains the log-probabilities of this sample's tokens."""
        prompt = [*self.prompt_ids, *self.token_ids]
        return {
            "model": self.fields["model"],
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }


def samples_of(endpoint: str, body: Mapping[str, Any], answer: Any) -> list[ClientSample]:
    """Return the samples in the answer of a generation endpoint, in the order of the choices. Raises ValueError if the
    request has a field whose effect on the tokens is not known here."""
    fields = {**body, **body.get("sampling_params", {})}
    if unknown := {name for name in fields if fields[name] is not None} - _REPEATED - _SET - _WITHOUT_EFFECT:
        raise ValueError(f"{endpoint}: no reference request is known for fields {sorted(unknown)}")
    samples: dict[int, ClientSample] = {}
    for event in answer if isinstance(answer, list) else [answer]:
        for choice in event["choices"]:
            index = choice["index"]
            if index not in samples:
                prompt_ids = body.get("token_ids") or choice.get("prompt_token_ids") or event["prompt_token_ids"]
                samples[index] = ClientSample(prompt_ids, fields, index % (fields.get("n") or 1))
            samples[index].add(choice)
    return [samples[index] for index in sorted(samples)]
