"""Bodies of the simulated engine's endpoints: all faults of a body are reported together, each with its path."""

from typing import Any

import pytest

from orchestrrl.engines.base import CompletionEndpoint, RequestRefused
from orchestrrl.engines.conformance import post
from orchestrrl.lab.simulated_engine.client import SimulatedEngine
from orchestrrl.lab.simulated_engine.generate import read_generate
from orchestrrl.lab.simulated_engine.options import SimulatedOptions
from orchestrrl.lab.simulated_engine.requests import read_completion
from orchestrrl.lab.simulated_engine.responses_api import read_responses
from orchestrrl.lab.simulated_engine.server import SimulatedServer
from orchestrrl.lab.simulated_engine.tokens import Sampling, TokenModel

OPTIONS, MODEL = SimulatedOptions(), TokenModel()


def completion(**body: Any) -> Any:
    return read_completion(CompletionEndpoint.COMPLETIONS, body, OPTIONS, MODEL)


def test_all_faults_of_a_generate_body_are_reported() -> None:
    params = {"n": 0, "stop": [""], "logprobs": 21}
    with pytest.raises(RequestRefused) as refused:
        read_generate({"token_ids": [], "sampling_params": params, "features": {}, "stream": "x"}, OPTIONS, MODEL)
    message = refused.value.body["error"]["message"]
    for path in ("token_ids", "sampling_params.n", "sampling_params.stop", "sampling_params.logprobs", "features"):
        assert path in message
    assert "stream: " in message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "x", "n": 16_385}, "n: "),
        ({"prompt": "x", "n": 2, "temperature": 0}, "n must be 1"),
        ({"prompt": "x", "stop": ["a"] * 5}, "at most 4 strings, got 5"),
        ({"prompt": [[]]}, "cannot be empty"),
        ({"prompt": [[1], [32_000]]}, "Token id 32000 is out of vocabulary"),
    ],
)
def test_invalid_completions_are_refused(body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        completion(**body)
    assert (refused.value.status, message in str(refused.value)) == (400, True)


def test_choices_have_consecutive_seeds() -> None:
    def samplings(**body: Any) -> list[Sampling | None]:
        return [request.sampling for request in completion(prompt="x", **body).requests]

    assert samplings(n=2, seed=4) == [Sampling(4), Sampling(5)]
    assert samplings(n=2, seed=4, temperature=0.001) == [Sampling(4, 0.01), Sampling(5, 0.01)]
    # Without a seed, the first choice is reproducible.
    assert samplings(n=2) == samplings(n=2, seed=-1) == [None, Sampling(1)]
    assert samplings(seed=4, temperature=0) == [None]


def test_only_the_first_choice_transfers_kv() -> None:
    params = {"handover": {"weights": "v1", "save": "entry"}}
    first, second = completion(prompt="x", n=2, kv_transfer_params=params).requests
    assert first.handover is not None
    assert first.handover.save == "entry"
    assert second.handover is None


def test_responses_have_logprobs_only_if_included() -> None:
    body = {"input": "x", "top_logprobs": 2}
    assert read_responses(body, OPTIONS, MODEL).request.top_logprobs is None
    included = read_responses({**body, "include": ["message.output_text.logprobs"]}, OPTIONS, MODEL)
    assert included.request.top_logprobs == 2


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
@pytest.mark.parametrize("names", [5, "x", [1], {}])
async def test_invalid_ids_to_abort_are_refused(path: str, names: Any) -> None:
    async with SimulatedServer(OPTIONS) as server:
        engine = SimulatedEngine(server.url)
        status, answer = await post(engine, path, {"request_ids": names})
        await engine.close()
    assert (status, answer["error"]["param"]) == (400, "body.request_ids")
