"""The parts of a daemon as servers receive them; a test may replace single ones."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from orchestrrl.daemon.wiring import Daemon


def changeable(daemon: Daemon) -> Any:
    return SimpleNamespace(**{each.name: getattr(daemon, each.name) for each in fields(daemon)})
