"""The driver `calient_rest` and its emulator: the suite, requests counted, curl beside us, failures as they are."""

from curl import curl

from ocs_drivers.conformance import carry_out, connected
from ocs_drivers.model import CircuitChange, CircuitState, Connectivity, CrossConnect
from tests.ocs_drivers.test_calient_rest import ONE, TWO, switch


async def test_what_curl_connects_we_see_and_leave_alone() -> None:
    """Ways in which clients of real switches ask: a form, a list of items, a name for the delete."""
    auth = {"user": "admin", "password": "pxc***"}
    async with switch(auth, **auth) as (driver, _, address):
        root, login = f"http://{address}/rest/crossconnects/", ("-u", "admin:pxc***")
        assert await curl(f"{root}?id=list") == (401, None)
        assert await curl(*login, f"{root}?id=list") == (200, [])
        status, told = await curl(*login, "-d", "id=add&in=1.1.1&out=1.2.1&dir=uni", root)
        assert (status, told[0]["status"]) == (200, "1")
        assert await connected(driver) == {ONE}
        body = '[{"in":"1.1.2","out":"1.2.2","dir":"uni"},{"in":"1.1.3","out":"9.9.9","dir":"uni"}]'
        status, told = await curl(*login, "-d", body, "-H", "Content-Type: application/json", f"{root}?id=badd")
        assert (status, [item["response"]["status"] for item in told]) == (200, ["1", "0"])
        assert await connected(driver) == {ONE, TWO}
        _, rows = await curl(*login, f"{root}?id=list")
        assert [row["half1"]["conn"] for row in rows] == ["1.1.1>1.2.1", "1.1.2>1.2.2"]
        _, told = await curl(*login, "-G", "-X", "DELETE", "--data-urlencode", "conn=1.1.1>1.2.1", root)
        assert told[0]["status"] == "1"
        _, told = await curl(*login, "-G", "-X", "DELETE", "--data-urlencode", "conn=1.1.1>1.2.1", root)
        assert (told[0]["status"], told[0]["description"]) == ("0", "no such connection")
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


async def test_the_password_is_sent_once_and_again_when_the_cookie_is_gone() -> None:
    auth = {"user": "admin", "password": "pxc***"}
    async with switch(auth, **auth) as (driver, emulator, address):
        await carry_out(driver, (ONE,))
        assert emulator._given == 1
        await curl("-u", "admin:pxc***", f"http://{address}/rest/ports/?id=summary")  # one session only: ours is out
        diff = await driver.plan(CircuitChange((TWO,)))
        await curl("-u", "admin:pxc***", f"http://{address}/rest/ports/?id=summary")
        assert (await driver.commit(diff, diff.revision)).done
        assert emulator._given == 5
        assert len(emulator.device.setters) == 2  # what was refused for want of a session was not taken twice


async def test_one_direction_of_both_only_goes_with_the_other() -> None:
    async with switch() as (driver, emulator, address):
        body = '[{"in":"1.1.1","out":"1.2.1","dir":"bi","group":"LAB"}]'
        await curl("-d", body, "-H", "Content-Type: application/json", f"http://{address}/rest/crossconnects/?id=badd")
        pairs = (CrossConnect(1, 9), CrossConnect(9, 1))
        assert await connected(driver) == set(pairs)
        await driver.take_over(pairs)
        result = await carry_out(driver, disconnect=pairs[:1])
        wrong = "1:9 is one direction of 1.1.1-1.2.1, which can only be removed as a whole: name 9:1 too"
        assert wrong in result.items[0].detail
        assert await connected(driver) == set(pairs)
        assert (await carry_out(driver, disconnect=pairs)).done
        assert len(emulator.device.setters) == 2


async def test_half_of_a_connection_is_shown_as_failed() -> None:
    async with switch(dir="bi") as (driver, _, address):
        assert (await driver.facts()).connectivity is Connectivity.ANY_TO_ANY
        await curl("-d", "id=add&in=1.2.1&out=1.1.1&dir=uni", f"http://{address}/rest/crossconnects/")
        (circuit,) = (await driver.cross_connects()).circuits
        assert (circuit.cross_connect, circuit.state) == (ONE, CircuitState.FAILED)
