"""A small cluster scenario for tests."""

from typing import Any

import yaml

TEXT = """
name: small
seeds: [1]
model: qwen2.5-14b
gpu: h800
cluster: {train_gpus: 16, gen_gpus: 16}
fabrics: [fat_tree]
training: {tp: 4}
generation:
  engine: paper
  layouts: [tp2, tp4]
  arms: [verl_to]
  workload:
    prompts: 4
    samples: 4
    prompt_tokens: [64, 128]
    max_tokens: 400
    lengths: {kind: lognormal, median_tokens: 150, sigma: 0.6}
loop: {steps: 2, warmup_steps: 1}
daemon: {mode: act}
"""


def document(**changes: Any) -> dict[str, Any]:
    """Return the scenario's document with changed values, e.g. `cluster__train_gpus=8` for cluster.train_gpus."""
    made: dict[str, Any] = yaml.safe_load(TEXT)
    for path, value in changes.items():
        *sections, name = path.split("__")
        place = made
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return made
