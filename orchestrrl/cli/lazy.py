"""Modules that are imported on first use, so that `--help`, which does not need them, is fast."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrrl.cli.fleet import redeploy_text
    from orchestrrl.cli.sync import text as sync_text
    from orchestrrl.rpc.control_client import ControlClient
    from orchestrrl.rpc.pb import agent_pb2, control_pb2, fabric_pb2, ocs_pb2, weights_pb2
else:
    ControlClient = Any  # for annotations

    class _Module:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(import_module(self._name), attribute)

    _MESSAGES = ("agent_pb2", "control_pb2", "fabric_pb2", "ocs_pb2", "weights_pb2")
    agent_pb2, control_pb2, fabric_pb2, ocs_pb2, weights_pb2 = (_Module(f"orchestrrl.rpc.pb.{m}") for m in _MESSAGES)
    redeploy_text = _Module("orchestrrl.cli.fleet.redeploy_text")
    sync_text = _Module("orchestrrl.cli.sync.text")

__all__ = [
    "ControlClient",
    "agent_pb2",
    "control_pb2",
    "fabric_pb2",
    "ocs_pb2",
    "redeploy_text",
    "sync_text",
    "weights_pb2",
]
