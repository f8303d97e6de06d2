"""The conformance suite of deployers for local processes, with a stub as engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.core.clock import WallClock
from orchestrrl.core.config.launch import EngineProduct
from orchestrrl.fleet.deployers.base import Deployer, FleetIdentity
from orchestrrl.fleet.deployers.conformance import DeployerConformance, stub_launch
from orchestrrl.fleet.deployers.local import LocalDeployer


class TestLocalDeployer(DeployerConformance):
    @pytest.fixture(autouse=True)
    def _in_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.launch = stub_launch(tmp_path)

    async def make_deployer(self, fleet: str) -> Deployer:
        options: dict[str, Any] = {"grace_s": 0.5}
        return LocalDeployer(self.launch, FleetIdentity(fleet, str(self.folder / fleet)), options, WallClock())


class TestLocalDeployerOfEnginesThatScale(TestLocalDeployer):
    """The possible operations depend on the engine product; the stub accepts the command line of both."""

    @pytest.fixture(autouse=True)
    def _in_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.launch = replace(stub_launch(tmp_path), engine=EngineProduct.SIMULATED)
