"""Unmodified clients behind the gateway, with two vLLM servers: every 20th request is moved by force, and each answer
equals that of a bare server."""

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrrl.lab.testbed.engines import LocalEngine, all_started, start_vllm
from orchestrrl.lab.testbed.processes import beside
from tests.clients.forced_moves import MOVED_EACH, ForcedMoves
from tests.clients.recording_proxy import RecordingProxy, recording_proxy
from tests.clients.recordings import FOLDER, distinct_calls
from tests.clients.samples import CHAT, COMPLETIONS, GENERATE, ClientSample, samples_of
from tests.orchestrrl.gateway.processes import GatewayProcess, operator_url
from tests.vllm.conftest import MAX_NUM_SEQS, REPOSITORY, VLLM_ARGUMENTS, VLLM_PYTHON

CLIENTS = REPOSITORY / "tests" / "clients"
CLIENT_WITHIN_S = 600.0
AT_ONCE = 4
SAME_LOGPROB = 1e-4  # all servers compute in float32
MOVABLE_SHARE = 0.95  # of all requests, AsyncGRPO's included
REQUESTS = 80  # of each client in its own environment


@dataclass(frozen=True)
class ClientRun:
    """What a client received, what the gateway answered, and what was moved meanwhile."""

    received: list[dict[str, Any]]
    proxy: RecordingProxy
    moves: ForcedMoves

    def samples(self) -> list[ClientSample]:
        calls = [call for call in self.proxy.calls if call.endpoint in (COMPLETIONS, CHAT, GENERATE)]
        return [sample for call in calls for sample in samples_of(call.endpoint, call.body, call.answer)]


async def run_client(
    name: str, python: Path, servers: tuple[LocalEngine, ...], model: Path, requests: int, folder: Path
) -> ClientRun:
    """Run the script of client `name` in the environment of `python` against a gateway in front of `servers`."""
    engines = [text for index, server in enumerate(servers) for text in ("--engine", f"e{index}={server.url}")]
    async with (
        GatewayProcess(folder / "gateway.log", [*engines, "--reseed"]) as gateway,
        aiohttp.ClientSession() as http,
    ):
        url = await gateway.next_line()
        moves = ForcedMoves(http, await operator_url(http, url))
        async with recording_proxy(url) as (proxy_url, proxy), beside(moves.run()):
            process = await asyncio.create_subprocess_exec(
                *(python, CLIENTS / name / "client.py", proxy_url, model, str(requests), folder / "received.json"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
            )
            try:
                shown, _ = await asyncio.wait_for(process.communicate(), CLIENT_WITHIN_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == 0, shown.decode(errors="replace")[-5000:]
    received = json.loads((folder / "received.json").read_text())
    return ClientRun(received, proxy, moves)


def python_of(name: str) -> Path:
    """Return the interpreter of an environment that `make test-clients` creates. TRL's is that of vLLM, because its
    client imports vLLM."""
    return VLLM_PYTHON if name == "trl" else REPOSITORY / ".venv-clients" / name / "bin" / "python"


def record(name: str, run: ClientRun, config: pytest.Config) -> None:
    """Write the recording of a client if `--record` is set."""
    if config.getoption("--record"):
        calls = distinct_calls(name, run.proxy.calls)
        (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(map(json.dumps, calls)) + "\n]\n")


class BareServer:
    """One vLLM server that reproduces samples without a gateway."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def check(self, sample: ClientSample) -> None:
        """Raise AssertionError if the server does not reproduce the sample."""
        if not sample.reproducible:
            choice = await self._ask(sample.scoring())
            scored = choice["prompt_logprobs"][len(sample.prompt_ids) :]
            logprobs = [entry[str(token)]["logprob"] for entry, token in zip(scored, sample.token_ids, strict=True)]
            assert sample.logprobs == pytest.approx(logprobs, abs=SAME_LOGPROB)
            return
        for body, start, end in sample.references():
            choice = await self._ask(body)
            assert sample.token_ids[start:end] == choice["token_ids"]
            assert sample.logprobs[start:end] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=SAME_LOGPROB)
        assert sample.finish_reason == choice["finish_reason"]

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self._slots, self._http.post(f"{self._url}{COMPLETIONS}", json=body) as response:
            assert response.status == 200, await response.text()
            choice: dict[str, Any] = (await response.json())["choices"][0]
            return choice


async def check_run(run: ClientRun, server: LocalEngine, requests: int) -> None:
    samples = run.samples()
    assert len(samples) >= requests
    answered = [{"token_ids": sample.token_ids, "logprobs": sample.logprobs} for sample in samples]
    assert all(received in answered for received in run.received)
    assert len(run.received) >= requests
    assert len(run.moves.moved) >= len(run.moves.seen) // MOVED_EACH - 1
    assert len(run.moves.immovable) <= (1 - MOVABLE_SHARE) * len(run.moves.seen)
    assert any(sample.reseeded for sample in samples)
    async with aiohttp.ClientSession() as http:
        bare = BareServer(server.url, http)
        await asyncio.gather(*(bare.check(sample) for sample in samples))


@pytest.mark.parametrize(("name", "requests"), [("openai", 40), ("trl", 40)])
async def test_client_of_vllms_environment(
    name: str, requests: int, vllm_servers: tuple[LocalEngine, ...], tiny_model: Path, tmp_path: Path
) -> None:
    run = await run_client(name, VLLM_PYTHON, vllm_servers, tiny_model, requests, tmp_path)
    await check_run(run, vllm_servers[0], requests)


@pytest.mark.clients
@pytest.mark.timeout(CLIENT_WITHIN_S * 2)
@pytest.mark.parametrize("name", ["openai", "trl", "verl", "skyrl"])
async def test_client(
    name: str, vllm_servers: tuple[LocalEngine, ...], tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = await run_client(name, python_of(name), vllm_servers, tiny_model, REQUESTS, tmp_path)
    await check_run(run, vllm_servers[0], REQUESTS)
    record(name, run, request.config)


@pytest.mark.clients
@pytest.mark.timeout(CLIENT_WITHIN_S * 2)
async def test_verifiers(tiny_model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """verifiers reads log-probabilities in the form of vLLM 0.31, which differs from that of vLLM 0.32."""
    starting = [
        start_vllm(
            name,
            python=REPOSITORY / ".venv-vllm-0.31.0" / "bin" / "python",
            model=tiny_model,
            log_dir=tmp_path,
            max_num_seqs=MAX_NUM_SEQS,
            arguments=VLLM_ARGUMENTS,
            environment={"PYTHONPATH": ""},
        )
        for name in ("older-0", "older-1")
    ]
    async with all_started(starting) as servers:
        run = await run_client("verifiers", python_of("verifiers"), tuple(servers), tiny_model, REQUESTS, tmp_path)
        await check_run(run, servers[0], REQUESTS)
    record("verifiers", run, request.config)
