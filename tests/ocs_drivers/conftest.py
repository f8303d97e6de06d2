"""The conformance suite asserts on pytest's behalf: let it explain its asserts."""

import pytest

pytest.register_assert_rewrite("ocs_drivers.conformance")
