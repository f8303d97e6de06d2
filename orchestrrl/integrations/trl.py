"""TRL's GRPO trainer on OrchestrRL: completions through the gateway, and the new weights into the vLLM servers.

    sync = WeightsClient("127.0.0.1:7070", peer="train0")
    rollout = GatewayRollout("http://127.0.0.1:8000", engine_urls=urls, sync=sync)
    GRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=..., rollout_func=rollout).train()

It runs in the trainer's environment, where it needs aiohttp and pydantic beside TRL; trl and torch are not imported
here. Written for `rollout_func` as TRL 1.16 has it, which calls that an experimental interface. Leave `use_vllm` off:
that would have TRL talk to one vLLM server itself. docs/trainers.md has the whole story.
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

# TRL's GRPOTrainer. Documented there: `processing_class`, `args`, `state`, `accelerator`, `model`, `save_model`; the
# other attributes that are read here are those of TRL 1.16 that its own generation reads.
GrpoTrainer = Any


class WeightPublisher(Protocol):
    """`orchestrrl.weights.trainer.client.WeightsClient`, this rank's."""

    def publish(self, version: int, model: Any) -> Any: ...

    def next_version(self) -> int: ...


class GatewayRollout:
    """A `rollout_func`: called with a batch of prompts, it asks for all completions at once and returns them in order.

    TRL repeats a prompt for each of its samples, so every prompt of the batch is one request. Requests are named after
    `tag` (also X-Tag) and the trainer's step; samples of one prompt share X-Group-Id, in all ranks.

    `engine_urls` are the vLLM servers behind the gateway. They are asked directly while the gateway is gone, and get
    the weights. With `sync` or `weights_dir` the engines get the trainer's weights before the first rollout and before
    every later one that follows an optimizer step, behind the gateway's closed barrier; the step is their policy
    version. `sync` publishes them, each rank what it has, and the daemon brings them to every engine; where the fleet
    has had versions before, numbers go on above them. `weights_dir` is a folder that engines and trainer see under the
    same path: they are saved there, and the engines load them. Without either that is the caller's to do, or the
    trainer learns from a policy that is not its own.
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
            raise ValueError("weights_dir needs engine_urls: the servers that the weights go to")
        if weights_dir is not None and sync is not None:
            raise ValueError("weights go one way: give sync, or weights_dir, not both")
        self._gateway_url = gateway_url
        self._engine_urls = tuple(engine_urls)
        self._weights_dir = None if weights_dir is None else weights_dir.absolute()
        self._sync = sync
        self._ahead: int | None = None  # by which the fleet's version is more than the step
        self._tag = tag
        self._patience = patience
        self._run = uuid.uuid4().hex[:8]  # a restarted trainer comes to the same steps again
        self._batches = 0
        self._synced_step: int | None = None
        self._saved: Path | None = None
        self.syncs = 0  # times that the engines got weights
        self.requests = 0  # answered
        self.bypassed = 0  # of those, by an engine directly

    def __call__(self, prompts: list[Any], trainer: GrpoTrainer) -> dict[str, list[Any]]:
        """TRL's fields, a list per prompt: `prompt_ids`, `completion_ids`, `logprobs`.

        Raises Permanent for what cannot be served, Refused where an engine says that the request is wrong, Retryable
        when nobody answered for a minute.
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
        """Give the engines the trainer's weights of now; every rank must call it. Returns when they answer with them.

        Called by itself before a rollout; after the last step it is the caller's to do, where the engines serve on.
        Raises as `WeightsClient.publish` or `reload_weights` does.
        """
        if self._sync is None and self._weights_dir is None:
            raise Permanent("neither sync nor weights_dir is set: there is no way for weights to the engines")
        if hasattr(trainer.model, "peft_config"):
            raise Permanent(
                "a PEFT model has its adapter apart from the weights; leave out sync and weights_dir and bring the"
                " weights yourself"
            )
        if self._sync is not None:
            if self._ahead is None:  # a trainer that starts again comes to the same steps, with other weights
                self._ahead = max(0, self._sync.next_version() - trainer.state.global_step)
            self._sync.publish(trainer.state.global_step + self._ahead, trainer.model)
        elif self._weights_dir is not None:
            self._save_and_load(trainer, self._weights_dir)
        self._synced_step = trainer.state.global_step
        self.syncs += 1

    def _save_and_load(self, trainer: GrpoTrainer, weights_dir: Path) -> None:
        # A new folder each time: an engine may still map the files of the last.
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
            finally:  # one failed: the others must not go on on the engines
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
            self.requests += len(completions)
            self.bypassed += client.bypassed
            return completions


def tokenize(prompts: list[Any], trainer: GrpoTrainer) -> list[list[int]]:
    """Token ids of text prompts or conversations, with the trainer's own tokenizer and chat template."""
    if trainer.tools:
        raise Permanent("tools: TRL generates the turns after a tool call itself, not through rollout_func")
    if isinstance(prompts[0], str):
        ids = trainer.processing_class(text=prompts)["input_ids"]
    else:
        contents = [message["content"] for prompt in prompts for message in prompt]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise Permanent("prompts: only text can be sent to the gateway as token ids, got other content parts")
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
    """The fields of a completion request that TRL's settings ask for; `generation_kwargs` win, as in TRL."""
    if trainer.max_completion_length is None:
        raise Permanent("max_completion_length: must be set, engines have a limit of their own without it")
    return {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        **(trainer.args.generation_kwargs or {}),
        "logprobs": 0,  # of the drawn token alone
        "return_token_ids": True,
    }


def read_completion(answer: Mapping[str, Any], request_id: str) -> tuple[list[int], list[float | None]]:
    """Return the ids that were drawn and the log-probability of each, None where the engine had not a number. Raises
    Permanent for an answer that a trainer must not learn from."""
    try:
        (choice,) = answer["choices"]
        if choice["finish_reason"] not in ("stop", "length"):
            raise Permanent(f"{request_id} ended with {choice['finish_reason']!r}: it was stopped, and is not complete")
        token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if not token_ids or len(token_ids) != len(logprobs):
            raise ValueError(f"a completion has a logprob for each token, got {len(token_ids)} and {len(logprobs)}")
        return token_ids, logprobs
    except (KeyError, TypeError, ValueError) as fault:
        raise Permanent(
            f"{request_id}: the answer has no token ids with logprobs ({shorten(str(fault))}); the engines must know "
            f"return_token_ids: {shorten(dict(answer))}"
        ) from fault
