"""The driver `restconf` and its emulator: requests of curl, port states, and request forms."""

import asyncio

from curl import curl

from ocs_drivers.conformance import carry_out, connected, refusal
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.errors import DriverRetryable
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import CrossConnect, PortStatus
from tests.ocs_drivers.test_restconf import ONE, TWO, switch


async def test_driver_sees_and_keeps_circuits_made_by_curl() -> None:
    """The body and the path are those that clients of real switches use."""
    body = '{"optical-switch:cross-connects":{"pair":[{"ingress":1,"egress":17}]}}'
    json_type = ("-H", "Content-Type: application/yang-data+json", "-H", "Accept: application/yang-data+json")
    auth = ("-u", "admin:root")
    async with switch({"user": "admin", "password": "root"}, user="admin", password="root") as (driver, _, address):
        root = f"http://{address}/api/data/optical-switch:cross-connects"
        assert await curl(root) == (401, None)
        assert await curl(*auth, *json_type, root) == (204, None)
        assert (await curl(*auth, *json_type, "-X", "PUT", "-d", body, root))[0] == 204
        assert await connected(driver) == {ONE}
        assert (await carry_out(driver, (TWO,))).done
        status, shown = await curl(*auth, *json_type, root)
        assert (status, shown) == (
            200,
            {"optical-switch:cross-connects": {"pair": [{"ingress": 1, "egress": 17}, {"ingress": 2, "egress": 18}]}},
        )
        one = '{"optical-switch:pair":[{"ingress":2,"egress":19}]}'
        assert (await curl(*auth, *json_type, "-X", "POST", "-d", one, root))[0] == 409
        assert (await curl(*auth, *json_type, f"{root}/pair=2"))[1] == {
            "optical-switch:pair": {"ingress": 2, "egress": 18}
        }
        assert (await curl(*auth, "-X", "DELETE", f"{root}/pair=1"))[0] == 204
        assert (await curl(*auth, "-X", "DELETE", f"{root}/pair=1"))[0] == 404
        assert await connected(driver) == {TWO}


async def test_driver_sees_a_port_disabled_by_curl() -> None:
    async with switch() as (driver, _, address):
        url = f"http://{address}/api/operations/optical-switch:port-set-state"
        assert (await curl("-d", '{"optical-switch:input":{"port-disab":[3]}}', url))[0] == 204
        states = {port.port: port.status for port in await driver.ports()}
        assert states[3] is PortStatus.DISABLED
        assert set(states.values()) == {PortStatus.DISABLED, PortStatus.ENABLED}


async def test_any_to_any_circuit_is_deleted_by_the_reported_port() -> None:
    async with switch({"any_to_any": True}, DevicePanel(32, 32, reconfiguration_s=0.001)) as (
        driver,
        emulator,
        address,
    ):
        url = f"http://{address}/api/data/optical-switch:cross-connects"
        assert (await curl("-d", '{"optical-switch:pair":{"ingress":9,"egress":4}}', url))[0] == 201
        pair = CrossConnect(4, 9)
        assert await connected(driver) == {pair}
        await driver.take_over((pair,))
        assert (await carry_out(driver, disconnect=(pair,))).done
        assert emulator.device.setters[-1] == "YANG-PATCH remove 9:4"


async def test_requests_to_a_serial_switch_are_sequential() -> None:
    async with switch({"one_request": True}) as (driver, emulator, address):
        await asyncio.gather(*(driver.cross_connects() for _ in range(5)), carry_out(driver, (ONE,)))
        emulator.device.inject(DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=3600.0))
        url = f"http://{address}/api/data/optical-switch:cross-connects"
        body = '{"optical-switch:pair":{"ingress":2,"egress":18}}'
        held = asyncio.ensure_future(curl("-d", body, url))
        await emulator.device.holding_back.wait()
        async with refusal(DriverRetryable, "the device is unavailable", "another request is under way"):
            await driver.cross_connects()
        held.cancel()
