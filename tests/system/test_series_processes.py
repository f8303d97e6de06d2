"""The forecast before a step imports statsmodels only if it needs it."""

import subprocess
import sys


def test_statsmodels_is_imported_only_for_a_long_history() -> None:
    program = (
        "import sys; from planner.workload.series import *; import planner.workload.forecast\n"
        "step = StepStatistics(10, LengthCounts((1.0, 2.0), (0.0, 0.0, 0.0)))\n"
        "series = SeriesForecaster(10, 20)\n"
        "for _ in range(9): series = series.fold(step)\n"
        "sys.exit('statsmodels' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120, check=False).returncode == 0
