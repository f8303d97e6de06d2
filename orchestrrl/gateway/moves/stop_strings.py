"""Match stop strings in an answer that has moved. The functions have no side effects.

Engines match stop strings themselves, but a continuing engine cannot match a string that began before the cut. After a
cut, the gateway therefore matches them with the rules of vLLM's detokenizer (vllm/v1/engine/detokenizer.py in vLLM
0.32): text is checked after each token, and the stop string that ends first wins, or the first in the list if several
end there. A stream withholds the characters that may turn out to begin a stop string.
"""

from collections.abc import Mapping, Sequence
from typing import Any


def stop_strings(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stop strings that the sampling fields contain."""
    stop = sampling.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


class StopStringMatcher:
    """Matches stop strings in text that arrives token by token. `matched` is the stop string that ended the answer, or
    None while there is none."""

    def __init__(self, sampling: Mapping[str, Any], text: str, tokens: int, sent: int) -> None:
        """Start after `tokens` tokens with the text `text`, of which the client has the first `sent` characters."""
        self.matched: str | None = None
        self._stops = stop_strings(sampling)
        self._included = bool(sampling.get("include_stop_str_in_output"))
        self._min_tokens = sampling.get("min_tokens") or 0
        self._before = max(map(len, self._stops)) - 1  # earlier characters that a match in new text may need
        self._tokens = tokens
        self._unsent = len(text) - sent  # characters at the end of the tail that were not returned yet
        self._tail = self._tail_of(text)

    def completes(self, text: str) -> bool:
        """Return whether a stop string would end in `text`, the next text, regardless of `min_tokens`."""
        return _first_match(self._tail + text, len(self._tail), self._stops) is not None

    def add(self, tokens: int, text: str, *, ends: bool) -> str:
        """Add the text of the next token and return the text to deliver. `ends` is True if the engine has ended the
        answer. `text` may belong to several tokens if no stop string ends in it."""
        start = len(self._tail)
        self._tokens += tokens
        whole = self._tail + text
        found = _first_match(whole, start, self._stops) if self._tokens > self._min_tokens else None
        if found is not None:
            end, self.matched = found
            whole = whole[: end if self._included else end - len(self.matched)]
        withheld = 0 if self._included or ends or found is not None else self._before
        first = start - self._unsent
        last = max(first, len(whole) - withheld)
        self._unsent = max(0, len(whole) - last)
        self._tail = self._tail_of(whole)
        return whole[first:last]

    def _tail_of(self, text: str) -> str:
        return text[max(0, len(text) - max(self._before, self._unsent)) :]


def _first_match(text: str, start: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Return the end of the match that ends first after index `start`, and its stop string, or None if there is no
    match. If several end at the same index, the first in the list wins."""
    matches = []
    for stop in stops:
        at = text.find(stop, max(0, start + 1 - len(stop)))
        if at >= 0:
            matches.append((at + len(stop), stop))
    return min(matches, key=lambda match: match[0], default=None)
