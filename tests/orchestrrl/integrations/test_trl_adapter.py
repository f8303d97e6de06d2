"""The TRL adapter with a fake trainer and fake vLLM servers, without TRL."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.engines.base import RequestRefused
from orchestrrl.gateway.client import ClientPatience
from orchestrrl.integrations.trl import GatewayRollout, read_completion, sampling_parameters, tokenize
from tests.orchestrrl.gateway.processes import free_port
from tests.orchestrrl.integrations.fake_vllm import servers

REPOSITORY = Path(__file__).parents[3]
PATIENCE = ClientPatience(connect_s=2.0, probe_first_s=0.02, probe_cap_s=0.05, watch_s=0.05, unreachable_s=0.2)
WITHIN_S = 120.0


class FakeTokenizer:
    """A fake tokenizer with one token per character."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in prompt] for prompt in text]}

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> dict[str, list[list[int]]]:
        assert options == {
            "chat_template": "a template",
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            "thinking": False,
        }
        return self(["|".join(str(message["content"]) for message in prompt) for prompt in conversation])


class FakeTrainer:
    def __init__(self) -> None:
        self.model: Any = object()
        self.processing_class = FakeTokenizer()
        self.args = SimpleNamespace(generation_kwargs=None)
        self.state = SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None)
        self.tools: Any = None
        self.chat_template = "a template"
        self.chat_template_kwargs = {"thinking": False}
        self.max_completion_length: int | None = 3
        self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty = 0.7, 0.9, 0, None, 1.0

    def save_model(self, output_dir: str, _internal_call: bool) -> None:
        assert _internal_call, "every step's weights would be pushed to the hub"
        folder = Path(output_dir)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(f"weights of step {self.state.global_step}")


class FakePublishes:
    def __init__(self) -> None:
        self.published: list[tuple[int, object]] = []
        self.error: Exception | None = None
        self.newest = -1

    def publish(self, version: int, model: object) -> None:
        if self.error is not None:
            raise self.error
        self.published.append((version, model))

    def next_version(self) -> int:
        return self.newest + 1


async def test_weights_are_published_before_a_rollout_after_a_step() -> None:
    sync, trainer = FakePublishes(), FakeTrainer()
    async with servers() as (gateway,):
        rollout = GatewayRollout(gateway.url, sync=sync)
        for trainer.state.global_step in (0, 0, 1, 1, 2):
            await asyncio.to_thread(rollout, ["ab"], trainer)
        assert sync.published == [(step, trainer.model) for step in (0, 1, 2)]
        assert rollout.syncs == 3
        trainer.state.global_step = 3
        sync.error = Permanent("version 3 is not the fleet's")
        with pytest.raises(Permanent, match="version 3"):
            await asyncio.to_thread(rollout, ["ab"], trainer)
        assert len(gateway.asked) == 5  # no rollout uses the previous version
        sync.error = None
        await asyncio.to_thread(rollout, ["ab"], trainer)
    assert sync.published[-1] == (3, trainer.model)


@pytest.mark.parametrize(("newest", "first_step", "versions"), [(7, 0, [8, 9]), (7, 5, [8, 9]), (7, 30, [30, 31])])
async def test_restarted_trainer_continues_above_the_fleets_version(
    newest: int, first_step: int, versions: list[int]
) -> None:
    sync, trainer = FakePublishes(), FakeTrainer()
    sync.newest = newest
    rollout = GatewayRollout("http://127.0.0.1:1", sync=sync)
    for trainer.state.global_step in (first_step, first_step + 1):
        rollout.sync_weights(trainer)
        sync.newest = sync.published[-1][0]
    assert [version for version, _ in sync.published] == versions


async def test_batch_is_requested_concurrently_and_returned_in_order() -> None:
    async with servers() as (gateway,):
        gateway.batch = 6
        rollout, trainer = GatewayRollout(gateway.url, tag="job"), FakeTrainer()
        prompts = ["ab", "ab", "ab", "xyz", "xyz", "xyz"]
        rolled = await asyncio.to_thread(rollout, prompts, trainer)
    assert rolled["prompt_ids"] == [[97, 98]] * 3 + [[120, 121, 122]] * 3
    assert rolled["completion_ids"] == [[98, 97]] * 3 + [[122, 121, 120]] * 3
    assert rolled["logprobs"] == [[-0.5] * 2] * 3 + [[-0.5] * 3] * 3
    assert len({headers["X-Request-Id"] for _, headers in gateway.asked}) == 6
    assert {headers["X-Tag"] for _, headers in gateway.asked} == {"job"}
    groups = {(tuple(body["prompt"]), headers["X-Group-Id"]) for body, headers in gateway.asked}
    assert len(groups) == len({group for _, group in groups}) == 2
    assert gateway.asked[0][0] == {
        "prompt": gateway.asked[0][0]["prompt"],
        "max_tokens": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": 0,
        "return_token_ids": True,
    }
    assert (rollout.requests, rollout.bypassed) == (6, 0)


