"""A trainer that publishes checkpoints from folders, one version after another, by vLLM's weight transfer. It prints
the outcome of each as a line of JSON."""

import json
import sys

import gloo_weights
import torch
from transformers import AutoModelForCausalLM

from orchestrrl.weights.controller.state import SYNC
from orchestrrl.weights.trainer.client import SyncAborted, WeightsClient

gloo_weights.register()
address, prompt, *folders = sys.argv[1:]
with WeightsClient(address, peer="trainer") as client:
    for version, folder in enumerate(folders, max(1, client.next_version())):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        try:
            report = client.publish(
                version,
                model,
                backend="vllm_transfer",
                options={"backend": gloo_weights.BACKEND, "address": "127.0.0.1"},
                probe=json.loads(prompt),
            )
        except SyncAborted as aborted:
            report = aborted.report
        print(SYNC.dump_json(report).decode(), flush=True)
