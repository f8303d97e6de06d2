"""Operations that a model asks for, whatever is done twice or badly: what MFU counts. Pure."""

from planner.cost.models import Model


def attended_pairs(model: Model, tokens: float, square_tokens: float | None = None) -> float:
    """Of queries and keys that a causal mask leaves, over all layers of a sequence; in the mean, of sequences with that
    mean of squares. A layer whose window slides takes all of them to be longer than it, or all to be shorter, as their
    mean is."""
    full = (tokens * tokens if square_tokens is None else square_tokens) / 2
    if not 0 < model.window_tokens < tokens:
        return model.layers * full
    window = model.window_tokens
    return model.layers / 2 * (full + tokens * window - window * window / 2)  # every second layer slides


def forward_flops(model: Model, tokens: float, square_tokens: float | None = None) -> float:
    """Of a sequence. Multiplications and additions of matrix products; attention as the causal mask leaves it."""
    attention = 4.0 * model.q_heads * model.head_dim * attended_pairs(model, tokens, square_tokens)
    return 2.0 * model.active_params * tokens + attention


def step_flops(model: Model, sequences: int, tokens: float, square_tokens: float | None = None) -> float:
    """Of an optimiser step: the backward pass asks for twice the forward's."""
    return 3.0 * sequences * forward_flops(model, tokens, square_tokens)
