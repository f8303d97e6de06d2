r"""Train a model with TRL's GRPO, with generation through OrchestrRL's gateway. The script runs in the trainer's
environment.

    python deploy/examples/trl_grpo.py --model DIR --gateway http://127.0.0.1:8000 \
        --engine http://127.0.0.1:8001 --engine http://127.0.0.1:8002 --weights-dir DIR --out DIR

With `--peer NAME` instead of `--weights-dir`, the weights are published through the daemon.

The task is a toy that needs no download: the reward is higher for completions with more different letters. Replace the
dataset, the reward and the GRPOConfig with your own. Only the rollout function and the final sync of weights belong to
OrchestrRL. The report lists the training steps, and contains data from which you can check whether the engines have the
trainer's weights. If the script runs as several processes (torchrun), each process requests its own samples.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from orchestrrl.integrations.trl import GatewayRollout
from orchestrrl.weights.trainer.client import WeightsClient

GREEDY_TOKENS = 12


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model that the engines serve, in HF's format")
    parser.add_argument("--gateway", required=True, help="URL of OrchestrRL's gateway")
    parser.add_argument("--engine", action="append", required=True, help="URL of a vLLM server behind it; repeat")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--weights-dir", type=Path, help="folder that the engines see as well: weights are saved there")
    way.add_argument("--peer", help="peer on this host (orchestrrl sync peer): weights are published")
    parser.add_argument("--folder", help="the peer's, where it is not its default")
    parser.add_argument("--daemon", default="127.0.0.1:7070", help="where weights are published to")
    parser.add_argument("--out", type=Path, required=True, help="where TRL and this script write")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="per step and process")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    parser.add_argument("--conversations", action="store_true", help="prompts as chat messages rather than text")
    return parser.parse_args()


def different_letters(completions: list, **_: object) -> list[float]:
    """Return the reward of each completion: the fraction of the alphabet that occurs in it."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [len({letter for letter in text.lower() if "a" <= letter <= "z"}) / 26 for text in texts]


def prompt(index: int, conversations: bool) -> str | list[dict[str, str]]:
    text = f"Story {index}: ba ke lo mi"
    return [{"role": "user", "content": text}] if conversations else text


class WatchedRollout(GatewayRollout):
    """Compares the engines' log-probabilities with the trainer's. They are equal as long as the engines have the
    trainer's weights.

    Use this class to check the setup of a run, not in production, because it costs a forward pass for each sample.
    """

    def __init__(self, *names: object, **settings: object) -> None:
        super().__init__(*names, **settings)
        self.gaps: list[float] = []  # the largest difference in each batch, at temperature 1

    def __call__(self, prompts: list, trainer: GRPOTrainer) -> dict[str, list]:
        rolled = super().__call__(prompts, trainer)
        gaps = []
        for prompt_ids, drawn_ids, reported in zip(*rolled.values(), strict=True):
            ids = torch.tensor([[*prompt_ids, *drawn_ids]], device=trainer.model.device)
            with torch.no_grad():
                logits = trainer.model(ids).logits[0, len(prompt_ids) - 1 : -1]  # [drawn tokens, vocabulary]
            own = logits.log_softmax(-1).gather(1, ids[0, len(prompt_ids) :, None]).squeeze(1)
            gaps.append((own - torch.tensor(reported, device=own.device)).abs().max().item())
        self.gaps.append(max(gaps))
        return rolled


def greedy(trainer: GRPOTrainer, prompts: list[list[int]]) -> list[list[int]]:
    """Return the trained model's greedy continuation of each prompt, computed by the trainer."""
    trainer.model.eval()
    answers = []
    for prompt_ids in prompts:
        ids = list(prompt_ids)
        for _ in range(GREEDY_TOKENS):
            with torch.no_grad():
                logits = trainer.model(
                    torch.tensor([ids], device=trainer.model.device)
                ).logits  # [1, tokens, vocabulary]
            ids.append(int(logits[0, -1].argmax()))
        answers.append(ids[len(prompt_ids) :])
    return answers


def main() -> None:
    asked = arguments()
    sync = None
    if asked.peer:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        sync = WeightsClient(asked.daemon, peer=asked.peer, folder=asked.folder, rank=rank, world=world)
    rollout = WatchedRollout(
        asked.gateway, engine_urls=asked.engine, weights_dir=asked.weights_dir, sync=sync, tag="trl-example"
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        reward_funcs=different_letters,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt(index, asked.conversations)} for index in range(asked.prompts * asked.steps)]
        ),
        rollout_func=rollout,
        args=GRPOConfig(
            output_dir=str(asked.out),
            max_steps=asked.steps,
            per_device_train_batch_size=asked.prompts * asked.samples,
            num_generations=asked.samples,
            max_completion_length=asked.max_tokens,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant",
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
    )
    trainer.train()
    rollout.sync_weights(trainer)  # the engines continue to serve with the weights of the last step
    told_ids = trainer.processing_class(text=["ba ke lo mi", "Story"])["input_ids"]
    report = {
        "steps": [entry for entry in trainer.state.log_history if "loss" in entry],
        "requests": sum(gather_object([rollout.requests])),  # of all processes
        "bypassed": sum(gather_object([rollout.bypassed])),
        "logprob_gaps": gather_object(rollout.gaps),
        "syncs": rollout.syncs,
        "prompt_ids": told_ids,
        "greedy_ids": greedy(trainer, told_ids),
    }
    if trainer.is_world_process_zero():
        (asked.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        sys.stdout.write(f"{asked.out / 'report.json'}\n")


if __name__ == "__main__":
    main()
