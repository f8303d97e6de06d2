"""The end of a response: its length, finish reason and stop string, and the text that its stream contains. The rules
are those of vLLM (v1/engine/detokenizer.py). The module has no side effects."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrrl.lab.simulated_engine.sampling import SimulatedRequest
from orchestrrl.lab.simulated_engine.tokens import Generation, TokenModel


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Newly generated tokens of one response. Only the last part has a `finish_reason`."""

    token_ids: list[int]
    logprobs: list[float]  # one per token
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token or stop string that ended the response
    weight_versions: tuple[tuple[str, int], ...] = ()  # each version and the first token sampled by it; last part only


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The length and finish reason of a response, computed when the request arrives."""

    tokens: int
    finish_reason: str  # stop | length
    eos: bool = False  # the model ends the response: EOS is the last token
    stop_reason: int | str | None = None


def ending_of(request: SimulatedRequest, generation: Generation) -> AnswerEnd:
    """Return the length and finish reason of a response, which has at least `min_tokens` tokens. If the context already
    contains the complete response, the new response ends as early as `min_tokens` permits."""
    natural = max(generation.answer_tokens - generation.position, request.min_tokens + 1, 1)
    ends_by_eos = not request.ignore_eos and natural <= request.max_tokens
    most = natural if ends_by_eos else request.max_tokens
    if request.stop_token_ids or request.stop:
        stopped = _stopped(request, generation, most - 1 if ends_by_eos else most)
        if stopped is not None:
            return stopped
    return AnswerEnd(most, "stop" if ends_by_eos else "length", eos=ends_by_eos)


def _stopped(request: SimulatedRequest, generation: Generation, most: int) -> AnswerEnd | None:
    """Return the end of a response by a stop token or stop string within its first `most` tokens, or None."""
    ahead, tail = copy.copy(generation), ""
    before_chars = max(map(len, request.stop), default=1) - 1
    for count in range(1, most + 1):
        token, _ = ahead.next_token()
        if token in request.stop_token_ids and count > request.min_tokens:
            return AnswerEnd(count, "stop", stop_reason=token)
        if request.stop:
            piece = generation.model.detokenize([token])
            tail = tail[max(len(tail) - before_chars, 0) :] + piece
            if count > request.min_tokens and (found := find_stop(tail, len(piece), request.stop)) is not None:
                return AnswerEnd(count, "stop", stop_reason=found[0])
    return None


def find_stop(text: str, new_chars: int, stop: Sequence[str]) -> tuple[str, int] | None:
    """Return the stop string that ends first in the last `new_chars` characters of a text, and its position in the
    text. Return None if there is none. If two stop strings end together, the first in `stop` is returned."""
    found: tuple[str, int] | None = None
    for string in stop:
        at = text.find(string, max(0, len(text) - new_chars - len(string) + 1))
        if at >= 0 and (found is None or at + len(string) < found[1] + len(found[0])):
            found = (string, at)
    return found


class ResponseText:
    """The text of one response. While the response runs, characters that could belong to a stop string are withheld,
    unless the text includes the stop string."""

    def __init__(self, request: SimulatedRequest, model: TokenModel) -> None:
        self._request = request
        self._model = model
        self._tail_chars = max(map(len, request.stop), default=1) - 1
        self._tail = ""  # the end of the text so far

    def add(self, part: AnswerPart) -> str:
        """Return the text that the part releases. Without `include_stop`, the text excludes the stop token or stop
        string that ended the response."""
        ids, included = part.token_ids, self._request.include_stop
        if isinstance(part.stop_reason, int) and not included:
            ids = ids[:-1]
        text = self._tail + self._model.detokenize(ids)
        start = len(self._tail) if included else 0
        if part.finish_reason is not None:
            return text[start : self._end(text, part)]
        end = max(0, len(text) - self._tail_chars)
        self._tail = text[end:]
        return text[start:] if included else text[:end]

    def _end(self, text: str, part: AnswerPart) -> int:
        if not isinstance(part.stop_reason, str):
            return len(text)
        last_chars = len(self._model.detokenize(part.token_ids[-1:]))
        found = find_stop(text, last_chars, [part.stop_reason])
        if found is None:  # other weights have generated the last tokens
            return len(text)
        return found[1] + len(part.stop_reason) if self._request.include_stop else found[1]
