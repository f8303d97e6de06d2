"""Language models that the cost model supports, with layer sizes from their published configurations."""

from dataclasses import dataclass

from planner.model import check_at_least

BF16_BITS = 16.0


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer. Sizes are in elements, not bytes. Dense models have 0 `experts`."""

    name: str
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of the dense layer, or of the shared expert that every token visits; 0: none
    vocab: int
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    window_tokens: int = 0  # sliding window of every second layer; 0: full attention everywhere
    tied_embeddings: bool = False
    weight_bits: float = BF16_BITS  # of the published checkpoint
    expert_bits: float = BF16_BITS

    def __post_init__(self) -> None:
        check_at_least(self, 1, "layers", "hidden", "q_heads", "kv_heads", "head_dim", "vocab")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token must be within 1..{self.experts}, got {self.experts_per_token}")

    @property
    def moe(self) -> bool:
        return self.experts > 0

    @property
    def attention_params(self) -> int:
        """The number of parameters of one layer's projections of queries, keys, values and output."""
        return self.hidden * self.head_dim * (2 * self.q_heads + 2 * self.kv_heads)

    @property
    def dense_ffn_params(self) -> int:
        """The number of parameters of one layer's gate, up and down projections through which every token passes."""
        return 3 * self.hidden * self.ffn

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden * self.expert_ffn

    @property
    def head_params(self) -> int:
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        per_layer = self.attention_params + self.dense_ffn_params + self.experts * self.expert_params
        return self.layers * per_layer + self.head_params * (1 if self.tied_embeddings else 2)

    @property
    def active_params(self) -> int:
        """The number of parameters by which each token is multiplied."""
        per_layer = self.attention_params + self.dense_ffn_params + self.experts_per_token * self.expert_params
        return self.layers * per_layer + self.head_params

    def kv_bytes_per_token(self, kv_bits: float = BF16_BITS) -> float:
        """Return the size of one token's KV cache in bytes, over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * kv_bits / 8


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
        Model("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064),
        Model("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064),
        Model("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064),
        Model("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
        Model("qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936),
        Model("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
        Model("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256),
        Model("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256),
        Model("qwen2-57b-a14b", 28, 3584, 28, 4, 128, 20480, 151936, 64, 8, 2560),
        Model("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 0, 151936, 128, 8, 768),
        Model("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 0, 151936, 128, 8, 1536),
        Model("gpt-oss-20b", 24, 2880, 64, 8, 64, 0, 201088, 32, 4, 2880, window_tokens=128, expert_bits=4.25),
        Model("gpt-oss-120b", 36, 2880, 64, 8, 64, 0, 201088, 128, 4, 2880, window_tokens=128, expert_bits=4.25),
    )
}


class UnknownModel(ValueError):
    """Raised for an unknown model; the message lists the known models."""


_SUFFIXES = ("-instruct", "-fp8", "-chat", "-bf16", "-nvfp4", "-base", "-2507", "-fp4", "-it", "-thinking")


def model_named(name: str) -> Model:
    """Look up a model by its name or by the path of a published checkpoint.

    The owner in the path, and suffixes for the format or the tuning, are ignored. Raises UnknownModel if the remaining
    name is not in `MODELS`.
    """
    plain = name.strip().lower().rsplit("/", 1)[-1].replace("meta-llama-3", "llama-3")
    while plain not in MODELS and plain.endswith(_SUFFIXES):
        plain = next(plain.removesuffix(suffix) for suffix in _SUFFIXES if plain.endswith(suffix))
    if plain not in MODELS:
        raise UnknownModel(f"unknown model {name!r}; known models: {', '.join(sorted(MODELS))}")
    return MODELS[plain]
