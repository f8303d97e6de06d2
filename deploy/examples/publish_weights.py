"""Train with FSDP2 in a custom loop, and publish the weights to the engines after every step.

    orchestrrl sync peer --id train0 &
    torchrun --nproc-per-node=2 deploy/examples/publish_weights.py --model DIR --peer train0

Only the WeightsClient and the call that publishes weights belong to OrchestrRL. All other code is an ordinary training
loop. Each rank stages its own part of the model, and no rank gathers the whole model. With `--ahead`, training
continues while a version is distributed, and the engines install it the next time the gateway's barrier is closed.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from orchestrrl.weights.trainer.client import WeightsClient


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model that the engines serve, in HF's format")
    parser.add_argument("--peer", required=True, help="peer on this rank's host")
    parser.add_argument("--folder", help="the peer's, where it is not its default")
    parser.add_argument("--daemon", default="127.0.0.1:7070")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ahead", action="store_true", help="train on while engines get the weights")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(model.config.vocab_size, (2, 64), device=device)
    under_way = []
    with WeightsClient(
        asked.daemon, peer=asked.peer, folder=asked.folder, rank=rank, world=world, dtype=torch.bfloat16
    ) as client:
        for step in range(1, asked.steps + 1):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if asked.ahead:
                under_way.append(client.start_publish(step, model, install="next_pause"))
            else:
                report = client.publish(step, model)
                sys.stdout.write(f"rank {rank}, version {step}: {report.state}\n")
        for handle in under_way:
            sys.stdout.write(f"rank {rank}, version {handle.version}: {handle.result().state}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
