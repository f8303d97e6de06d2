"""Publications of real torch ranks: together they stage the whole model, each element once per host."""

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from orchestrrl.weights.controller.reports import SyncReport, SyncState
from tests.orchestrrl.weights.publishing_daemon import Daemon, serving
from tests.orchestrrl.weights.staged_parts import put_together, tensors_in
from tests.vllm.conftest import REPOSITORY, VLLM_PYTHON

pytestmark = pytest.mark.timeout(240)

DONE = SyncReport("sync", 1, SyncState.DONE, 1.0, code="done", ended_s=2.0)
VERSIONS = 6  # in weights_trainer.py
STRIDED = 4  # FSDP2 over tensor parallelism


async def run_python(*arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        str(VLLM_PYTHON),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        shown, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == 0, shown.decode(errors="replace")[-5000:]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
async def test_all_ranks_together_stage_the_model(world: int, tmp_path: Path) -> None:
    daemon = Daemon([[DONE]] * (VERSIONS * world))
    program = str(Path(__file__).with_name("weights_trainer.py"))
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    async with serving(daemon) as address:
        await run_python(*launcher, program, address, str(tmp_path))
    said = daemon.publications
    assert len(said) == VERSIONS * world
    assert len({publication.run for publication in said}) == VERSIONS  # with the same run on all ranks
    for version in range(VERSIONS):
        ranks = [each for each in said if each.version == version]
        assert sorted(each.rank for each in ranks) == list(range(world))
        got, times = put_together((tmp_path / each.peer.replace("train", "host"), each) for each in ranks)
        expected = tensors_in(tmp_path / f"whole-{version}.safetensors")
        assert sorted(got) == sorted(expected), version
        for name, values in expected.items():
            assert np.array_equal(got[name], values), (version, name)
            assert 1 <= times[name].min() <= times[name].max() <= max(1, world // 2), (version, name)


async def test_hugging_face_model_is_published_as_it_would_be_saved(tmp_path: Path) -> None:
    program = f"""
import torch
from pathlib import Path
from transformers import Qwen2Config, Qwen2ForCausalLM
from orchestrrl.weights.trainer.client import WeightsClient
import sys
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
for version, is_tied in enumerate((False, True)):
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=64, tie_word_embeddings=is_tied, **sizes))
    folder = Path({str(tmp_path)!r})
    model.to(torch.bfloat16).save_pretrained(folder / f"saved-{{version}}")
    with WeightsClient(sys.argv[1], peer="train0", folder=folder) as client:
        client.publish(version, torch.compile(model))
"""
    daemon = Daemon([[DONE]] * 2)
    async with serving(daemon) as address:
        await run_python("-c", program, address)
    for version in (0, 1):
        saved = tensors_in(tmp_path / f"saved-{version}" / "model.safetensors")
        staged = tensors_in(tmp_path / f"v{version}" / "part-0.safetensors")
        assert sorted(staged) == sorted(saved)
        assert ("lm_head.weight" in staged) == (version == 0)
        assert all(np.array_equal(staged[name], values) for name, values in saved.items())


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--ahead"]], ids=["waiting", "ahead"])
async def test_example_publishes_every_step(more: list[str], tiny_model: Path, tmp_path: Path) -> None:
    daemon = Daemon([[DONE]] * 6)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    example = str(REPOSITORY / "deploy" / "examples" / "publish_weights.py")
    async with serving(daemon) as address:
        named = ["--model", str(tiny_model), "--peer", "train0", "--folder", str(tmp_path), "--daemon", address]
        await run_python(*launcher, example, *named, *more)
    said = daemon.publications
    assert sorted((each.version, each.rank) for each in said) == [(v, r) for v in (1, 2, 3) for r in (0, 1)]
    assert {each.install for each in said} == {"next_pause" if more else ""}  # the daemon's configured value
    served = tensors_in(tiny_model / "model.safetensors")
    versions = [put_together((tmp_path, each) for each in said if each.version == version)[0] for version in (1, 2, 3)]
    assert all(sorted(version) == sorted(served) for version in versions)
    assert {tensor.dtype for each in said for tensor in each.tensors} == {"BF16"}
    assert any(not np.array_equal(versions[0][name], versions[2][name]) for name in served)


async def test_unpublishable_tensors_are_reported_together_by_model_names() -> None:
    program = """
import torch
from orchestrrl.core.errors import Permanent
from orchestrrl.weights.trainer.torch_tensors import pieces_of

def refused(model, **options):
    try:
        pieces_of(model, **options)
    except Permanent as error:
        return str(error)

told = refused({"a": torch.empty(2, device="meta"), "b": torch.eye(3).to_sparse(), "c": torch.zeros(2).cfloat()})
assert "a: is on the meta device" in told and "b: must be dense" in told and "c: dtype torch.complex64" in told, told
assert "got int" in refused(3)
assert "got fp8" in refused({"a": torch.zeros(2)}, dtype="fp8")
model = torch.nn.Linear(2, 2)
model.peft_config = {}
assert "PEFT" in refused(model)

w = torch.zeros(4, 4)
shared = {"embed": w, "head": w, "view": w[:2], "turned": w.t(), "x._extra_state": w}
assert [piece.meta.name for piece in pieces_of(shared)] == ["embed", "view", "turned"]
assert [piece.meta.name for piece in pieces_of(shared, tied="each", ignore=["view"])] == ["embed", "head", "turned"]
wrapped = {"module._orig_mod.l._checkpoint_wrapped_module.w": w, "module.scale": w.to(torch.float8_e5m2)}
pieces = pieces_of(wrapped, dtype="bf16", rename=lambda name: f"model.{name}")
assert [(piece.meta.name, piece.meta.dtype) for piece in pieces] == [("model.l.w", "BF16"), ("model.scale", "F8_E5M2")]
"""
    await run_python("-c", program)
