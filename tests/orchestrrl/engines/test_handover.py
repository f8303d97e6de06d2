"""The engine side reads the body fields that the gateway writes, and it can be loaded without OrchestrRL."""

import ast
import json
from pathlib import Path

import pytest

from orchestrrl.engines import handover
from orchestrrl.integrations.instrument.kv_entries import is_entry_id
from orchestrrl.integrations.instrument.kv_scheduler import TransferParams, read_transfer_params


def test_transfer_parameters_survive_a_round_trip() -> None:
    entry, next_entry = handover.entry_id("gateway", "r", 1), handover.entry_id("gateway", "r", 2)
    assert read_transfer_params(handover.saving("v1", entry)["kv_transfer_params"]) == TransferParams("v1", save=entry)
    body = handover.loading("v1", entry, next_entry, wait_s=0.5)
    assert read_transfer_params(json.loads(json.dumps(body))["kv_transfer_params"]) == TransferParams(
        "v1", next_entry, entry, 0.5
    )
    with pytest.raises(ValueError, match="weights"):
        handover.saving("", entry)


def test_entry_ids_are_hexadecimal_and_unique() -> None:
    names = [("a", "b/..", 1), ("a", "b/..", 2), ("ab", "/..", 1), ("a/b", "..", 1)]
    ids = {handover.entry_id(*name) for name in names}
    assert len(ids) == len(names)
    assert all(is_entry_id(entry) for entry in ids)


def test_command_line_names_an_existing_module(tmp_path: Path) -> None:
    option, text = handover.vllm_arguments(tmp_path, max_age_s=5.0)
    config = json.loads(text)
    assert option == "--kv-transfer-config"
    assert config["kv_connector_extra_config"] == {"shared_storage_path": str(tmp_path), "max_age_s": 5.0}
    source = (handover.MODULE_FOLDER / f"{config['kv_connector_module_path']}.py").read_text()
    assert config["kv_connector"] in {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
