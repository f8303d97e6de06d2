"""The same seed gives the same report, byte for byte, also with other hash seeds of Python and in another process."""

import json
import os
import subprocess
import sys
from pathlib import Path

HASH_SEEDS = ("0", "4242")
GEN = """
name: same
seeds: [1, 2]
gpus: 8
gpus_per_node: 4
workload:
  prompts: 8
  samples: 4
  prompt_tokens: [16, 64]
  max_tokens: 2000
  steps: 2
  warmup_steps: 1
  lengths: {kind: lognormal, median_tokens: 300, sigma: 1.0}
  correlation: 0.5
engines:
  configurations:
    - {id: narrow, gpus: 1, alpha_s: 0.02, beta_s: 1.0e-3, gamma_s: 1.0e-7, kv_capacity_tokens: 8192, max_sequences: 8,
       prefill_tokens_per_s: 9000, switch_s: 1.0}
    - {id: wide, gpus: 4, alpha_s: 0.012, beta_s: 1.0e-4, gamma_s: 2.5e-8, kv_capacity_tokens: 40960, max_sequences: 64,
       prefill_tokens_per_s: 36000, switch_s: 2.0}
network: {kv_transfer: true, nic_gbps_per_node: 100.0, weight_gbytes: 2.0}
faults: [{at_s: 5.0, kill_engine: e1, back_after_s: 10.0}]
daemon:
  slow: {interval_s: 10.0, epsilon_s: 1.0, cooldown_s: 5.0, max_output_tokens: 2000, work_budget: 100}
"""

CLUSTER = """
name: same
seeds: [1, 2]
model: qwen2.5-14b
gpu: h800
cluster: {train_gpus: 16, gen_gpus: 16}
fabrics: [rfabric]
training: {tp: 4}
generation:
  engine: paper
  layouts: [tp2, tp4]
  arms: [both]
  workload:
    prompts: 4
    samples: 4
    prompt_tokens: [64, 128]
    max_tokens: 400
    lengths: {kind: lognormal, median_tokens: 150, sigma: 0.6}
loop: {mode: bounded_staleness, staleness: 2, steps: 3, warmup_steps: 1}
faults: [{at_s: 2.0, fail: tor_uplinks, of: 0, share: 0.5, back_after_s: 3.0}]
daemon: {mode: act}
"""


def shown(folder: Path, hash_seed: str, *words: str) -> bytes:
    """Return the standard output of a command."""
    command = [sys.executable, "-m", "orchestrrl", "sim", *words]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_generation_is_deterministic(tmp_path: Path) -> None:
    """The report includes digests of the daemon's journals."""
    (tmp_path / "same.yaml").write_text(GEN)
    words = ("gen", "same.yaml", "--arms", "both,partial_rollout", "--json")
    first, again = (shown(tmp_path, hash_seed, *words) for hash_seed in HASH_SEEDS)
    assert b"journal_digests" in first
    assert again == first
    runs = json.loads(first)["arms"]["both"]["journal_digests"]
    assert len(set(runs)) == 2  # another seed gives another report


def test_cluster_and_its_page_are_deterministic(tmp_path: Path) -> None:
    """The output, the file of results and the HTML page are the same."""
    found = []
    for hash_seed in HASH_SEEDS:
        folder = tmp_path / hash_seed  # one each, because the page includes its command
        folder.mkdir()
        (folder / "same.yaml").write_text(CLUSTER)
        printed = shown(folder, hash_seed, "run", "same.yaml", "--out", "results", "--json")
        shown(folder, hash_seed, "report", "results", "--out", "page.html")
        (results,) = (folder / "results").glob("*.json")
        found.append((printed, results.name, results.read_bytes(), (folder / "page.html").read_bytes()))
    assert found[0] == found[1]
    assert b"samples_per_s" in found[0][0]
    assert b"<svg" in found[0][3]
