"""Run TRL's GRPO trainer on OrchestrRL: completions go through the gateway, and new weights go into the vLLM servers.

    sync = WeightsClient("127.0.0.1:7070", peer="train0")
    rollout = GatewayRollout("http://127.0.0.1:8000", engine_urls=urls, sync=sync)
    GRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=..., rollout_func=rollout).train()

The adapter runs in the trainer's environment and needs aiohttp and pydantic in addition to TRL. It imports neither trl
nor torch. It uses `rollout_func` of TRL 1.16, which is an experimental interface of TRL. Leave `use_vllm` off;
otherwise TRL itself connects to a single vLLM server. See docs/trainers.md.
"""

import asyncio
import hashlib
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from orchestrrl.core.errors import Permanent, shorten
from orchestrrl.gateway.client import ClientPatience, GatewayClient
from orchestrrl.integrations.vllm_weights import reload_weights, run

# TRL's GRPOTrainer. TRL documents `processing_class`, `args`, `state`, `accelerator`, `model` and `save_model`. The
# other attributes used here are those that generation in TRL 1.16 itself reads.
GrpoTrainer = Any


class WeightPublisher(Protocol):
    """The methods of `orchestrrl.weights.trainer.client.WeightsClient` that GatewayRollout calls."""

    def publish(self, version: int, model: Any) -> Any: ...

    def next_version(self) -> int: ...


class GatewayRollout:
    """A `rollout_func` for TRL: it requests the completions of a batch of prompts concurrently and returns them in the
    order of the prompts.

    TRL repeats a prompt for each sample, so every prompt of the batch is one request. Request ids contain `tag` and the
    trainer's step. `tag` is also sent as X-Tag. The samples of one prompt have the same X-Group-Id on all ranks.

    `engine_urls` are the vLLM servers behind the gateway. They receive requests directly while the gateway is down.

    With `sync` or `weights_dir`, the engines get the trainer's weights before the first rollout and before each rollout
    that follows an optimizer step, while the pause barrier is closed. With `sync`, each rank publishes its part of the
    weights, and the daemon brings the version to every engine. The version is the trainer's step, plus a constant that
    keeps it above the fleet's previous versions. `weights_dir` is a folder with the same path on engines and trainer.
    The trainer saves its weights there, and the servers `engine_urls` load them. The version is then the trainer's
    step.

    If neither `sync` nor `weights_dir` is given, the caller must update the engines. Otherwise the trainer learns from
    samples of an outdated policy.
    """

    def __init__(
        self,
        gateway_url: str,
        *,
        engine_urls: Sequence[str] = (),
        weights_dir: Path | None = None,
        sync: WeightPublisher | None = None,
        tag: str = "trl",
        patience: ClientPatience | None = None,
    ) -> None:
        if weights_dir is not None and not engine_urls:
            raise ValueError("engine_urls must name the servers that load the weights from weights_dir, got none")
        if weights_dir is not None and sync is not None:
            raise ValueError("sync and weights_dir must not be used together")
        self._gateway_url = gateway_url
        self._engine_urls = tuple(engine_urls)
        self._weights_dir = None if weights_dir is None else weights_dir.absolute()
        self._sync = sync
        self._ahead: int | None = None  # policy version minus step
        self._tag = tag
        self._patience = patience
        self._run = uuid.uuid4().hex[:8]  # keeps ids unique, because a restarted trainer repeats steps
        self._batches = 0
        self._synced_step: int | None = None
        self._saved: Path | None = None
        self.syncs = 0  # number of weight updates of the engines
        self.requests = 0  # answered requests
        self.bypassed = 0  # answered requests that bypassed the gateway

    def __call__(self, prompts: list[Any], trainer: GrpoTrainer) -> dict[str, list[Any]]:
        """Generate completions for a batch; return TRL's fields `prompt_ids`, `completion_ids` and `logprobs`, each
        with one list per prompt. If the engines' weights are outdated, call `sync_weights` first.

        Raises Permanent if a request is unsupported, Refused if an engine rejects a request, and Retryable if neither
        the gateway nor an engine responds within the client's patience, by default one minute.
        """
        has_way = self._sync is not None or self._weights_dir is not None
        if has_way and trainer.state.global_step != self._synced_step:
            self.sync_weights(trainer)
        prompt_ids = tokenize(prompts, trainer)
        parameters = sampling_parameters(trainer)
        self._batches += 1
        name = f"{self._tag}-{self._run}-s{trainer.state.global_step}-b{self._batches}"
        completions = run(self._complete_all(prompt_ids, parameters, name, f"{self._tag}-s{trainer.state.global_step}"))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [token_ids for token_ids, _ in completions],
            "logprobs": [logprobs for _, logprobs in completions],
        }

    def sync_weights(self, trainer: GrpoTrainer) -> None:
        """Bring the trainer's current weights into the engines; return when the engines serve them. Every rank must
        call this method.

        Rollouts call it automatically. After the last step, the caller must call it if the engines continue to serve.
        Raises Permanent if the model is a PEFT model or neither `sync` nor `weights_dir` was given. Also raises the
        errors of `WeightsClient.publish` and `reload_weights`.
        """
        if self._sync is None and self._weights_dir is None:
            raise Permanent("sync_weights: sync or weights_dir must be set, got None for both")
        if hasattr(trainer.model, "peft_config"):
            raise Permanent(
                "cannot sync the weights of a PEFT model, because its adapter is separate from them; omit sync and"
                " weights_dir, and update the engines yourself"
            )
        if self._sync is not None:
            if self._ahead is None:  # a restarted trainer repeats steps with other weights
                self._ahead = max(0, self._sync.next_version() - trainer.state.global_step)
            self._sync.publish(trainer.state.global_step + self._ahead, trainer.model)
        elif self._weights_dir is not None:
            self._save_and_load(trainer, self._weights_dir)
        self._synced_step = trainer.state.global_step
        self.syncs += 1

    def _save_and_load(self, trainer: GrpoTrainer, weights_dir: Path) -> None:
        # A new folder each time, because an engine may still map the files of the last one.
        folder = weights_dir / f"{self._run}-{self.syncs + 1}"
        trainer.save_model(str(folder), _internal_call=True)  # without a push to the hub
        if trainer.accelerator.is_main_process:
            reload_weights(
                self._engine_urls,
                folder,
                gateway_url=self._gateway_url,
                policy_version=trainer.state.global_step,
                holder=f"TRL, {self._tag}",
            )
            if self._saved is not None:
                shutil.rmtree(self._saved)
        trainer.accelerator.wait_for_everyone()
        self._saved = folder

    async def _complete_all(
        self, prompts: Sequence[Sequence[int]], parameters: Mapping[str, Any], name: str, step: str
    ) -> list[tuple[list[int], list[float | None]]]:
        async with GatewayClient(self._gateway_url, self._engine_urls, patience=self._patience) as client:

            async def complete(index: int, prompt_ids: Sequence[int]) -> tuple[list[int], list[float | None]]:
                group = f"{step}-{hashlib.sha256(repr(list(prompt_ids)).encode()).hexdigest()[:16]}"
                body = {**parameters, "prompt": list(prompt_ids)}
                request_id = f"{name}-{index}"
                answer = await client.complete(body, request_id=request_id, group=group, tag=self._tag)
                return read_completion(answer, request_id)

            asking = [asyncio.create_task(complete(index, prompt)) for index, prompt in enumerate(prompts)]
            try:
                completions = await asyncio.gather(*asking)
            finally:  # if one failed, the others must not continue on the engines
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            self.requests += len(completions)
            self.bypassed += client.bypassed
            return completions


