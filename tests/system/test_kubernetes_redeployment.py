"""A redeployment on Kubernetes: a daemon process and the command line, with engines in pods of the small cluster of
these tests; and the state that a killed daemon leaves for the next one."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kubernetes_harness import OPTIONS, Harness, empty, harness, pods

from tests.orchestrrl.gateway.processes import free_port

CONFIG = """
mode: advise
listen: {{address: "{address}"}}
journal: {{path: "{folder}/journal.sqlite"}}
fleet:
  gpus: {{count: 3, per_node: 4}}
  launch:
    engine: simulated
    model: tiny
    python: {python}
    configurations: {{broken: {{arguments: [--alpha-s, "-1"]}}}}
  deployer: {{product: kubernetes, name: job, folder: "{folder}/engines", options: {options}}}
  configurations:
    - {{id: tp1, gpus: 1, {step}, kv_capacity_tokens: 100000}}
    - {{id: broken, gpus: 1, {step}, kv_capacity_tokens: 100000}}
    - {{id: tp2, gpus: 2, {step}, kv_capacity_tokens: 100000}}
"""
STEP = "alpha_s: 0.02, beta_s: 1e-4, gamma_s: 4e-8, max_sequences: 64, prefill_tokens_per_s: 4000, switch_s: 3"


async def run(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "orchestrrl", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


@asynccontextmanager
async def daemon(place: Harness, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    options = {**OPTIONS, "kubeconfig": place.server.kubeconfig(place.folder), "nodes": ["node-b"]}
    config = place.folder / "orchestrrl.yaml"
    given = {"address": address, "folder": place.folder, "python": sys.executable, "step": STEP}
    config.write_text(CONFIG.format(options=json.dumps(options), **given))
    with (place.folder / "daemon.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "orchestrrl", "daemon", "-c", str(config), stdout=log, stderr=log
        )
    try:
        async with asyncio.timeout(60):
            while (await run("status", "--daemon", address))[0] != 0:
                assert process.returncode is None, (place.folder / "daemon.log").read_text()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def layouts(place: Harness) -> list[tuple[str, str]]:
    """Return the configuration and GPUs of each engine in the cluster."""
    found: list[dict[str, Any]] = [each["metadata"]["annotations"] for each in place.cluster.store.all("deployments")]
    return sorted((each["orchestrrl/configuration"], each["orchestrrl/gpus"]) for each in found)


async def test_pods_are_redeployed_rolled_back_and_outlive_the_daemon(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with harness(tmp_path) as place:
        async with daemon(place, address) as process:
            status, words = await run("redeploy", "--to", "tp2=1", "--to", "tp1=1", "--daemon", address)
            assert status == 0, words
            assert layouts(place) == [("tp1", "2"), ("tp2", "0,1")]
            assert {pod["spec"]["nodeName"] for pod in pods(place)} == {"node-b"}
            before = {pod["metadata"]["uid"] for pod in pods(place)}
            status, words = await run("redeploy", "--to", "broken=1", "--to", "tp2=1", "--daemon", address)
            assert status == 1, words
            assert "rolled back" in words
            assert "alpha_s" in words  # the end of the engine's log, read from its pod
            process.kill()
            await process.wait()
        # Engines that stay were not touched, stopped ones were started again, and the daemon's end had no effect.
        assert layouts(place) == [("tp1", "2"), ("tp2", "0,1")]
        after = {pod["metadata"]["uid"] for pod in pods(place)}
        assert len(before & after) == 1
        async with daemon(place, address):
            status, words = await run("redeploy", "--to", "tp1=2", "--daemon", address)
            assert status == 0, words
        assert layouts(place) == [("tp1", "0"), ("tp1", "2")]
        for each in await place.deployer("job").list_engines():
            await place.deployer("job").stop(each.engine)
        assert empty(place)
