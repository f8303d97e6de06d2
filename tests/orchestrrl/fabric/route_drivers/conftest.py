"""Show the conformance suite's assertions as those of tests."""

import pytest

pytest.register_assert_rewrite("orchestrrl.fabric.route_drivers.conformance")
