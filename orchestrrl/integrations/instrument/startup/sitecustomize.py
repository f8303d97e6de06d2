"""Enable the recorder at Python startup if ORCHESTRRL_RECORDER is set. Python runs this file if its folder is on
PYTHONPATH.

The file also runs the other `sitecustomize` module that it shadows. Errors in this file do not prevent a program from
starting.
"""

import importlib
import importlib.machinery
import importlib.util
import logging
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_the_other() -> None:
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _switch_on() -> None:
    if os.environ.get("ORCHESTRRL_RECORDER", "0") in ("", "0"):
        return
    folder = str(_HERE.parent)
    sys.path.insert(0, folder)  # first, because a program may have a module of the same name
    try:
        importlib.import_module("recorder").start()
    except (ImportError, OSError, ValueError) as fault:
        logging.getLogger("orchestrrl.recorder").warning("recording is disabled: %r", fault)
    finally:
        sys.path.remove(folder)


_switch_on()
_run_the_other()
