"""An independent client, pyvisa, drives the emulators, so that driver and emulator do not share a misreading."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.scpi import ScpiEmulator, dicon, polatis
from ocs_drivers.faults import DeviceFault, DeviceFaultKind

pyvisa = pytest.importorskip("pyvisa", reason="pyvisa is not installed: uv sync")

TIMEOUT_MS = 60_000


@pytest.fixture(params=[polatis, dicon], ids=["polatis", "dicon"])
async def emulator(request: pytest.FixtureRequest) -> AsyncIterator[ScpiEmulator]:
    emulator: ScpiEmulator = request.param(DevicePanel(16, 16, reconfiguration_s=0.0), one_session=True)
    yield emulator
    await emulator.stop()


async def test_pyvisa_session(emulator: ScpiEmulator) -> None:
    address = await emulator.start()
    await asyncio.to_thread(_session, address, emulator)


def _session(address: str, emulator: ScpiEmulator) -> None:
    host, port = address.split(":")
    end = "\r\n" if emulator.quirks.crlf else "\n"
    visa: Any = pyvisa.ResourceManager("@py")
    with visa.open_resource(
        f"TCPIP::{host}::{port}::SOCKET", read_termination=end, write_termination="\n", timeout=TIMEOUT_MS
    ) as switch:
        assert switch.query("*idn?").split(",")[0] in ("Polatis", "DiCon")
        assert switch.query_ascii_values(":oxc:swit:size?") == [16.0, 16.0]
        switch.write(":oxc:swit:conn:add (@1,2,3),(@17,18,19)")
        assert switch.query(":oxc:swit:conn:stat?") == "(@1,2,3),(@17,18,19)"
        assert switch.query(":oxc:swit:conn:port? 2") == '"18"'
        assert switch.query(":OXC:SWITch:CONNect:PORT? 18") == '"2"'
        assert switch.query(":oxc:swit:conn:port? 4") == '""'
        switch.write(":oxc:swit:conn:add (@1),(@20)")  # silently re-routed
        assert switch.query(":oxc:swit:conn:only (@2),(@18); stat?") == "(@2),(@18)"
        assert switch.query("SYSTem:ERRor?") == '0,"No error"'
        emulator.device.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 17))
        assert switch.query(":oxc:swit:port:stat? (@1,2,17)") == "(E,E,F)"
        switch.write(":oxc:swit:conn:add (@1),(@17)")
        switch.write("*rst")  # not supported
        assert switch.query(":syst:err:all?") == '-200,"Execution error;PORT 17 FAILED",-113,"Undefined header;*rst"'
        switch.write(":oxc:swit:disc:all")
        assert switch.query(":oxc:swit:conn:stat?;*opc?").replace(end, ";") == "(@),(@);1"
    visa.close()
