"""The text at the seam between two engines, where a character may have been cut in the middle. Pure but for one call.

With byte-level tokenizers a character can take several tokens, and engines hold its text back until it is whole. An
engine that begins in the middle of a character does not know what the client has seen (vLLM's then repeats the whole
prompt as text), so until the character is whole the text is made here, from the tokens on both sides of the seam.
"""

from collections.abc import Sequence
from typing import Protocol

from orchestrrl.core.errors import Permanent
from orchestrrl.engines.base import Chunk

INCOMPLETE = "\ufffd"  # what decoders show for bytes that are no character, or not one yet
# Tokens before the seam that are decoded with it: more than any character has, with some context for the decoder.
WINDOW_TOKENS = 32


class TokenDecoder(Protocol):
    """An engine, or a stand-in for several of them."""

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...


class DetokenizerSplice:
    """Text of the tokens after a cut in the middle of a character. `open` until a chunk ends on a whole character."""

    def __init__(self, engine: TokenDecoder, tokens: Sequence[int], text: str, *, keep_stop_token: bool) -> None:
        self._engine = engine
        self._tokens = list(tokens)
        self._seen = len(text.rstrip(INCOMPLETE))
        self._keep_stop_token = keep_stop_token
        self.open = True

    async def text(self, chunk: Chunk) -> str:
        """What the chunk adds to the text."""
        if not self.open or not chunk.token_ids:
            return chunk.text if not self.open else ""
        self._tokens.extend(chunk.token_ids)
        shown = self._tokens
        if chunk.finish_reason == "stop" and not self._keep_stop_token:
            shown = shown[:-1]
        text = await self._engine.detokenize(shown)
        self.open = text.endswith(INCOMPLETE)
        whole = text.rstrip(INCOMPLETE)
        added = whole[self._seen :]
        self._seen = max(self._seen, len(whole))
        return added


async def open_splice(
    engine: TokenDecoder, context_ids: Sequence[int], *, keep_stop_token: bool
) -> DetokenizerSplice | None:
    """The seam after these tokens; None where they end on a whole character, or the engine has no text at all."""
    window = context_ids[-WINDOW_TOKENS:]
    try:
        text = await engine.detokenize(window)
    except Permanent:
        return None
    if not text.endswith(INCOMPLETE):
        return None
    return DetokenizerSplice(engine, window, text, keep_stop_token=keep_stop_token)
