import pytest

pytest.register_assert_rewrite(
    "orchestrrl.engines.conformance",
    "orchestrrl.engines.managed_conformance",
    "orchestrrl.engines.managed_conformance",
)
