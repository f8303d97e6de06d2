"""Randomly mutated requests from fixed seeds. Run `http_fuzz.py` for more of them."""

import random

import pytest

from tests.orchestrrl.gateway.http_fuzz import fuzz
from tests.orchestrrl.gateway.http_harness import http_harness

INPUTS = 300


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_requests_are_answered_or_refused(seed: int) -> None:
    async with http_harness() as harness:
        statuses = await fuzz(harness, INPUTS, random.Random(seed))
    assert statuses[200] > INPUTS // 50  # some mutations give valid requests
    assert statuses[400] > INPUTS // 3
    assert statuses[415]
