"""`prefix_affinity`: requests that begin alike go to the same engine, which has their prefix cached. Pure.

Engines are ranked for each prefix by rendezvous hashing (Thaler and Ravishankar, 1998), which depends on nothing but
the ids: every gateway, and one that was started again, ranks them the same, and when an engine goes only its own
prefixes go elsewhere. The first engine is taken that is not loaded too far beyond the least loaded one, as in
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2016).
"""

from array import array
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from orchestrrl.gateway.routing.policies import load_index
from orchestrrl.gateway.routing.policies.base import L, RoutingSnapshot, within

# So much of a prompt tells prefixes apart. What is longer in common, as a long system prompt, makes one prefix of all.
PREFIX_TOKENS = 256
PREFIX_CHARACTERS = 1024

_MASK = (1 << 64) - 1


def choose(snapshot: RoutingSnapshot[L]) -> L:
    """The engine that the prefix ranks highest among those within the slack; by load index without a prefix."""
    prefix = snapshot.newcomer.prefix
    if not prefix:
        return load_index.choose(snapshot)
    return max(within(snapshot), key=lambda load: score(prefix, load.id))


def prefix_of(group: str, body: Mapping[str, Any]) -> int:
    """64 bits that are equal for requests which begin alike: of the group if there is one, else of the prompt's first
    tokens or characters. 0: neither is there."""
    if group:
        return _digest(b"group", group.encode())
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return _digest(b"text", prompt[:PREFIX_CHARACTERS].encode(errors="surrogatepass"))
    if isinstance(prompt, list | tuple):
        # Ids were checked to fit an array when the body was read.
        return _digest(b"tokens", array("I", prompt[:PREFIX_TOKENS]).tobytes())
    messages = body.get("messages")
    if not isinstance(messages, list):
        return 0
    text, left = [], PREFIX_CHARACTERS
    for message in messages:
        piece = str(message.get("content", "") if isinstance(message, Mapping) else message)[:left]
        text.append(piece)
        left -= len(piece)
        if left <= 0:
            break
    return _digest(b"chat", "\0".join(text).encode(errors="surrogatepass"))


def score(prefix: int, engine: str) -> int:
    """How much a prefix prefers an engine: the finaliser of splitmix64 over both, a permutation, so no two tie whose
    ids differ in their digest."""
    mixed = prefix ^ _engine_digest(engine)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)


@lru_cache(maxsize=1 << 14)
def _engine_digest(engine: str) -> int:
    return _digest(b"engine", engine.encode())


def _digest(kind: bytes, data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, person=kind).digest(), "big") or 1
