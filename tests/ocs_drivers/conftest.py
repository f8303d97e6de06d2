"""Enable pytest's assertion introspection in the conformance suite."""

import pytest

pytest.register_assert_rewrite("ocs_drivers.conformance")
