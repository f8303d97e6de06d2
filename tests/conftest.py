"""For all tests: hypothesis without wall-clock deadlines, and with the same examples in every run but `make fuzz`."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Its assertions are shown as those of tests are.
pytest.register_assert_rewrite("orchestrrl.deployers.conformance")

# As in `orchestrrl` itself, also for tests that load numpy without it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A shared machine may stall in any example; pytest's own time-out catches what hangs. Whoever changes one thing is not
# to be stopped by a find in another: searching is a run of its own.
settings.register_profile("same", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("fuzz", deadline=None, derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("ORCHESTRRL_HYPOTHESIS", "same"))


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """A command that is run in a test's own process may turn our log down: not for the tests after it."""
    ours = logging.getLogger("orchestrrl")
    before = ours.level
    yield
    ours.setLevel(before)
