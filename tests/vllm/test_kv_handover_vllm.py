"""Moves of running requests between two vLLM servers with their KV cache, generated tokens included."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from orchestrrl.engines import handover
from orchestrrl.gateway.routing.sessions import SessionOutcome
from orchestrrl.integrations.instrument.kv_entries import KvEntryStore
from orchestrrl.lab.testbed.engines import LocalEngine, start_vllm
from planner.model import MoveMethod, RequestId
from tests.system.streams import Answer
from tests.vllm.conftest import INTERRUPTED_TOKENS, MAX_NUM_SEQS, TINY_MODEL_SCRIPT, VLLM_PLUGIN, VLLM_PYTHON
from tests.vllm.test_gateway_vllm import CHAT, COMPLETION, Harness

pytestmark = pytest.mark.slow

DEADLINE_S = 120.0
WAIT_S = 60.0  # wait for an entry being written; generous for a busy machine
PROMPT_TOKENS = 200
TOKENS = 300  # tokens before the move: with the prompt, three blocks of 128 and part of a fourth
REST_TOKENS = 100
BODY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "logprobs": 1,
    "stream": True,
}
# The second server has a prefix cache.
PREFIX_CACHING = ("--no-enable-prefix-caching", "--enable-prefix-caching")

MERGED_TOKENS = 50  # a busy machine reads late

CORES = sorted(os.sched_getaffinity(0))
NAMES = count()
WHOLE = 84  # a letter: if a prompt ends inside a character, vLLM starts with the prompt's text again
prompts = (
    [first, *((7 * index + first) % 400 + 20 for index in range(PROMPT_TOKENS - 2)), WHOLE] for first in count(20)
)  # prompts share no prefix, so that the prefix cache has none of them


@dataclass
class Pair:
    """Two servers that transfer KV through `store`."""

    urls: tuple[str, str]
    store: KvEntryStore
    http: aiohttp.ClientSession
    entries: list[str] = field(default_factory=list)  # belonging to this test

    async def ask(
        self,
        server: int,
        prompt: list[int],
        max_tokens: int,
        params: Mapping[str, Any],
        *,
        stop_at: int | None = None,
        freeze: bool = False,
    ) -> Answer:
        """Return an answer. With `stop_at`, abort the request after that many tokens, optionally after a pause."""
        name = f"r{next(NAMES)}"
        body = {**BODY, "prompt": prompt, "max_tokens": max_tokens, **params}
        answer, url = Answer(), self.urls[server]
        async with self.http.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    answer.add(json.loads(line.removeprefix(b"data: ")))
                if stop_at is not None and len(answer.token_ids) >= stop_at:
                    stop_at = None
                    if freeze:
                        await self.control(server, "/pause?mode=keep&clear_cache=false")
                    await self.control(server, "/abort_requests", {"request_ids": [f"cmpl-{name}-0"]})
        return answer

    async def control(self, server: int, path: str, body: dict[str, Any] | None = None) -> None:
        async with self.http.post(self.urls[server] + path, json=body) as response:
            assert response.status == 200, await response.text()

    async def reload_weights(self, server: int, model: Path) -> None:
        await self.control(
            server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}}
        )

    async def loaded_tokens(self, server: int) -> float:
        return (await self._prompt_tokens(server))[handover.EXTERNAL_SOURCE]

    async def _prompt_tokens(self, server: int) -> dict[str, float]:
        async with self.http.get(self.urls[server] + "/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            samples = [sample for family in families for sample in family.samples]
        name = "vllm:prompt_tokens_by_source_total"
        return {sample.labels["source"]: sample.value for sample in samples if sample.name == name}

    def entry(self) -> str:
        self.entries.append(f"e{next(NAMES)}")
        return self.entries[-1]

    async def run_until(self, prompt: list[int], entry: str, *, tokens: int = TOKENS, freeze: bool = False) -> Answer:
        """Run a slow request on the first server and abort it before its end."""
        params = handover.saving("v1", entry)
        part = await self.ask(0, prompt, 10 * INTERRUPTED_TOKENS, params, stop_at=tokens, freeze=freeze)
        assert part.finish_reason == "abort"
        assert tokens <= len(part.token_ids) < 10 * INTERRUPTED_TOKENS
        return part

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_saved(self, entry: str) -> Path:
        file = self.store.file(entry, 0)
        await self.until(file.exists)
        return file

    async def check(self, prompt: list[int], joined: list[Answer]) -> None:
        """Check that the parts, up to REST_TOKENS of the last, form the undisturbed answer and no entry remains."""
        token_ids = [token for part in joined for token in part.token_ids]
        logprobs = [logprob for part in joined for logprob in part.logprobs]
        undisturbed = await self.ask(0, prompt, len(token_ids), {})
        assert token_ids == undisturbed.token_ids
        assert logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)
        await self.until(lambda: not any((self.store.root / entry).exists() for entry in self.entries))


@pytest.fixture(scope="module")
def handover_servers(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, tuple[LocalEngine, ...]]]:
    """Return the shared directory and two vLLM servers with the connector."""
    log_dir, shared = tmp_path_factory.mktemp("vllm-kv"), tmp_path_factory.mktemp("kv")

    async def start(index: int) -> LocalEngine:
        return await start_vllm(
            f"kv-{index}",
            python=VLLM_PYTHON,
            model=tiny_model,
            log_dir=log_dir,
            max_num_seqs=MAX_NUM_SEQS,
            arguments=(
                *("--max-model-len", "16384", "--num-gpu-blocks-override", "130", PREFIX_CACHING[index]),
                *("--logits-processors", "slow_steps:SlowSteps"),
                *handover.vllm_arguments(shared),
            ),
            environment={
                # By default both are bound to the same core, where a polling server almost stops the other.
                "VLLM_CPU_OMP_THREADS_BIND": str(CORES[index % len(CORES)]),
                "PYTHONPATH": f"{handover.MODULE_FOLDER}:{VLLM_PLUGIN}",
                "ORCHESTRRL_TEST_SLOW_STEPS": f"{INTERRUPTED_TOKENS}:0.01",
            },
        )

    async def start_all() -> list[LocalEngine]:
        return await asyncio.gather(*(start(index) for index in range(2)))

    async def stop_all() -> None:
        await asyncio.gather(*(engine.stop() for engine in engines))

    engines = asyncio.run(start_all())
    yield shared, tuple(engines)
    asyncio.run(stop_all())


@pytest.fixture
async def pair(handover_servers: tuple[Path, tuple[LocalEngine, ...]]) -> AsyncIterator[Pair]:
    shared, (first, second) = handover_servers
    async with aiohttp.ClientSession() as http:
        yield Pair((first.url, second.url), KvEntryStore(shared, ranks=1), http)


async def test_running_request_continues_elsewhere_with_its_kv(pair: Pair) -> None:
    """The last token alone is computed there, because it yields the next one."""
    prompt, entry = next(prompts), pair.entry()
    part = await pair.run_until(prompt, entry)
    before = await pair.loaded_tokens(1)
    continued = prompt + part.token_ids
    rest = await pair.ask(1, continued, REST_TOKENS, handover.loading("v1", entry, wait_s=WAIT_S))
    loaded_tokens = await pair.loaded_tokens(1) - before
    assert loaded_tokens == len(continued) - 1
    assert loaded_tokens > len(prompt)
    await pair.check(prompt, [part, rest])


@pytest.mark.parametrize(("ask", "stream"), [(COMPLETION, True), (CHAT, False)], ids=["completion", "chat"])
async def test_gateway_moves_in_both_directions_by_both_methods(
    handover_servers: tuple[Path, tuple[LocalEngine, ...]], pair: Pair, ask: tuple[str, Any], stream: bool
) -> None:
    """The second server has a prefix cache, which may contain tokens that it computed itself."""
    path, body = ask
    body = {**body, "max_tokens": INTERRUPTED_TOKENS + 310}  # all attempts except the last are slow
    if path == "/v1/completions":
        body["prompt"] = next(prompts)
    else:
        body["messages"] = [{"role": "user", "content": f"Tell me {next(NAMES)}"}]
    harness = Harness(handover_servers[1], pair.http, kv_version="tp1/v1")
    harness.url = await harness.server.start("127.0.0.1", 0)
    undisturbed = await harness.ask(pair.urls[0], path, body, stream=stream)
    prompt_tokens = len(undisturbed.prompt_token_ids)
    harness.pause_registry.extend((100, 100, 100, 100))
    asking = asyncio.create_task(harness.ask(harness.url, path, body, "r", stream=stream))
    moved = []
    for turn, method in enumerate((MoveMethod.TRANSFER,) * 2 + (MoveMethod.RECOMPUTE,) * 2):
        moved.append(await harness.move("r", 100 * (turn + 1), method, other_s=2 * WAIT_S))
        assert moved[-1].done, moved[-1]
        assert moved[-1].method is method, moved[-1]
    answer = await asking
    assert answer.token_ids == undisturbed.token_ids
    assert answer.text == undisturbed.text
    assert answer.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)
    for turn, item in enumerate(moved[:2]):
        assert item.recomputed_tokens == 1
        assert item.loaded_tokens >= prompt_tokens + 100 * (turn + 1) - 1 > prompt_tokens
    assert [item.loaded_tokens for item in moved[2:]] == [0, 0]
    await harness.server.close()
    await harness.fleet.close()


async def test_next_turn_of_a_session_loads_its_kv_elsewhere(
    handover_servers: tuple[Path, tuple[LocalEngine, ...]], pair: Pair
) -> None:
    harness = Harness(handover_servers[1], pair.http, kv_version="tp1/v1")
    harness.url = await harness.server.start("127.0.0.1", 0)
    for backend in harness.fleet:
        backend.prefill_times.fitted = 0.0, 1.0  # seconds, so that a load is worth its cost
    harness.fleet.sessions.turns[SessionOutcome.MOVED] = 100
    body = {**COMPLETION[1], "prompt": next(prompts), "max_tokens": REST_TOKENS, "session_id": "s"}
    first = await harness.ask(harness.url, COMPLETION[0], body, stream=False)
    kept = harness.fleet.sessions.get("s", harness.fleet.clock.now_s())
    assert kept is not None
    assert kept.saved is not None
    await pair.until_saved(kept.saved.entry)
    home = next(backend for backend in harness.fleet if backend.cache == kept.cache)
    routes = [backend.route for backend in harness.fleet]
    harness.gateway.set_routes([replace(route, draining=route.engine == home.id) for route in routes])
    body["prompt"] = [*body["prompt"], *first.token_ids, 30, 31, 32]
    other = int(home.id == "e0")
    before = await pair.loaded_tokens(other)
    second = await harness.ask(harness.url, COMPLETION[0], body, stream=False)
    assert await pair.loaded_tokens(other) - before == PROMPT_TOKENS + REST_TOKENS - 1
    undisturbed = await harness.ask(pair.urls[0], COMPLETION[0], body, stream=False)
    assert second.token_ids == undisturbed.token_ids
    assert second.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)
    await harness.server.close()
    await harness.fleet.close()


async def test_request_moves_again_and_back(pair: Pair) -> None:
    """The second move goes back: loaded and newly computed KV is saved again."""
    prompt, there, back = next(prompts), pair.entry(), pair.entry()
    first = await pair.run_until(prompt, there)
    params = handover.loading("v1", there, save=back, wait_s=WAIT_S)
    continued = prompt + first.token_ids
    second = await pair.ask(1, continued, 10 * INTERRUPTED_TOKENS, params, stop_at=150)
    assert second.finish_reason == "abort"
    continued += second.token_ids
    before = await pair.loaded_tokens(0)
    third = await pair.ask(0, continued, REST_TOKENS, handover.loading("v1", back, wait_s=WAIT_S))
    assert await pair.loaded_tokens(0) - before == len(continued) - 1
    await pair.check(prompt, [first, second, third])


async def test_blocks_in_the_prefix_cache_are_not_loaded(pair: Pair) -> None:
    """The first block of the prompt is cached before the request arrives."""
    prompt, entry = next(prompts), pair.entry()
    await pair.ask(1, prompt, 1, {})
    part = await pair.run_until(prompt, entry)
    before = await pair.loaded_tokens(1)
    continued = prompt + part.token_ids
    rest = await pair.ask(1, continued, REST_TOKENS, handover.loading("v1", entry, wait_s=WAIT_S))
    assert await pair.loaded_tokens(1) - before == len(continued) - 1 - 128
    await pair.check(prompt, [part, rest])


async def test_several_requests_move_at_once_and_another_stays(pair: Pair) -> None:
    asked = [next(prompts) for _ in range(3)]
    neighbour_prompt = next(prompts)
    neighbour = asyncio.create_task(pair.ask(0, neighbour_prompt, TOKENS + 50, {}))
    before = await pair.loaded_tokens(1)

    async def move(index: int, prompt: list[int]) -> tuple[Answer, Answer]:
        entry = pair.entry()
        part = await pair.run_until(prompt, entry, tokens=100 + 70 * index)
        params = handover.loading("v1", entry, wait_s=WAIT_S)
        return part, await pair.ask(1, prompt + part.token_ids, REST_TOKENS, params)

    moved = await asyncio.gather(*(move(index, prompt) for index, prompt in enumerate(asked)))
    held = sum(len(prompt) + len(part.token_ids) for prompt, (part, _) in zip(asked, moved, strict=True))
    assert await pair.loaded_tokens(1) - before == held - len(asked)
    for prompt, parts in zip(asked, moved, strict=True):
        await pair.check(prompt, list(parts))
    await pair.check(neighbour_prompt, [await neighbour])


async def test_frozen_request_is_saved(pair: Pair) -> None:
    prompt, entry = next(prompts), pair.entry()
    part = await pair.run_until(prompt, entry, tokens=100, freeze=True)
    await pair.until_saved(entry)
    await pair.control(0, "/resume")
    before = await pair.loaded_tokens(1)
    continued = prompt + part.token_ids
    rest = await pair.ask(1, continued, REST_TOKENS, handover.loading("v1", entry, wait_s=WAIT_S))
    assert await pair.loaded_tokens(1) - before == len(continued) - 1
    await pair.check(prompt, [part, rest])


async def test_kv_of_other_weights_is_not_loaded(pair: Pair) -> None:
    prompt, entry = next(prompts), pair.entry()
    part = await pair.run_until(prompt, entry)
    before = await pair.loaded_tokens(1)
    params = handover.loading("v2", entry, wait_s=WAIT_S)
    rest = await pair.ask(1, prompt + part.token_ids, REST_TOKENS, params)
    assert await pair.loaded_tokens(1) == before
    await pair.check(prompt, [part, rest])


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    """Return the same model with other random weights."""
    command = [VLLM_PYTHON, TINY_MODEL_SCRIPT, tmp_path / "other", "--seed", "1"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return tmp_path / "other"


async def test_kv_of_old_weights_is_not_used(pair: Pair, tiny_model: Path, other_weights: Path) -> None:
    """The destination has other weights than the source and answers as without any KV."""
    prompt, entry = next(prompts), pair.entry()
    part = await pair.ask(1, prompt, 10 * INTERRUPTED_TOKENS, handover.saving("v1", entry), stop_at=100)
    await pair.until_saved(entry)
    continued = prompt + part.token_ids
    before = await pair.loaded_tokens(0)
    try:
        await pair.reload_weights(0, other_weights)
        rest = await pair.ask(0, continued, REST_TOKENS, handover.loading("v2", entry, wait_s=WAIT_S))
        without = await pair.ask(0, continued, REST_TOKENS, {})
    finally:
        await pair.reload_weights(0, tiny_model)
    assert await pair.loaded_tokens(0) == before
    assert rest.token_ids == without.token_ids
    assert rest.token_ids != (await pair.ask(0, continued, REST_TOKENS, {})).token_ids


async def test_weights_change_during_a_running_request(
    handover_servers: tuple[Path, tuple[LocalEngine, ...]], pair: Pair, tiny_model: Path, other_weights: Path
) -> None:
    """After the pause barrier the request continues with the new weights, and its KV is recomputed, even by a move with
    KV transfer. The next move, from an attempt with only the new weights, transfers their KV."""
    of_earlier_tests = set(pair.store.root.rglob("*.kv"))
    path, body = COMPLETION
    body = {**body, "prompt": next(prompts), "max_tokens": INTERRUPTED_TOKENS + 310, "logprobs": None}
    harness = Harness(handover_servers[1], pair.http, kv_version="tp1/v1")
    harness.url = await harness.server.start("127.0.0.1", 0)
    operator = await harness.server.start_operator("127.0.0.1", 0)

    async def barrier(path: str, asked: dict[str, Any]) -> dict[str, Any]:
        async with pair.http.post(f"{operator}/orchestrrl/{path}", json=asked) as response:
            assert response.status == 200, await response.text()
            told: dict[str, Any] = await response.json()
            return told

    async def update(model: Path, version: int) -> None:
        closed = await barrier("pause", {"holder": "test", "lease_s": 10 * DEADLINE_S})
        assert closed["phase"] == "quiet"
        await asyncio.gather(*(pair.reload_weights(server, model) for server in range(2)))
        await barrier("resume", {"lease_id": closed["lease_id"], "policy_version": version})

    old = await harness.ask(pair.urls[0], path, {**body, "max_tokens": 300}, stream=True)
    await update(tiny_model, 1)
    asking = asyncio.create_task(harness.ask(harness.url, path, body, "r", stream=True))
    try:
        await harness.until("r", 100)
        await update(other_weights, 2)
        record = harness.gateway.ledger.get(RequestId("r"))
        assert record is not None
        loaded_before = [await pair.loaded_tokens(server) for server in range(2)]
        wish = {"method": MoveMethod.TRANSFER, "other_s": 2 * WAIT_S}
        under_both = await harness.move("r", len(record.generated_ids) + 50, **wish)
        assert [await pair.loaded_tokens(server) for server in range(2)] == loaded_before
        assert (under_both.done, under_both.method) == (True, MoveMethod.RECOMPUTE)
        under_new = await harness.move("r", len(record.generated_ids) + 50, **wish)
        assert (under_new.done, under_new.method) == (True, MoveMethod.TRANSFER)
        assert under_new.loaded_tokens > len(body["prompt"])
        spans = record.versions.spans(INTERRUPTED_TOKENS)
        answer = await asking
        assert [span.version for span in spans] == [1, 2]
        told = spans[1].start
        assert 100 <= told < 300
        # vLLM merges tokens for a slow client, and a merged chunk counts as one of the older version.
        change = next(at for at in range(told + 1) if at == told or answer.token_ids[at] != old.token_ids[at])
        assert told - MERGED_TOKENS <= change
        rest = {**body, "prompt": body["prompt"] + answer.token_ids[:change], "max_tokens": body["max_tokens"] - change}
        new = await harness.ask(pair.urls[0], path, rest, stream=True)
        assert answer.token_ids[change:] == new.token_ids
        assert answer.token_ids[change : change + 50] != old.token_ids[change : change + 50]
    finally:
        asking.cancel()
        await update(tiny_model, 3)
    # The attempt with both weights left an empty entry, which is deleted only by age.
    left = {file: file.stat().st_size for file in pair.store.root.rglob("*.kv") if file not in of_earlier_tests}
    assert all(size < 4096 for size in left.values()), left
    await harness.server.close()
    await harness.fleet.close()


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def changed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def removed(file: Path) -> None:
    file.unlink()
    file.parent.rmdir()


@pytest.mark.parametrize("damage", [cut_short, changed, removed])
async def test_damaged_entry_is_recomputed(pair: Pair, damage: Callable[[Path], None]) -> None:
    prompt, entry = next(prompts), pair.entry()
    part = await pair.run_until(prompt, entry, tokens=100)
    damage(await pair.until_saved(entry))
    before = await pair.loaded_tokens(1)
    params = handover.loading("v1", entry, wait_s=0.5)
    rest = await pair.ask(1, prompt + part.token_ids, REST_TOKENS, params)
    assert rest.finish_reason == "length"
    assert await pair.loaded_tokens(1) == before
    await pair.check(prompt, [part, rest])


async def test_invalid_transfer_params_are_ignored(pair: Pair) -> None:
    prompt = next(prompts)
    params = {handover.BODY_FIELD: {"handover": {"weights": 7, "load": "../../etc"}}}
    await pair.check(prompt, [await pair.ask(1, prompt, 5, params)])


def test_blocks_of_any_memory_layout_are_transferred(tmp_path: Path) -> None:
    """Blocks on a GPU or in several pieces use another code path than those of the servers above."""
    environment = {**os.environ, "PYTHONPATH": str(handover.MODULE_FOLDER)}
    command = [str(VLLM_PYTHON), str(VLLM_PLUGIN / "carry_blocks.py"), str(tmp_path)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
