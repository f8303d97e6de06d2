"""The driver `calient_rest` and its emulator: requests of curl, sessions, directions and failures."""

from curl import curl

from ocs_drivers.conformance import carry_out, connected
from ocs_drivers.model import CircuitChange, CircuitState, Connectivity, CrossConnect
from tests.ocs_drivers.test_calient_rest import ONE, TWO, switch


async def test_driver_sees_and_keeps_circuits_made_by_curl() -> None:
    """Requests in the forms that clients of real switches use: a form, a list of items, a name to delete."""
    auth = {"user": "admin", "password": "pxc***"}
    async with switch(auth, **auth) as (driver, _, address):
        root, login = f"http://{address}/rest/crossconnects/", ("-u", "admin:pxc***")
        assert await curl(f"{root}?id=list") == (401, None)
        assert await curl(*login, f"{root}?id=list") == (200, [])
        status, shown = await curl(*login, "-d", "id=add&in=1.1.1&out=1.2.1&dir=uni", root)
        assert (status, shown[0]["status"]) == (200, "1")
        assert await connected(driver) == {ONE}
        body = '[{"in":"1.1.2","out":"1.2.2","dir":"uni"},{"in":"1.1.3","out":"9.9.9","dir":"uni"}]'
        status, shown = await curl(*login, "-d", body, "-H", "Content-Type: application/json", f"{root}?id=badd")
        assert (status, [item["response"]["status"] for item in shown]) == (200, ["1", "0"])
        assert await connected(driver) == {ONE, TWO}
        _, rows = await curl(*login, f"{root}?id=list")
        assert [row["half1"]["conn"] for row in rows] == ["1.1.1>1.2.1", "1.1.2>1.2.2"]
        _, shown = await curl(*login, "-G", "-X", "DELETE", "--data-urlencode", "conn=1.1.1>1.2.1", root)
        assert shown[0]["status"] == "1"
        _, shown = await curl(*login, "-G", "-X", "DELETE", "--data-urlencode", "conn=1.1.1>1.2.1", root)
        assert (shown[0]["status"], shown[0]["description"]) == ("0", "no such connection")
        assert (await carry_out(driver, (ONE,))).done
        _, rows = await curl(
            *login,
            "-G",
            "--data-urlencode",
            "id=detail",
            "--data-urlencode",
            "port=1.1.1",
            f"http://{address}/rest/ports/",
        )
        assert (rows[0]["incircuit"], rows[0]["outcircuit"]) == ("1.1.1>1.2.1", "")


async def test_password_is_sent_once_per_session() -> None:
    auth = {"user": "admin", "password": "pxc***"}
    async with switch(auth, **auth) as (driver, emulator, address):
        await carry_out(driver, (ONE,))
        assert emulator._given == 1
        await curl(
            "-u", "admin:pxc***", f"http://{address}/rest/ports/?id=summary"
        )  # only one session is allowed: the driver's session has ended
        diff = await driver.plan(CircuitChange((TWO,)))
        await curl("-u", "admin:pxc***", f"http://{address}/rest/ports/?id=summary")
        assert (await driver.commit(diff, diff.revision)).done
        assert emulator._given == 5
        assert len(emulator.device.setters) == 2  # the request rejected without a session was not executed twice


async def test_one_direction_is_removed_only_with_the_other() -> None:
    async with switch() as (driver, emulator, address):
        body = '[{"in":"1.1.1","out":"1.2.1","dir":"bi","group":"LAB"}]'
        await curl("-d", body, "-H", "Content-Type: application/json", f"http://{address}/rest/crossconnects/?id=badd")
        pairs = (CrossConnect(1, 9), CrossConnect(9, 1))
        assert await connected(driver) == set(pairs)
        await driver.take_over(pairs)
        result = await carry_out(driver, disconnect=pairs[:1])
        wrong = "cross-connect 1:9 is one direction of connection 1.1.1-1.2.1"
        assert wrong in result.items[0].detail
        assert await connected(driver) == set(pairs)
        assert (await carry_out(driver, disconnect=pairs)).done
        assert len(emulator.device.setters) == 2


async def test_half_a_connection_is_reported_as_failed() -> None:
    async with switch(dir="bi") as (driver, _, address):
        assert (await driver.facts()).connectivity is Connectivity.ANY_TO_ANY
        await curl("-d", "id=add&in=1.2.1&out=1.1.1&dir=uni", f"http://{address}/rest/crossconnects/")
        (circuit,) = (await driver.cross_connects()).circuits
        assert (circuit.cross_connect, circuit.state) == (ONE, CircuitState.FAILED)
