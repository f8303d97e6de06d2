"""The tokens and response lengths of the simulated engine. They depend only on the prompt, the weights and the sampling
parameters. The functions have no side effects.

Under greedy decoding, the next token depends on all previous tokens. A request that is continued on another engine,
from its prompt and partial response, therefore yields exactly the tokens of an uninterrupted run, as with a real model.
The length of a response also depends on its prompt and seed. A context need not state where its partial response
begins, because the partial response is the longest suffix that the engine could have generated. Continuing a response
therefore needs neither a marker nor state.

A sampled token also depends on the seed and on the number of tokens that its request has generated, as in vLLM. A
continued request with the same seed therefore repeats the draws of the first tokens.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3
_NORMAL = NormalDist()

BYTE_TOKENS = 256  # token ids 0..255 are the bytes of UTF-8
EOS, TURN_START, TURN_END = 256, 257, 258
MOST_BEHIND = 24  # maximum difference in nats between the most likely token and another
MOST_REDRAWS = 16  # attempts to find a length beyond the partial response
SPREAD = 8  # number of token ids that can be sampled at a position: the most likely one and those above it
FIRST_WORD = 260  # ids from here on are words; only words are generated


def _mix(value: int) -> int:
    """Hash `value` with the finalizer of SplitMix64, so that every output bit depends on every input bit."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _unit(value: int) -> float:
    """Map a hash to a number strictly between 0 and 1."""
    return ((value >> 11) + 0.5) / (1 << 53)


@dataclass(frozen=True, slots=True)
class LengthModel:
    """A distribution of response lengths. Lengths are interpolated log-linearly between quantiles. A Gaussian copula
    correlates the lengths within a group.

    A group consists of requests whose prompts are equal except for the last token. The last tokens differ because,
    under greedy decoding, requests with equal prompts would have equal responses. The seeds may also differ.
    `correlation` is the correlation of the normal scores of two members of a group, which is close to the correlation
    of the logarithms of their lengths.
    """

    quantiles: tuple[float, ...]  # strictly ascending from 0 to 1
    tokens: tuple[float, ...]  # length at each quantile, ascending, >= 1
    correlation: float = 0.0

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(self.tokens) or len(self.tokens) < 2:
            raise ValueError("quantiles and tokens must have the same length, at least 2")
        if self.quantiles[0] != 0 or self.quantiles[-1] != 1 or list(self.quantiles) != sorted(set(self.quantiles)):
            raise ValueError(f"quantiles must ascend from 0 to 1, got {self.quantiles}")
        if self.tokens[0] < 1 or list(self.tokens) != sorted(self.tokens):
            raise ValueError(f"tokens must be >= 1 and ascend, got {self.tokens}")
        if not 0 <= self.correlation <= 1:
            raise ValueError(f"correlation must be in 0..1, got {self.correlation}")

    def quantile_tokens(self, probability: float) -> int:
        """Return the length in tokens at a cumulative probability in 0..1."""
        index = min(bisect_right(self.quantiles, probability), len(self.quantiles) - 1)
        p_low, p_high = self.quantiles[index - 1], self.quantiles[index]
        low, high = math.log(self.tokens[index - 1]), math.log(self.tokens[index])
        return max(1, round(math.exp(low + (high - low) * (probability - p_low) / (p_high - p_low))))

    def sample_tokens(self, group_hash: int, prompt_hash: int, seed: int) -> int:
        """Return the length in tokens of the response to a prompt with a seed. The hashes identify the prompt and its
        group."""
        of_group = _NORMAL.inv_cdf(_unit(_mix(group_hash ^ 0xA5A5)))
        of_sample = _NORMAL.inv_cdf(_unit(_mix(prompt_hash ^ _mix(seed + 0x5EED))))
        score = math.sqrt(self.correlation) * of_group + math.sqrt(1 - self.correlation) * of_sample
        return self.quantile_tokens(_NORMAL.cdf(score))


# The default: a distribution similar to a geometric one, with a median of 200 tokens.
DEFAULT_LENGTHS = LengthModel((0.0, 0.5, 1.0), (16, 200, 1024))


@dataclass(frozen=True, slots=True)
class Sampling:
    """The parameters of random sampling. Requests with greedy decoding have none."""

    seed: int
    temperature: float = 1.0


@dataclass(slots=True)
class Generation:
    """The state of one response under greedy decoding. `next_token` advances this state by one token."""

    model: "TokenModel"
    state: int
    weights_hash: int
    position: int  # tokens of the response so far, including those given in the context
    answer_tokens: int  # position at which the model would end the response

    def next_token(self) -> tuple[int, float]:
        """Generate the next token. Return its id and its log-probability."""
        out = _mix(self.state ^ self.weights_hash)
        token = FIRST_WORD + out % (self.model.vocab_size - FIRST_WORD)
        self.state = _advance(self.state, token)
        self.position += 1
        return token, -(out >> 40) / (1 << 24)

    def follow(self, model: "TokenModel") -> None:
        """Continue the response with other weights. The length of the response does not change."""
        self.model = model
        self.weights_hash = model.weights_hash


