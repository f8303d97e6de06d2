"""A fake trainer that publishes models of random weights as versions and reports the logits of given tokens. It runs as
a separate process in an environment with torch and transformers.

    python -m tests.vllm.weights_publisher MODEL DAEMON PEER FOLDER

MODEL is a folder in the format that the engines serve. The program reads lines of JSON and answers each with a line:

    {"publish": VERSION, "seed": SEED}            the report of its sync
    {"publish": VERSION, "seed": SEED, "install": "next_pause"}    {}, as soon as it is staged; then, later,
    {"wait": VERSION}                             its report
    {"gaps": [[token, ...], ...], "seed": SEED}   of each token but the first, by how much the likeliest one's logit was
                                                  above its own: 0 where it is the likeliest itself
"""

import json
import sys
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrrl.weights.controller.reports import SyncReport
from orchestrrl.weights.controller.state import SYNC
from orchestrrl.weights.trainer.client import PublishInProgress, SyncAborted, WeightsClient

PROBE = (72, 101, 108, 108, 111)
PROBE_TOKENS = 8
VERSIONS_HELD = 4


class Publisher:
    def __init__(self, model: str, client: WeightsClient) -> None:
        self._config = AutoConfig.from_pretrained(model)
        self._client = client
        self._on_their_way: dict[int, PublishInProgress] = {}
        self.model = lru_cache(VERSIONS_HELD)(self._made)

    def _made(self, seed: int) -> Any:
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(self._config, dtype=torch.float32).eval()

    def answer(self, asked: dict[str, Any]) -> Any:
        match asked:
            case {"publish": version, "seed": seed, "install": "next_pause"}:
                handle = self._client.start_publish(
                    version, self.model(seed).state_dict(), install="next_pause", **self._probe(seed)
                )
                self._on_their_way[version] = handle
                return {}
            case {"publish": version, "seed": seed}:
                handle = self._client.start_publish(version, self.model(seed).state_dict(), **self._probe(seed))
                return _reported(handle)
            case {"wait": version}:
                return _reported(self._on_their_way.pop(version))
            case {"gaps": rows, "seed": seed}:
                return [self._gaps(row, seed) for row in rows]
            case _:
                raise ValueError(f"not among what can be asked: {asked}")

    def _logits(self, ids: list[int], seed: int) -> Any:
        """[tokens, vocabulary]"""
        with torch.inference_mode():
            return self.model(seed)(torch.tensor([ids])).logits[0]

    def _gaps(self, ids: list[int], seed: int) -> list[float]:
        logits = self._logits(ids, seed)[:-1]
        own = logits.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
        found: list[float] = (logits.max(1).values - own).tolist()
        return found

    def _probe(self, seed: int) -> dict[str, Any]:
        """Return the probe's prompt and the tokens that engines must generate."""
        ids = list(PROBE)
        for _ in range(PROBE_TOKENS):
            ids.append(int(self._logits(ids, seed)[-1].argmax()))
        return {"probe": PROBE, "expected": ids[len(PROBE) :]}


def _reported(handle: PublishInProgress) -> Any:
    try:
        report: SyncReport = handle.result()
    except SyncAborted as aborted:
        report = aborted.report
    return SYNC.dump_python(report, mode="json")


def main() -> None:
    model, daemon, peer, folder = sys.argv[1:]
    with WeightsClient(daemon, peer=peer, folder=folder) as client:
        publisher = Publisher(model, client)
        for line in sys.stdin:
            sys.stdout.write(json.dumps(publisher.answer(json.loads(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
