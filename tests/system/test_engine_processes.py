import subprocess
import sys

import pytest

DEADLINE_S = 120.0


def started(*given: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrrl", "engine", "simulated", *given]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("given", [(), ("--hang",)])
def test_engine_ends_on_signal(given: tuple[str, ...]) -> None:
    process = started(*given)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
    assert process.communicate()[1] == ""


def test_engine_ends_on_signal_before_it_listens() -> None:
    process = started("--start-delay-s", "3600")
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=3.0)  # by then it waits; on a slow machine it has no handler yet
    process.terminate()
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (out, err) == ("", "")
