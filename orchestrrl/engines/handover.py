"""Moving a running request between two vLLM servers with its KV: what goes on their command lines and into the bodies.

Pure. The servers' side is `orchestrrl/integrations/instrument`. A move by KV takes three steps of whoever routes the
requests:

1. every attempt that may be moved is sent with `saving(...)` in its body, under an entry id of its own;
2. the source aborts it, and saves the KV of all its tokens, prompt and generated, beside its other requests' steps;
3. the destination is sent prompt and generated ids as one prompt, with `loading(...)` the attempt's entry.

Whatever goes wrong, the destination recomputes: the answer is the same and only time is lost. `weights` names the
version that an attempt's first token was computed under (and the model, where a shared directory serves several). A
request that was running while its engine's weights changed has KV of both: move it without `loading`.
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
MODULE_FOLDER = Path(instrument.__file__).parent  # for PYTHONPATH of the server
EXTERNAL_SOURCE = "external_kv_transfer"  # label of vllm:prompt_tokens_by_source_total: prompt tokens that were loaded


def vllm_arguments(shared: Path, *, max_age_s: float | None = None, max_bytes: int | None = None) -> tuple[str, str]:
    """Arguments for a vLLM server that hands requests over through the directory `shared`; it needs MODULE_FOLDER on
    its PYTHONPATH. Entries go after `max_age_s` or beyond `max_bytes` (of all servers), by default 300 s and 16 GiB."""
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
    """An entry's id out of what makes it unique: who routes (with its start), the request, the attempt."""
    return hashlib.sha256(json.dumps([str(name) for name in names]).encode()).hexdigest()[:32]


def saving(weights: str, save: str) -> Mapping[str, Any]:
    """For the body of an attempt that may be moved later: when it is aborted, its KV becomes the entry `save`."""
    return _checked({WEIGHTS: weights, SAVE: save})


def loading(weights: str, load: str, save: str | None = None, wait_s: float = DEFAULT_WAIT_S) -> Mapping[str, Any]:
    """For the body of the continued request: use the entry `load`, which may still be written for `wait_s`; after that
    it is no longer waited for. With `save` it may be moved once more."""
    return _checked({WEIGHTS: weights, LOAD: load, WAIT_S: wait_s} | ({} if save is None else {SAVE: save}))


def _checked(wish: dict[str, Any]) -> Mapping[str, Any]:
    """Raises ValueError here for what the engine would only write into its log."""
    params = {PARAMETER: wish}
    read_transfer_params(params)
    return {BODY_FIELD: params}