@dataclass(slots=True)
class SampledGeneration(Generation):
    """The state of one response with sampled tokens."""

    sampling: Sampling
    draws: int = 0  # tokens that this request has generated

    def next_token(self) -> tuple[int, float]:
        out = _mix(self.state ^ self.weights_hash)
        draw = _unit(_mix(_mix(self.sampling.seed & _MASK) + self.draws & _MASK))
        # Each token id above the most likely one is 1 nat less likely.
        behind = min(int(-math.log(draw) * self.sampling.temperature), SPREAD - 1)
        first = FIRST_WORD + out % (self.model.vocab_size - FIRST_WORD)
        token = min(first + behind, self.model.vocab_size - 1)
        self.state = _advance(self.state, token)
        self.position += 1
        self.draws += 1
        return token, -(out >> 40) / (1 << 24) - (token - first)


def likeliest(token: int, logprob: float, count: int, vocab_size: int) -> list[tuple[int, float, int]]:
    """Return the id, log-probability and rank of a generated token and of the `count` most likely tokens at its
    position. The generated token comes first, as in vLLM, and is not repeated."""
    # The log-probability of the most likely token is in (-1, 0].
    behind = int(-logprob)
    words = vocab_size - FIRST_WORD
    others = [
        (FIRST_WORD + (token - FIRST_WORD - behind + k) % words, logprob + behind - k, k + 1)
        for k in range(count)
        if k != behind
    ]
    return [(token, logprob, behind + 1), *others]


def _advance(state: int, token: int) -> int:
    return ((state ^ (token + 1)) * _PRIME + 0x9E3779B97F4A7C15) & _MASK


@dataclass(frozen=True, slots=True)
class TokenModel:
    """The simulated model. Engines whose models have equal fields are interchangeable, as replicas are."""

    vocab_size: int = 32_000
    lengths: LengthModel = DEFAULT_LENGTHS
    weights_seed: int = 0  # each version of the weights generates other tokens

    def begin(self, context: Sequence[int], sampling: Sampling | None = None) -> Generation:
        """Return the generation that continues a context: a prompt, or a prompt and a partial response. Without
        `sampling`, decoding is greedy."""
        weights_hash = self.weights_hash
        words = self.vocab_size - FIRST_WORD
        spread = 1 if sampling is None else SPREAD
        state = group_hash = prompt_hash = 0xCBF29CE484222325
        prompt_tokens = 0
        for count, token in enumerate(context, start=1):
            before, first = state, FIRST_WORD + _mix(state ^ weights_hash) % words
            state = _advance(state, token)
            if not 0 <= token - first < spread:
                prompt_tokens, group_hash, prompt_hash = count, before, state
        position = len(context) - prompt_tokens
        seeds = (0,) if sampling is None else range(sampling.seed, sampling.seed + MOST_REDRAWS)
        for seed in seeds:
            answer_tokens = self.lengths.sample_tokens(
                group_hash ^ self.weights_seed, prompt_hash ^ self.weights_seed, seed
            )
            # A response continued with another seed gets another length, which must not be in its past.
            if answer_tokens > position:
                break
        if sampling is None:
            return Generation(self, state, weights_hash, position, answer_tokens)
        return SampledGeneration(self, state, weights_hash, position, answer_tokens, sampling)

    @property
    def weights_hash(self) -> int:
        return _mix(self.weights_seed + 1 & _MASK)

    def prompt_logprobs(self, context: Sequence[int]) -> list[tuple[float, int, float]]:
        """Return three values for each token except the first: its log-probability, the most likely token at its
        position, and the log-probability of the most likely token. For a generated token, the values are the same as
        when the token was generated."""
        weights_hash, words = self.weights_hash, self.vocab_size - FIRST_WORD
        state = _advance(0xCBF29CE484222325, context[0])
        rows = []
        for token in context[1:]:
            out = _mix(state ^ weights_hash)
            first, first_logprob = FIRST_WORD + out % words, -(out >> 40) / (1 << 24)
            behind = 0 if token == first else min((token - first) % words or MOST_BEHIND, MOST_BEHIND)
            rows.append((first_logprob - behind, first, first_logprob))
            state = _advance(state, token)
        return rows

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of a text as token ids. Word tokens are never produced from text."""
        return list(text.encode())

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids. Byte tokens are decoded as UTF-8, with U+FFFD for invalid bytes. A word token
        with the id N is decoded as ` wN`. Special tokens are omitted."""
        pieces: list[str] = []
        pending = bytearray()
        for token in token_ids:
            if token < BYTE_TOKENS:
                pending.append(token)
                continue
            pieces.append(pending.decode(errors="replace"))
            pending.clear()
            if token >= FIRST_WORD:
                pieces.append(f" w{token}")
        pieces.append(pending.decode(errors="replace"))
        return "".join(pieces)
