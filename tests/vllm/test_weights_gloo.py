"""Weights over torch.distributed: the conformance of transports, and trees of processes of which some are killed."""

import os
import subprocess

import pytest

from tests.faults.test_weights_carrier_killed import kill_the_middle_of_a_chain
from tests.vllm.conftest import REPOSITORY, VLLM_PYTHON

ENVIRONMENT = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}

pytestmark = pytest.mark.timeout(240)


def ran(*arguments: str) -> str:
    done = subprocess.run(
        [VLLM_PYTHON, "-X", "faulthandler", *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gloo_passes_the_conformance_suite() -> None:
    said = ran("-m", "orchestrrl.weights.transports.conformance", "gloo")
    assert len(said.splitlines()) >= 16


def test_chain_survives_a_killed_middle_process() -> None:
    kill_the_middle_of_a_chain(str(VLLM_PYTHON), "gloo")


def test_nccl_without_a_gpu_names_the_remedy() -> None:
    said = ran(
        "-c",
        "import torch\n"
        "from orchestrrl.core.errors import Permanent\n"
        "from orchestrrl.weights.transports.base import make_transport\n"
        "try:\n"
        "    make_transport('nccl', '127.0.0.1')\n"
        "except Permanent as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('made, with', torch.cuda.device_count(), 'GPUs')\n",
    )
    assert "use gloo or tcp" in said or "made, with" in said
