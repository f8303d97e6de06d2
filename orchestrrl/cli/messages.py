"""The daemon's messages. Their modules are imported with the first that is made, not for help or completion."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrrl.rpc.pb import agent_pb2, control_pb2, fabric_pb2, ocs_pb2, weights_pb2
else:

    class _Module:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(import_module(f"orchestrrl.rpc.pb.{self._name}"), attribute)

    agent_pb2, control_pb2, fabric_pb2, ocs_pb2, weights_pb2 = map(
        _Module, ("agent_pb2", "control_pb2", "fabric_pb2", "ocs_pb2", "weights_pb2")
    )

__all__ = ["agent_pb2", "control_pb2", "fabric_pb2", "ocs_pb2", "weights_pb2"]
