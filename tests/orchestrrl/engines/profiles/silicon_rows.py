"""Builds measured deployments as CSV text, with defaults for columns that a test omits."""

from collections.abc import Mapping

from orchestrrl.engines.profiles.silicon import COLUMNS

USUAL = {
    "backend": "trtllm",
    "backend_version": "1.0",
    "model_path": "Qwen/Qwen3-32B",
    "system": "h100_sxm",
    "isl": "1024",
    "osl": "256",
    "batch_size": "16.0",
    "tp_size": "2.0",
    "pp_size": "1.0",
    "silicon_tpot_ms": "12.5",
}


def csv_of(*rows: Mapping[str, str], columns: tuple[str, ...] = COLUMNS) -> str:
    lines = [",".join(columns)]
    lines += [",".join({**USUAL, **row}.get(column, "") for column in columns) for row in rows]
    return "\n".join(lines) + "\n"
