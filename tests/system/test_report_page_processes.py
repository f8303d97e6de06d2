"""The report page is deterministic."""

import os
import subprocess
import sys
from pathlib import Path

from orchestrrl.lab.sim.report_page.page import page
from tests.orchestrrl.lab.sim.report.results_builder import several


def test_same_results_give_identical_pages(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from orchestrrl.lab.sim.report_page.page import write;"
        "from tests.orchestrrl.lab.sim.report.results_builder import several; write(several(), Path(sys.argv[1]))"
    )
    pages = []
    for hash_seed in ("0", "4242"):
        path = tmp_path / f"{hash_seed}.html"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        root = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-c", program, str(path)], cwd=root, env=environment, check=True)
        pages.append(path.read_bytes())
    assert pages[0] == pages[1] == page(several()).encode()
