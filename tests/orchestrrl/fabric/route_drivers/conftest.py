"""The suite's assertions are shown as those of tests are."""

import pytest

pytest.register_assert_rewrite("orchestrrl.fabric.route_drivers.conformance")