async def test_request_ids_are_new_per_batch_and_groups_per_step() -> None:
    async with servers() as (gateway,):
        rollout, trainer = GatewayRollout(gateway.url), FakeTrainer()
        for trainer.state.global_step in (0, 0, 1):
            await asyncio.to_thread(rollout, ["a"], trainer)
        again = GatewayRollout(gateway.url)
        await asyncio.to_thread(again, ["a"], trainer)
    assert len({headers["X-Request-Id"] for _, headers in gateway.asked}) == 4
    first, second, third, fourth = (headers["X-Group-Id"] for _, headers in gateway.asked)
    assert first == second != third == fourth


async def test_engines_answer_while_the_gateway_is_down() -> None:
    async with servers() as (engine,):
        nowhere = f"http://127.0.0.1:{free_port()}"
        rollout = GatewayRollout(nowhere, engine_urls=[engine.url], patience=PATIENCE)
        rolled = await asyncio.to_thread(rollout, ["ab", "cd"], FakeTrainer())
    assert rolled["completion_ids"] == [[98, 97], [100, 99]]
    assert rollout.bypassed == 2


async def test_refusal_ends_the_batch_and_cancels_other_requests() -> None:
    async with servers() as (gateway,):
        gateway.batch = 100
        with pytest.raises(RequestRefused, match="what"):
            await asyncio.to_thread(GatewayRollout(gateway.url), ["ab", "cd", "?"], FakeTrainer())
        async with asyncio.timeout(WITHIN_S):
            while gateway.left < len(gateway.asked) - 1:
                await asyncio.sleep(0.01)


async def test_rollout_raises_if_no_server_answers() -> None:
    rollout = GatewayRollout(f"http://127.0.0.1:{free_port()}", patience=PATIENCE)
    with pytest.raises(Retryable, match="neither"):
        await asyncio.to_thread(rollout, ["a"], FakeTrainer())


def test_conversations_use_the_trainers_chat_template() -> None:
    conversation = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert tokenize([conversation], FakeTrainer()) == [[97, 124, 98]]


def test_unsupported_settings_are_rejected() -> None:
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    with pytest.raises(Permanent, match="prompts"):
        tokenize([image], FakeTrainer())
    trainer = FakeTrainer()
    trainer.tools = [print]
    with pytest.raises(Permanent, match="tools"):
        tokenize(["a"], trainer)
    trainer.max_completion_length = None
    with pytest.raises(Permanent, match="max_completion_length"):
        sampling_parameters(trainer)
    with pytest.raises(ValueError, match="engine_urls"):
        GatewayRollout("http://127.0.0.1:1", weights_dir=Path("weights"))
    with pytest.raises(Permanent, match="weights_dir"):
        GatewayRollout("http://127.0.0.1:1").sync_weights(trainer)
    with pytest.raises(ValueError, match="must not be used together"):
        GatewayRollout("http://127.0.0.1:1", engine_urls=["x"], weights_dir=Path("weights"), sync=FakePublishes())
    trainer.model = SimpleNamespace(peft_config={})
    rollout = GatewayRollout("http://127.0.0.1:1", engine_urls=["http://127.0.0.1:2"], weights_dir=Path("weights"))
    with pytest.raises(Permanent, match="PEFT"):
        rollout.sync_weights(trainer)
    with pytest.raises(Permanent, match="PEFT"):
        GatewayRollout("http://127.0.0.1:1", sync=FakePublishes()).sync_weights(trainer)


def test_generation_kwargs_override_settings_but_not_required_fields() -> None:
    trainer = FakeTrainer()
    trainer.args.generation_kwargs = {"temperature": 0.1, "stop_token_ids": [5], "logprobs": 20}
    asked = sampling_parameters(trainer)
    assert (asked["temperature"], asked["stop_token_ids"], asked["logprobs"]) == (0.1, [5], 0)


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [1, 2], "finish_reason": "abort", "logprobs": {"token_logprobs": [-1.0, -1.0]}},
        {"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}},
        {"token_ids": [], "finish_reason": "stop", "logprobs": {"token_logprobs": []}},
        {"token_ids": [1], "finish_reason": "stop", "logprobs": None},
        {"text": "a", "finish_reason": "stop"},
    ],
    ids=["stopped", "a logprob is missing", "empty", "no logprobs", "text alone"],
)
def test_incomplete_or_malformed_answer_is_rejected(choice: dict[str, Any]) -> None:
    with pytest.raises(Permanent, match="r1"):
        read_completion({"choices": [choice]}, "r1")


def test_missing_logprob_is_returned_as_none() -> None:
    choice = {"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0, None]}}
    assert read_completion({"choices": [choice]}, "r1")[1] == [-1.0, None]


def test_documented_command_has_the_examples_flags() -> None:
    example = (REPOSITORY / "deploy" / "examples" / "trl_grpo.py").read_text()
    (command,) = re.findall(r"^```sh\n(.*?)^```", (REPOSITORY / "docs" / "trainers.md").read_text(), re.M | re.S)
    known = set(re.findall(r'add_argument\("(--[a-z-]+)"', example))
    required = set(re.findall(r'add_argument\("(--[a-z-]+)"[^\n]*required=True', example))
    assert required <= set(re.findall(r"--[a-z-]+", command)) <= known
