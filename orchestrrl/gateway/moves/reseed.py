"""Derive the seeds with which seeded sampling continues on another engine. The functions have no side effects.

An engine seeds its generator when a request arrives. A request that continues with its own seed would therefore repeat
the random numbers of its first tokens. It continues with a seed derived from its own seed and the position instead, so
the answer is a valid sample, and a client can reproduce it from the announced seeds.
"""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

RESEED_HEADER = "X-Reseed"
RESEEDED = "reseeded"  # the field of a choice that announces seeds
_FLAGS = {"true": True, "false": False}
_UNSEEDED = -1  # vLLM treats this seed as absent


def seed_at(seed: int, position: int) -> int:
    """Return the seed for the tokens from `position` on, where `position` is the number of tokens generated before. At
    position 0 it is `seed` itself. At other positions it is the upper 63 bits of the 64-bit BLAKE2b hash (big-endian)
    of the ASCII text `SEED:POSITION`. This formula must never change, because clients use it."""
    if position == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed}:{position}".encode(), digest_size=8).digest(), "big") >> 1


def seed_of(sampling: Mapping[str, Any]) -> int | None:
    """Return the seed that the sampling fields contain, or None if sampling is not seeded."""
    seed = sampling.get("seed")
    return seed if isinstance(seed, int) and seed != _UNSEEDED else None


def drawing_seed(sampling: Mapping[str, Any]) -> int | None:
    """Return the seed that affects the tokens, or None if there is none. Greedy decoding uses no random numbers."""
    return None if sampling.get("temperature") == 0 else seed_of(sampling)


def reseeded_fields(sampling: Mapping[str, Any], position: int) -> dict[str, Any]:
    """Return the choice fields that announce the seed used from `position` on, or no fields if none is used."""
    seed = drawing_seed(sampling)
    return {} if seed is None else {RESEEDED: [{"position": position, "seed": seed_at(seed, position)}]}


def reseed_allowed(header: str | None, default: bool) -> bool | None:
    """Return whether a request may continue with derived seeds. `header` is the value of the request's header
    `X-Reseed`, which overrides the gateway's `default`. Return None if the header is invalid."""
    return default if header is None else _FLAGS.get(header)
