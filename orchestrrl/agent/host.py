"""Add facts about an engine that its HTTP API omits but its host provides: GPUs, process arguments and model sizes.

The module applies only to engines on the agent's own host. Values that the engine itself reports are never overridden.
"""

import asyncio
import ipaddress
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from orchestrrl.engines.base import EngineCapabilities
from orchestrrl.engines.serving import ServingFacts, gpu_of, kv_bits, model_from_config, named, ranks, weight_bits
from orchestrrl.fleet.deployers.user_arguments import read_arguments
from planner.cost.models import Model

SMI_TIMEOUT_S = 10.0  # the first call initialises the driver
MOST_CONFIG_BYTES = 1 << 20
PARENTS = 4  # a server's front ends, engine cores and workers are descendants of the process with the arguments


async def with_host_facts(capabilities: EngineCapabilities, url: str) -> EngineCapabilities:
    """Return the capabilities with unknown serving facts filled in from this host, if the engine runs on it."""
    return replace(capabilities, serving=await asyncio.to_thread(host_facts, capabilities.serving, url))


def host_facts(facts: ServingFacts, url: str) -> ServingFacts:
    """Return the facts with unknown values filled in from this host, if the engine runs on it. The call blocks while it
    reads files and runs nvidia-smi."""
    if not is_local(url):
        missing = not facts.gpu and not facts.gpu_detail
        elsewhere = "the engine does not report its GPU, and its agent is on another host"
        return replace(facts, gpu_detail=elsewhere) if missing else facts
    if facts.tp is None:
        facts = with_arguments(facts, server_arguments(urlsplit(url).port or 80))
    if not facts.gpu and not facts.gpu_detail:
        gpu, why = _gpu()
        facts = replace(facts, gpu=gpu, gpu_detail=why)
    return replace(facts, sizes=facts.sizes or _sizes(facts.model))


def is_local(url: str) -> bool:
    """Return whether the URL refers to this host, i.e. to a loopback address, one of the host's addresses, or its name.
    No name server is queried."""
    name = urlsplit(url).hostname or ""
    if name in ("localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))  # only an address of this host can be bound
    except OSError:
        return False
    return not address.is_unspecified


def server_arguments(port: int) -> tuple[str, ...]:
    """Return the command line of the vLLM server that listens on `port`, or an empty tuple if it cannot be found or
    read."""
    with suppress(psutil.Error, OSError, RuntimeError):  # the system's tables cannot be read
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.laddr[1:] != (port,) or connection.pid is None:
                continue
            with suppress(psutil.Error):  # it has ended, or belongs to another user
                # A process that inherited the socket is a descendant of the one with the arguments.
                holder = psutil.Process(connection.pid)
                for process in (holder, *holder.parents()[:PARENTS]):
                    arguments = tuple(process.cmdline())
                    if any("vllm" in argument for argument in arguments) and len(arguments) > 1:
                        return arguments
    return ()


def with_arguments(facts: ServingFacts, arguments: Sequence[str]) -> ServingFacts:
    """Return the facts with unknown values filled in from a vLLM command line. For missing flags, vLLM's defaults are
    assumed."""
    if not arguments:
        return facts
    # A flag's value may be followed by the model's name.
    flags = {each.flag: each.value.partition(" ")[0] for each in read_arguments("", arguments)[0]}
    if "--config" in flags:  # a file with further arguments
        return facts
    return replace(
        facts,
        tp=_count(flags, "--tensor-parallel-size"),
        pp=_count(flags, "--pipeline-parallel-size"),
        dp=_count(flags, "--data-parallel-size"),
        ep="--enable-expert-parallel" in flags,
        weight_bits=facts.weight_bits or weight_bits(flags.get("--dtype"), flags.get("--quantization")),
        kv_bits=facts.kv_bits or kv_bits(flags.get("--kv-cache-dtype", "auto")),
    )


# --- inside


def _count(flags: Mapping[str, str], name: str) -> int | None:
    value = flags.get(name, "1")
    return ranks(int(value)) if value.isdecimal() else None


def _gpu() -> tuple[str, str]:
    """Return the product name of this host's GPUs and an empty string, or an empty name and the reason why it is
    unknown."""
    if shutil.which("nvidia-smi") is None:
        return "", "the engine's host has no GPU (nvidia-smi is not installed)"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi on the engine's host failed: {error}"
    if done.returncode != 0:
        message = (done.stdout + done.stderr).strip().partition("\n")[0]
        return "", named(f"nvidia-smi on the engine's host failed: {message or f'exit status {done.returncode}'}")
    return gpu_of(done.stdout.splitlines())


def _sizes(model: str) -> Model | None:
    """Return the model's sizes from the config.json in its folder (if `model` is an absolute path) or in its newest
    snapshot in Hugging Face's cache. Return None if the file does not exist or cannot be used."""
    if not model:
        return None
    if model.startswith("/"):
        return _read_config(Path(model) / "config.json")
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub_cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = hub_cache / f"models--{model.replace('/', '--')}" / "snapshots"
    try:
        found = max(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None
    return None if found is None else _read_config(found, model)


def _read_config(path: Path, name: str = "") -> Model | None:
    """Return the model's sizes from the config.json at `path`, of which at most MOST_CONFIG_BYTES are read. Return None
    if the file cannot be read or describes no model. Without `name`, the model is named after the file's folder."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_CONFIG_BYTES).decode(errors="replace")
        return model_from_config((name or path.parent.name).rsplit("/", 1)[-1], json.loads(text))
    except (OSError, ValueError, RecursionError):
        return None
