"""A reference for stop strings: an engine's detokenizer, which checks the whole text after each token."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class ReferenceDetokenizer:
    """Decodes one answer as vLLM does. `step` returns the text of one more token, or "" if it withholds the text."""

    def __init__(self, sampling: Mapping[str, Any], step: Callable[[int], str]) -> None:
        stop = sampling.get("stop") or []
        self.stops = [stop] if isinstance(stop, str) else list(stop)
        self.included = bool(sampling.get("include_stop_str_in_output"))
        self.min_tokens = sampling.get("min_tokens") or 0
        self.step = step
        self.text = ""
        self.shown = 0
        self.tokens = 0
        self.matched: str | None = None

    def add(self, token: int | None) -> None:
        """Add a token. A stop token, whose text is not shown, is added as None."""
        self.tokens += 1
        before = len(self.text)
        self.text += "" if token is None else self.step(token)
        if self.tokens <= self.min_tokens:
            return
        # The shortest text that ends with a stop string, and ends in the text of this token.
        for end in range(before + 1, len(self.text) + 1):
            for stop in self.stops:
                if self.text[:end].endswith(stop):
                    self.matched = stop
                    self.text = self.text[: end if self.included else end - len(stop)]
                    return

    def news(self, *, ends: bool) -> str:
        """Return the text that was not returned before, without the text that a stop string may still cover."""
        withheld = 0 if self.included or ends or not self.stops else max(map(len, self.stops)) - 1
        end = max(self.shown, len(self.text) - withheld)
        new, self.shown = self.text[self.shown : end], end
        return new


def reference_answer(
    sampling: Mapping[str, Any], tokens: Sequence[int], step: Callable[[int], str], finish_reason: str
) -> tuple[list[int], str, str, str | None]:
    """Return the tokens, text, finish_reason and stop string of an undisturbed answer. `tokens` are the tokens that the
    model generates without stop strings; with finish_reason `stop`, the last one is a stop token."""
    detokenizer = ReferenceDetokenizer(sampling, step)
    for number, token in enumerate(tokens, 1):
        excluded = finish_reason == "stop" and number == len(tokens) and not detokenizer.included
        detokenizer.add(None if excluded else token)
        if detokenizer.matched is not None:
            return list(tokens[:number]), detokenizer.text, "stop", detokenizer.matched
    return list(tokens), detokenizer.text, finish_reason, None