def tokenize(prompts: list[Any], trainer: GrpoTrainer) -> list[list[int]]:
    """Tokenize each prompt, which is a text or a conversation, with the trainer's tokenizer and chat template, and
    return the token ids. Raises Permanent if the trainer uses tools or a message contains anything other than text."""
    if trainer.tools:
        raise Permanent(
            "tools: must not be set, because TRL does not use rollout_func for the turns after a tool call,"
            f" got {shorten(trainer.tools)}"
        )
    if isinstance(prompts[0], str):
        ids = trainer.processing_class(text=prompts)["input_ids"]
    else:
        contents = [message["content"] for prompt in prompts for message in prompt]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise Permanent(
                "prompts: must have only text parts, because prompts are sent as token ids,"
                f" got a part of type {next(part.get('type') for part in parts if part.get('type') != 'text')!r}"
            )
        ids = trainer.processing_class.apply_chat_template(
            conversation=prompts,
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )["input_ids"]
    return [[int(token) for token in prompt] for prompt in ids]


def sampling_parameters(trainer: GrpoTrainer) -> dict[str, Any]:
    """Return the sampling fields of a completion request, taken from TRL's settings. As in TRL, `generation_kwargs`
    take precedence. Raises Permanent if the trainer has no `max_completion_length`."""
    if trainer.max_completion_length is None:
        raise Permanent(
            "max_completion_length: must be set, because engines would otherwise apply their own limit, got None"
        )
    return {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        **(trainer.args.generation_kwargs or {}),
        "logprobs": 0,  # only for the sampled token
        "return_token_ids": True,
    }


def read_completion(answer: Mapping[str, Any], request_id: str) -> tuple[list[int], list[float | None]]:
    """Return the sampled token ids and the log-probability of each token. A log-probability is None if the engine
    returned no number. Raises Permanent if the response `answer` is incomplete or malformed, because a trainer must not
    learn from it."""
    try:
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise Permanent(
                f"request {request_id}: the completion must end with finish_reason stop or length,"
                f" got {choice['finish_reason']!r}"
            )
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if not token_ids or len(token_ids) != len(logprobs):
            raise ValueError(
                f"the response must have one logprob per token, got {len(logprobs)} for {len(token_ids)} tokens"
            )
        return token_ids, logprobs
    except (KeyError, TypeError, ValueError) as fault:
        raise Permanent(
            f"request {request_id}: the response must have token ids and logprobs ({shorten(str(fault))}), got "
            f"{shorten(dict(answer))}; use engines that support return_token_ids"
        ) from fault
