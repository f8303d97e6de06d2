"""Assertions of the suite that every deployer passes are shown as those of tests are."""

import pytest

pytest.register_assert_rewrite("orchestrrl.deployers.conformance")
