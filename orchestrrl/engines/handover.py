"""The command-line flags and body fields for moving a running request, together with its KV, between two vLLM servers.

The functions only build these values. The code that runs in the servers is in `orchestrrl/integrations/instrument`. A
move takes three steps:

1. If an attempt may move, the router adds `saving(...)`, with a unique entry id, to the body that it sends.
2. The router aborts the attempt. The source saves the KV of all prompt and generated tokens, while other requests run.
3. The router sends the prompt and generated ids to the destination as one prompt, with `loading(...)` for the
   attempt's entry.

If a step fails, the destination recomputes the KV. The answer is then the same, but it takes longer. The argument
`weights` names the weight version that computed the attempt's first token. If several models share a directory, it also
names the model. A request that ran while its engine's weights changed has KV of both versions and must be moved without
`loading`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrrl.integrations import instrument
from orchestrrl.integrations.instrument.kv_scheduler import (
    AT_END,
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


@dataclass(frozen=True, slots=True)
class LeftKv:
    """The KV that an attempt leaves when it is cut. It is stored as an entry of the engines' KV connector."""

    version: str  # the KV version at the start of the attempt
    entry: str


def vllm_arguments(shared: Path, *, max_age_s: float | None = None, max_bytes: int | None = None) -> tuple[str, str]:
    """Return the arguments for a vLLM server that transfers KV through the directory `shared`. The server needs
    MODULE_FOLDER on its PYTHONPATH. Entries older than `max_age_s` (default 300 s) are removed. The oldest entries are
    also removed if the entries of all servers exceed `max_bytes` (default 16 GiB)."""
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
    """Return the id of a KV entry, which is a hash of `names`. The names identify the router process, the request and
    the attempt, so that the id is unique."""
    return hashlib.sha256(json.dumps([str(name) for name in names]).encode()).hexdigest()[:32]


def saving(weights: str, save: str, *, at_end: bool = False) -> Mapping[str, Any]:
    """Return the body field for an attempt that may move later. If the attempt is aborted, or ends in any way if
    `at_end` is set, its KV is saved as entry `save`. `weights` names the weight version that computes the KV."""
    return _checked({WEIGHTS: weights, SAVE: save} | ({AT_END: True} if at_end else {}))


def loading(
    weights: str, load: str, save: str | None = None, wait_s: float = DEFAULT_WAIT_S, *, at_end: bool = False
) -> Mapping[str, Any]:
    """Return the body field for a continued request that loads the KV of entry `load`. The engine waits up to `wait_s`
    seconds for an entry that is still being written. If `save` is given, the request may move once more, and its KV is
    then saved as entry `save`. `at_end` has the same meaning as in `saving`."""
    kept = {} if save is None else saving(weights, save, at_end=at_end)[BODY_FIELD][PARAMETER]
    return _checked({WEIGHTS: weights, LOAD: load, WAIT_S: wait_s} | kept)


def _checked(wish: dict[str, Any]) -> Mapping[str, Any]:
    """Return the body field with the parameters in `wish`. Raises ValueError if a parameter is invalid, because the
    engine would only log this fault."""
    params = {PARAMETER: wish}
    read_transfer_params(params)
    return {BODY_FIELD: params}
