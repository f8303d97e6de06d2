"""Requests that are spoilt at random, from seeds that stay the same; `http_fuzz.py` runs more of them by hand."""

import random

import pytest

from tests.orchestrrl.gateway.http_fuzz import fuzz
from tests.orchestrrl.gateway.http_harness import http_harness

INPUTS = 300


@pytest.mark.parametrize("seed", [1, 2])
async def test_whatever_clients_send_is_answered_or_refused_and_breaks_nothing(seed: int) -> None:
    async with http_harness() as harness:
        statuses = await fuzz(harness, INPUTS, random.Random(seed))
    assert statuses[200] > INPUTS // 50  # some of what is odd is lawful
    assert statuses[400] > INPUTS // 3
    assert statuses[415]
