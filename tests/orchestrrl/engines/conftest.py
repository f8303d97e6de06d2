import pytest

pytest.register_assert_rewrite(
    "orchestrrl.engines.conformance",
    "orchestrrl.engines.managed_conformance",
    "orchestrrl.engines.responses_conformance",
    "orchestrrl.engines.sampling_conformance",
    "orchestrrl.engines.token_endpoints_conformance",
)
