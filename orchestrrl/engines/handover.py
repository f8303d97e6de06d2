"""The command-line flags and body fields for moving a running request between two vLLM servers with its KV.

The functions only build values. `orchestrrl/integrations/instrument` has the code that runs in the servers. A move
takes three steps:

1. The router sends every attempt that may move with `saving(...)` in its body, under a unique entry id.
2. It aborts the attempt. The source saves the KV of all prompt and generated tokens, while other requests run.
3. It sends the destination the prompt and generated ids as one prompt, with `loading(...)` of the attempt's entry.

If a step fails, the destination recomputes the KV. The answer is then the same, but it takes longer. `weights` names
the weight version that computed the attempt's first token. If several models share a directory, it also names the
model. A request that ran while its engine's weights changed has KV of both versions and must be moved without
`loading`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrrl.integrations import instrument
from orchestrrl.integrations.instrument.kv_scheduler import (
    DEFAULT_WAIT_S,
    LOAD,
    PARAMETER,
    SAVE,
    WAIT_S,
    WEIGHTS,
    read_transfer_params,
)

BODY_FIELD = "kv_transfer_params"
MODULE_FOLDER = Path(instrument.__file__).parent  # must be on the server's PYTHONPATH
EXTERNAL_SOURCE = "external_kv_transfer"  # label of loaded prompt tokens in vllm:prompt_tokens_by_source_total


def vllm_arguments(shared: Path, *, max_age_s: float | None = None, max_bytes: int | None = None) -> tuple[str, str]:
    """Return the arguments for a vLLM server that transfers KV through the directory `shared`. The server needs
    MODULE_FOLDER on its PYTHONPATH. Entries are removed after `max_age_s` (default 300 s), or if all servers' entries
    exceed `max_bytes` (default 16 GiB)."""
    extra = {"shared_storage_path": str(shared), "max_age_s": max_age_s, "max_bytes": max_bytes}
    config = {
        "kv_connector": "KvHandover",
        "kv_connector_module_path": "kv_handover",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {name: value for name, value in extra.items() if value is not None},
    }
    return "--kv-transfer-config", json.dumps(config)


def entry_id(*names: object) -> str:
    """Return an entry id, a hash of the names that make it unique: the router's start, the request and the attempt."""
    return hashlib.sha256(json.dumps([str(name) for name in names]).encode()).hexdigest()[:32]


def saving(weights: str, save: str) -> Mapping[str, Any]:
    """Return the body field for an attempt that may move later. If the attempt is aborted, its KV is saved as entry
    `save`."""
    return _checked({WEIGHTS: weights, SAVE: save})


def loading(weights: str, load: str, save: str | None = None, wait_s: float = DEFAULT_WAIT_S) -> Mapping[str, Any]:
    """Return the body field for a continued request that loads entry `load`. The engine waits up to `wait_s` for an
    entry that is still being written. If `save` is given, the request may move once more."""
    return _checked({WEIGHTS: weights, LOAD: load, WAIT_S: wait_s} | ({} if save is None else {SAVE: save}))


def _checked(wish: dict[str, Any]) -> Mapping[str, Any]:
    """Return the body field with these parameters. Raises ValueError if a parameter is invalid, because the engine
    would only log this fault."""
    params = {PARAMETER: wish}
    read_transfer_params(params)
    return {BODY_FIELD: params}
