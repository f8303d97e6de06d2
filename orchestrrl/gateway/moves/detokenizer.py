"""Produce the text after a cut, the point at which an answer continues on another engine.

With byte-level tokenizers, a character can need several tokens, and engines withhold its text until it is complete. An
engine that continues inside a character returns wrong text, because it lacks the text of the earlier tokens. (vLLM, for
example, repeats the whole prompt.) Until the character is complete, this module therefore lets an engine of the model
decode the tokens on both sides of the cut together.

Generation needs only tokens, so a failure to decode them does not fail the request. Another engine of the model is
tried, and if none responds, the continuing engine's own text is used.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.engines.base import Chunk
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.moves.movable import sampling_fields
from orchestrrl.gateway.moves.stop_strings import stop_strings
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends

logger = logging.getLogger(__name__)

ANSWER_WITHIN_S = 2.0  # timeout per engine
AVOID_FOR_S = 10.0  # an engine that failed to decode is tried last for this long
MOST_ASKED = 3  # engines tried for one text
INCOMPLETE = "\ufffd"  # decoders show it for bytes that are not, or not yet, a character
# Tokens before the cut that are decoded too: more than any character needs, plus some context for the decoder.
WINDOW_TOKENS = 32


Decode = Callable[[Sequence[int]], Awaitable[str]]


async def detokenize(fleet: EngineBackends, first: EngineBackend, token_ids: Sequence[int]) -> str:
    """Return the text of the tokens, decoded by engine `first` or, if `first` fails, by another engine of its model.
    The other engines are tried in the order of the routes, beginning after `first`. Engines that failed recently are
    tried last. Raises Permanent if none of the engines that are tried responds."""
    slots = [backend for backend in fleet if backend is first or _may_stand_in(backend, first)]
    at = next((index for index, backend in enumerate(slots) if backend is first), None)
    ordered = [first, *slots] if at is None else slots[at:] + slots[:at]
    before_s = fleet.clock.now_s() - AVOID_FOR_S
    ordered.sort(key=lambda backend: backend.detokenize_failed_s is not None and backend.detokenize_failed_s > before_s)
    faults = []
    for backend in ordered[:MOST_ASKED]:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                text = await fleet.detokenize(backend, token_ids)
        except (OrchestrRLError, TimeoutError) as error:
            backend.detokenize_failed_s = fleet.clock.now_s()
            faults.append(str(error) or f"{backend.id} did not detokenize within {ANSWER_WITHIN_S:g} s")
            continue
        backend.detokenize_failed_s = None
        return text
    raise Permanent("; ".join(faults))


def _may_stand_in(backend: EngineBackend, first: EngineBackend) -> bool:
    """Return whether the engine is usable and, as far as is known, serves the same model as `first`."""
    if not backend.usable:
        return False
    if backend.capabilities is None or first.capabilities is None:
        return True
    return not set(backend.capabilities.models).isdisjoint(first.capabilities.models)


class TextAfterCut:
    """Produces the text of the tokens after a cut inside a character. If an engine can decode tokens, the text is
    decoded from the tokens. Otherwise, the continuing engine's own text is used, without the part that the record
    already contains. `open` is True until the text of the engine's chunks is correct again."""

    def __init__(self, record: RequestRecord, decode: Decode, tokens: list[int], text: str | None) -> None:
        """Start at a cut. `tokens` are the last tokens before the cut, and `text` is their text. `text` is None if no
        engine can decode them."""
        self._record = record
        self._decode = None if text is None else decode
        self._tokens = tokens
        self._seen = len((text or "").rstrip(INCOMPLETE))
        self.open = True

    async def text(self, chunk: Chunk) -> str:
        """Return the text that the chunk adds to the answer."""
        if not self.open:
            return chunk.text
        if self._decode is None:
            return self._undecoded(chunk)
        if not chunk.token_ids:
            return ""
        self._tokens.extend(chunk.token_ids)
        sampling = sampling_fields(self._record.endpoint, self._record.body)
        shows_stop = chunk.finish_reason != "stop" or sampling.get("include_stop_str_in_output")
        try:
            text = await self._decode(self._tokens if shows_stop else self._tokens[:-1])
        except Permanent as error:
            logger.warning("request %s: cannot decode the text after a move: %s", self._record.id, error)
            self._decode = None
            return self._undecoded(chunk)
        self.open = text.endswith(INCOMPLETE)
        whole = text.rstrip(INCOMPLETE)
        added = whole[self._seen :]
        self._seen = max(self._seen, len(whole))
        return added

    def _undecoded(self, chunk: Chunk) -> str:
        self.open = not chunk.text
        return unsent(chunk, self._record) if chunk.text else ""


def last_tokens(record: RequestRecord) -> list[int]:
    """Return the last tokens of the context, which are enough to decode the text of the next tokens."""
    return [*(record.prompt_ids or ())[-WINDOW_TOKENS:], *record.generated_ids[-WINDOW_TOKENS:]][-WINDOW_TOKENS:]


async def text_after_cut(record: RequestRecord, backend: EngineBackend, fleet: EngineBackends) -> TextAfterCut | None:
    """Return the TextAfterCut for the record, or None if the record has no tokens, its tokens end with a complete
    character or its answer has no text."""
    # With stop strings, the text also lacks characters that were withheld.
    complete = record.text_complete and not stop_strings(sampling_fields(record.endpoint, record.body))
    if complete or not record.generated_ids or not record.textual:
        return None
    window = last_tokens(record)
    decode = partial(detokenize, fleet, backend)
    text: str | None = None
    with suppress(Permanent):
        text = await decode(window)
        if not text.endswith(INCOMPLETE):
            return None
    return TextAfterCut(record, decode, window, text)


def unsent(chunk: Chunk, record: RequestRecord) -> str:
    """Return the part of the chunk's text that the record's text lacks. `chunk` is the first chunk with text after a
    cut. Has no side effects.

    If vLLM's decoder starts inside a character, it returns the whole context as new text: the prompt, the answer so far
    and the new text.
    """
    text, sent = chunk.text, record.text
    if not sent:  # all tokens so far belong to one incomplete character
        prompt = record.body.get("prompt")
        if isinstance(prompt, str) and text.startswith(prompt):
            return text[len(prompt) :]
        return text[-max(1, len(chunk.token_ids)) :]
    # A prompt has more characters than a quarter of its number of tokens, and new text has at least one.
    at = text.rfind(sent, 0, len(text) - 1)
    if at < 0 or len(text) <= len(sent) + record.prompt_tokens // 4:
        return text
    return text[at + len(sent) :]
