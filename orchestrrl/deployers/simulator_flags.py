"""The flags of `orchestrrl engine simulated` that a layout and a place decide. Pure."""

from collections.abc import Mapping

from planner.model import Parallelism

SIMULATED_PROGRAM = ("-m", "orchestrrl", "engine", "simulated")

# With what it does where they are left out.
SIMULATED_DECIDED: Mapping[str, str | None] = {
    "--host": None,
    "--port": None,
}


def simulated_values(parallelism: Parallelism, host: str, port: int, kv_directory: str) -> dict[str, str]:
    """`kv_directory` empty: no handover."""
    values = {"--host": host, "--port": str(port)}
    return {**values, "--kv-directory": kv_directory} if kv_directory else values
