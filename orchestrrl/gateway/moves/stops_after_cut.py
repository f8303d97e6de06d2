"""Match stop strings after a cut, at which the first engine's withheld text is lost.

The text is decoded again from the tokens, because it decides which token ends the answer. If it cannot be decoded, the
answer cannot continue.
"""

from dataclasses import replace
from functools import partial

from orchestrrl.core.errors import Permanent
from orchestrrl.engines.base import Chunk
from orchestrrl.gateway.ledger.ledger import RequestRecord
from orchestrrl.gateway.moves.detokenizer import INCOMPLETE, WINDOW_TOKENS, Decode, detokenize, last_tokens
from orchestrrl.gateway.moves.movable import sampling_fields
from orchestrrl.gateway.moves.stop_strings import StopStringMatcher, stop_strings
from orchestrrl.gateway.routing.backend import EngineBackend
from orchestrrl.gateway.routing.backends import EngineBackends


class TextUnknown(Exception):
    """Raised if the text of an answer cannot be derived from its tokens. The message begins with the field of the
    request that makes it necessary."""


class StopsAfterCut:
    """Matches the stop strings of a request that continues on another engine, which does not match them."""

    def __init__(self, record: RequestRecord, decode: Decode, matcher: StopStringMatcher) -> None:
        self._record = record
        self._decode = decode
        self._matcher = matcher

    async def take(self, chunk: Chunk, text: str) -> tuple[Chunk, str]:
        """Return the part of the chunk up to a stop string, and the text to deliver. `text` is the chunk's text. The
        record must not contain the chunk yet. Raises TextUnknown if the token that completes a stop string cannot be
        determined."""
        matcher, ends, shown = self._matcher, chunk.finish_reason not in (None, "abort"), ""
        kept = len(chunk.token_ids)
        if kept < 2 or not matcher.completes(text):
            shown = matcher.add(kept, text, ends=ends)
        else:
            for kept, piece in enumerate(await self._pieces(chunk, text), 1):
                shown += matcher.add(1, piece, ends=ends and kept == len(chunk.token_ids))
                if matcher.matched is not None:
                    break
        if matcher.matched is None:
            return chunk, shown
        ids, logprobs = chunk.token_ids[:kept], chunk.logprobs and chunk.logprobs[:kept]
        end = replace(chunk, token_ids=ids, logprobs=logprobs, finish_reason="stop", stop_reason=matcher.matched)
        return end, shown

    async def _pieces(self, chunk: Chunk, text: str) -> list[str]:
        """Return the text that each token of the chunk adds."""
        before, ids = last_tokens(self._record), chunk.token_ids
        try:
            texts = [await self._decode([*before, *ids[:number]]) for number in range(len(ids))]
        except Permanent as error:
            raise TextUnknown(f"stop: no engine decodes the text: {error}") from error
        ends = [len(shown.rstrip(INCOMPLETE)) for shown in texts]
        pieces = [shown[start:end] for shown, start, end in zip(texts[1:], ends[:-1], ends[1:], strict=True)]
        found = "".join(pieces)
        if not text.startswith(found):
            raise TextUnknown("stop: the decoded text differs from the engine's")
        return [*pieces, text[len(found) :]]


async def stops_after_cut(record: RequestRecord, backend: EngineBackend, fleet: EngineBackends) -> StopsAfterCut | None:
    """Return the matcher of the record's stop strings after a cut, or None if the record has none. Raises TextUnknown
    if the text before the cut cannot be decoded, or does not begin with the record's text."""
    sampling = sampling_fields(record.endpoint, record.body)
    if not stop_strings(sampling) or not record.generated_ids:
        return None
    decode = partial(detokenize, fleet, backend)
    context, ids, sent = list((record.prompt_ids or ())[-WINDOW_TOKENS:]), list(record.generated_ids), record.text
    try:
        prompt = (await decode(context)).rstrip(INCOMPLETE)
        whole = (await decode([*context, *ids])).rstrip(INCOMPLETE)
    except Permanent as error:
        raise TextUnknown(f"stop: no engine decodes the text: {error}") from error
    if not whole.startswith(prompt + sent):
        raise TextUnknown("stop: the decoded text differs from the answer's")
    matcher = StopStringMatcher(sampling, whole[len(prompt) :], len(ids), len(sent))
    return StopsAfterCut(record, decode, matcher)
