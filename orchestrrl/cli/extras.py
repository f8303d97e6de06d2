"""Extras of the distribution, the packages that they add, and the commands that need them.

Other commands work in the base installation. If one of their options needs an extra, as pictures do, the command fails
when it imports the missing package.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NoReturn

from orchestrrl.cli.output import EXIT_MALFORMED, fail

_PLANNER = ("aiohttp", "grpc_health", "grpc_reflection", "ortools", "scipy", "statsmodels")

# Packages by the names with which they are imported. The extras are those of pyproject.toml.
PACKAGES = {"planner": _PLANNER, "sim": (*_PLANNER, "matplotlib", "numba")}

_COMMANDS = {
    "planner": [
        *("daemon", "up", "engine simulated", "plan solve", "sync plan", "profile fit", "profile score"),
        *(f"fabric {verb}" for verb in ("allocate", "place", "transition")),
    ],
    "sim": [
        *("demo", "bench", "fabric box", "sync box"),
        *(f"sim {verb}" for verb in ("gen", "paper", "run", "compare", "report", "daemon-config", "split", "sweep")),
    ],
}
EXTRA_OF = {path: extra for extra, paths in _COMMANDS.items() for path in paths}


@contextmanager
def with_extra(path: str) -> Iterator[None]:
    """Run the body, which is the command at `path`, such as `plan solve`. If a package of an extra is missing, print
    which extra to install and exit with status 2."""
    extra = EXTRA_OF.get(path)
    if extra is not None and not all(map(find_spec, PACKAGES[extra])):
        _fail(path, extra)
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        for extra, packages in PACKAGES.items():
            if missing in packages:
                _fail(f"{path} with these options", extra)
        raise


def _fail(what: str, extra: str) -> NoReturn:
    fail(f"orchestrrl {what} needs the extra \"{extra}\": pip install 'orchestrrl[{extra}]'", EXIT_MALFORMED)
