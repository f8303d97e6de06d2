"""A site's file: every fault at once, checked against an oracle that implements the rules independently."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrrl.core.documents import parse_yaml
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.site import parse_site, read_site, site_document, site_from, site_text
from orchestrrl.fabric.site_parts import numbers_in, numbers_text
from planner.fabric.generate import ImpossibleSite, SiteShape, regular_site
from planner.fabric.topology import DEVICES, SwitchModel

EXAMPLE = Path(__file__).parents[3] / "deploy" / "examples" / "site.yaml"
RADIX = {name: device.ports for name, device in DEVICES.items()}

Document = dict[str, Any]


def example() -> Document:
    document: Document = parse_yaml(EXAMPLE.read_text())
    return document


def faults(document: Any) -> list[str]:
    try:
        site_from(document)
    except ProblemFaults as error:
        return error.faults
    return []


def switch(document: Document, name: str) -> Document:
    return next(each for each in document["switches"] if each["id"] == name)


def test_example_site_is_valid() -> None:
    site = read_site(EXAMPLE)
    assert len(site.server_of) == 32
    assert len(site.lanes) == 16


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ProblemFaults, match="No such file"):
        read_site(tmp_path / "nowhere.yaml")


def edit(*path: str | int, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        at: Any = document
        for part in path[:-1]:
            at = at[part]
        if value is None:
            del at[path[-1]]
        else:
            at[path[-1]] = value

    return change


CORE = 4  # the index of core0 among the switches
FAULTS = {
    "a port of two endpoints": (
        edit("switches", 0, "ports", "train0/r1", value="4-7"),
        ["switches[0].ports.train0/r1: port 4 of train0/agg0 has a fibre to train0/r0 already, got '4-7'"],
    ),
    "a port listed twice": (
        edit("switches", 0, "ports", "train0/r1", value="5,5-7"),
        ["switches[0].ports.train0/r1: port 5 of train0/agg0 has a fibre to train0/r1 already, got '5,5-7'"],
    ),
    "a port beyond the switch": (
        edit("switches", 0, "ports", "train0/r1", value="577"),
        ["switches[0].ports.train0/r1: must be within 1..576, the ports of a piezo_polatis, got '577'"],
    ),
    "port 0": (
        edit("switches", 0, "ports", "train0/r1", value=0),
        ["switches[0].ports.train0/r1: must be within 1..576, the ports of a piezo_polatis, got '0'"],
    ),
    "an endpoint that is not there": (
        edit("switches", 0, "ports", "train0/r7", value=20),
        ["switches[0].ports: must be one of tors or uplinks, got 'train0/r7'"],
    ),
    "a PoD in the place of an uplink": (
        edit("switches", CORE, "ports", "gen0", value=20),
        ["switches[4].ports: must be a ToR or an uplink, not a PoD, got 'gen0'"],
    ),
    "a ToR in the core": (
        edit("switches", CORE, "ports", "gen0/r0", value=20),
        ["switches[4].ports: must be an uplink, as ToRs have no fibres to the core, got 'gen0/r0'"],
    ),
    "an endpoint of another PoD": (
        edit("switches", 0, "ports", "gen0/r0", value=20),
        ["switches[0].ports: must be in PoD train0, not in gen0, got 'gen0/r0'"],
    ),
    "an unknown device": (
        edit("switches", 0, "device", value="mirrors"),
        [
            "switches[0].device: must be one of devices or a built-in device (known: liquid_crystal_coherent,"
            " mems_3d_calient, piezo_polatis, robotic_telescent, rotornet_infocus), got 'mirrors'"
        ],
    ),
    "a device of another's name": (
        edit("devices", value={"piezo_polatis": {"reconfiguration_s": 1.0, "ports": 4}}),
        ["devices.piezo_polatis: must not redefine a built-in device, which has 576 ports, got 4 ports"],
    ),
    "a device that cannot be": (
        edit("devices", value={"odd": {"reconfiguration_s": -1.0, "ports": 1}}),
        [
            "devices.odd.reconfiguration_s: must be > 0 and <= 3600, got -1.0",
            "devices.odd.ports: must be >= 2 and <= 1048576, got 1",
        ],
    ),
    "rates that make no sense": (
        edit("link_gbps", value=0),
        ["link_gbps: must be > 0 and <= 10000, got 0"],
    ),
    "a missing far end": (
        edit("switches", CORE, "ports", "gen1/up0", value="13,14,16"),
        [
            "uplinks[3]: must have as many fibres in its PoD as in the core (gen1/agg0:12 have no far end),"
            " got 4 and 3 ('gen1/up0')"
        ],
    ),
    "a missing near end": (
        edit("switches", 3, "ports", "gen1/up0", value="9-11"),
        [
            "uplinks[3]: must have as many fibres in its PoD as in the core (core0:16 have no far end),"
            " got 3 and 4 ('gen1/up0')"
        ],
    ),
    "a ToR that nothing reaches": (
        edit("switches", 0, "ports", "train0/r1", value=None),
        ["tors[1]: must have a fibre to a switch of its PoD train0, got none ('train0/r1')"],
    ),
    "an uplink without fibres": (
        edit("uplinks", 4, value={"id": "gen1/up1", "pod": "gen1"}),
        ["uplinks[4]: must have fibres, got none ('gen1/up1')"],
    ),
    "a server on another PoD's ToR": (
        edit("servers", 0, "tors", 1, value="gen0/r1"),
        ["servers[0].tors[1]: must be a ToR of PoD train0, not of gen0, got 'gen0/r1'"],
    ),
    "a ToR that is not there": (
        edit("servers", 0, "tors", 1, value="train0/r9"),
        ["servers[0].tors[1]: must be one of tors, got 'train0/r9'"],
    ),
    "a NIC on the wrong rail": (
        edit("servers", 0, "tors", 1, value="train0/r0"),
        ["servers[0].tors[1]: must be at index 0, as a ToR of rail 0, got 'train0/r0'"],
    ),
    "a GPU in two servers": (
        edit("servers", 1, "gpus", value="1-2"),
        ["servers[1].gpus: GPU 1 is in servers[0] already, got '1-2'"],
    ),
    "GPUs of two servers": (
        edit("servers", 1, "gpus", value="0-1"),
        ["servers[1].gpus: GPU 0-1 is in servers[0] already, got '0-1'"],
    ),
    "GPUs that NICs cannot share": (
        edit("servers", 15, "gpus", value="30-32"),
        ["servers[15].gpus: must divide evenly among 2 NICs (one per entry of tors), got 3 GPUs"],
    ),
    "an id of two endpoints": (
        edit("pods", 4, value={"id": "gen1/up0", "role": "gen"}),
        [
            "uplinks[3].id: must be unique, and pods[4].id uses it already, got 'gen1/up0'",
            "pods[4]: must have a ToR, got none ('gen1/up0')",
            "pods[4]: must have an uplink with fibres to the core, got none ('gen1/up0')",
        ],
    ),
    "an unknown PoD": (
        edit("servers", 0, "pod", value="train7"),
        ["servers[0].pod: must be one of pods, got 'train7'"],
    ),
    "a PoD's switch without its PoD": (
        edit("switches", 0, "pod", value=None),
        ["switches[0].pod: must be set for a switch of tier agg, got nothing"],
    ),
    "a PoD for the core": (
        edit("switches", CORE, "pod", value="gen0"),
        ["switches[4].pod: must not be set for a switch of tier core, got 'gen0'"],
    ),
    "a reserved port without a fibre": (
        edit("reserved", 0, "ports", value="4,8,12,16-17"),
        ["reserved[0].ports: port 17 of core0 has no fibre, got '4,8,12,16-17'"],
    ),
    "a reserved port outside of the core": (
        edit("reserved", 0, "switch", value="gen0/agg0"),
        ["reserved[0].switch: must be a core switch, got 'gen0/agg0' (tier agg)"],
    ),
    "a reserved port of no switch": (
        edit("reserved", 0, "switch", value="core7"),
        ["reserved[0].switch: must be one of switches, got 'core7'"],
    ),
    "reserved ports that make no circuit": (
        edit("reserved", 0, "ports", value="4,8,12"),
        ["reserved[0].ports: must have as many ports of train PoDs as of gen PoDs on core0 for responses, got 2 and 1"],
    ),
    "reserved ports of one PoD": (
        edit("reserved", 0, value={"purpose": "probes", "switch": "core0", "ports": "1-3,5"}),
        ["reserved[0].ports: must not be mostly of one PoD on core0 for probes, got 3 of 4 ports of 'train0'"],
    ),
    "ports reserved twice": (
        edit("reserved", 1, value={"purpose": "probes", "switch": "core0", "ports": "1,5,4"}),
        ["reserved[1].ports: port 4 is reserved already by reserved[0], got '1,5,4'"],
    ),
    "an unknown field": (
        edit("switches", 0, "colour", value="red"),
        ["switches[0].colour: is not a known field, got 'red'"],
    ),
    "ports that are no numbers": (
        edit("switches", 0, "ports", "train0/r1", value="5-"),
        ["switches[0].ports.train0/r1: must be numbers and ascending ranges up to 1048576, such as '1-4,9', got '5-'"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_single_fault_is_reported_once_with_its_path(name: str) -> None:
    change, expected = FAULTS[name]
    document = example()
    for each in ("uplinks", "pods", "reserved"):  # an index one beyond the end adds an element
        document[each].append(None)
    change(document)
    for each in ("uplinks", "pods", "reserved"):
        document[each] = [part for part in document[each] if part is not None]
    assert faults(document) == expected


def test_all_faults_are_reported_even_with_unreadable_values() -> None:
    document = example()
    edit("nic_gbps", value="fast")(document)
    edit("servers", 0, "gpus", value="none")(document)
    edit("servers", 2, "gpus", value="2-3")(document)
    edit("tors", 7, "rail", value=-1)(document)
    edit("switches", 0, "ports", "train0/r1", value="4-7")(document)
    edit("reserved", 0, "ports", value="4,8,12,17")(document)
    expected = faults(document)
    assert [fault.partition(":")[0] for fault in expected] == [
        "nic_gbps",
        "tors[7].rail",
        "servers[0].gpus",
        "servers[2].gpus",
        "switches[0].ports.train0/r1",
        "reserved[0].ports",
    ]


@pytest.mark.parametrize("field", ["pods", "tors", "servers", "switches"])
def test_consequences_of_unreadable_list_are_not_reported(field: str) -> None:
    document = example()
    document[field] = "all of them"
    assert len(faults(document)) == 1


@pytest.mark.parametrize("text", ["", "[]", "a: [", "link_gbps: 1\nlink_gbps: 2", "{1: 2}", "null", "[" * 3000])
def test_non_site_document_is_rejected(text: str) -> None:
    with pytest.raises(ProblemFaults):
        parse_site(text)


def test_one_pod_needs_no_core() -> None:
    site = regular_site(SiteShape(train_pods=1, gen_pods=0, servers_per_pod=2))
    assert not site.core_switches
    assert parse_site(site_text(site)) == site


# An oracle that determines whether there is any fault by counting, from the document alone.


def is_sound(document: Document) -> bool:
    pods = {pod["id"]: pod["role"] for pod in document["pods"]}
    tors = {tor["id"]: tor for tor in document["tors"]}
    uplinks = {uplink["id"]: uplink["pod"] for uplink in document["uplinks"]}
    ends = [*pods, *tors, *uplinks]
    switches = {each["id"]: each for each in document["switches"]}
    gpus = [gpu for server in document["servers"] for gpu in numbers_in(server["gpus"])]
    rules = [
        len(set(ends)) == len(document["pods"]) + len(document["tors"]) + len(document["uplinks"]),
        len(switches) == len(document["switches"]),
        len({server["id"] for server in document["servers"]}) == len(document["servers"]),
        len(set(gpus)) == len(gpus),
        {tor["pod"] for tor in tors.values()} == set(pods),
        set(uplinks.values()) == set(pods),
    ]
    for server in document["servers"]:
        rules += [tors.get(tor, {}).get("pod") == server["pod"] for tor in server["tors"]]
        rules += [tors.get(tor, {}).get("rail") == nic for nic, tor in enumerate(server["tors"])]
        few, many = sorted((len(numbers_in(server["gpus"])), len(server["tors"])))
        rules.append(many % few == 0)
    fibres = Counter[tuple[str, str]]()
    for each in document["switches"]:
        ports = [port for text in each["ports"].values() for port in numbers_in(text)]
        rules.append(len(set(ports)) == len(ports) and set(ports) <= set(range(1, RADIX[each["device"]] + 1)))
        for end, text in each["ports"].items():
            fibres[each["tier"], end] += len(numbers_in(text))
            home = uplinks.get(end) or tors.get(end, {}).get("pod")
            rules.append(home == each["pod"] if each["tier"] == "agg" else end in uplinks)
    rules += [fibres["agg", tor] > 0 for tor in tors]
    rules += [fibres["agg", uplink] == fibres["core", uplink] > 0 for uplink in uplinks]
    for kept in document["reserved"]:
        core = switches.get(kept["switch"], {"tier": "agg"})
        rules.append(core["tier"] == "core")
        owner = {port: uplinks.get(end) for end, text in core.get("ports", {}).items() for port in numbers_in(text)}
        ports = numbers_in(kept["ports"])
        roles = Counter(pods.get(owner.get(port)) for port in ports)
        rules += [len(set(ports)) == len(ports), roles["train"] == roles["gen"], not set(roles) - {"train", "gen"}]
    return all(rules)


ENDS = [*(f"{pod}/{end}" for pod in ("train0", "train1", "gen0", "gen1") for end in ("r0", "r1", "up0"))]
PORTS = st.sampled_from(["1-4", "5-8", "9-12", "13-16", "17-20", "21", "9-11", "573-576", "575-578", "4"])
PLACES = st.integers(0, 3)
EDITS = st.one_of(
    st.builds(
        lambda at, end, ports: edit("switches", at, "ports", end, value=ports),
        st.integers(0, 4),
        st.sampled_from(ENDS),
        PORTS,
    ),
    st.builds(
        lambda at, nic, end: edit("servers", at, "tors", nic, value=end),
        st.integers(0, 15),
        st.integers(0, 1),
        st.sampled_from(ENDS),
    ),
    st.builds(
        lambda at, gpus: edit("servers", at, "gpus", value=gpus),
        st.integers(0, 15),
        st.sampled_from(["0-1", "40-41", "50", "60-63"]),
    ),
    st.builds(lambda at, rail: edit("tors", at, "rail", value=rail), st.integers(0, 7), st.integers(0, 2)),
    st.builds(
        lambda at, pod: edit("tors", at, "pod", value=pod), st.integers(0, 7), st.sampled_from(["train0", "gen1"])
    ),
    st.builds(lambda at, end: edit("tors", at, "id", value=end), st.integers(0, 7), st.sampled_from(ENDS)),
    st.builds(
        lambda at, device: edit("switches", at, "device", value=device),
        st.integers(0, 4),
        st.sampled_from(sorted(RADIX)),
    ),
    st.builds(
        lambda ports: edit("reserved", 0, "ports", value=ports),
        st.sampled_from(["1,5", "1,9", "2,6,10,14", "4,8,16", "1-16", "3,3"]),
    ),
    st.builds(lambda at, role: edit("pods", at, "role", value=role), PLACES, st.sampled_from(["train", "gen"])),
)


@given(st.lists(EDITS, max_size=3))
def test_document_is_rejected_exactly_if_a_rule_is_broken(changes: list[Callable[[Document], None]]) -> None:
    document = copy.deepcopy(SOUND)
    for change in changes:
        change(document)
    assert bool(faults(document)) == (not is_sound(document))


SOUND = example()
ANY = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


@given(st.data())
def test_arbitrary_values_cause_only_faults(data: st.DataObject) -> None:
    document = copy.deepcopy(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        at: Any = document
        while True:
            keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = data.draw(st.sampled_from(keys))
            if not isinstance(at[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
                at[key] = data.draw(ANY)
                break
            at = at[key]
    for fault in faults(document):
        assert ": " in fault
        assert "\n" not in fault


SHAPES = st.builds(
    dict,
    train_pods=st.integers(0, 3),
    gen_pods=st.integers(0, 12),
    servers_per_pod=st.integers(1, 6),
    gpus_per_server=st.sampled_from([1, 2, 8]),
    nics_per_server=st.sampled_from([1, 2, 4]),
    rails=st.none() | st.sampled_from([1, 2]),
    servers_per_tor=st.none() | st.integers(1, 3),
    tor_uplinks=st.none() | st.integers(1, 6),
    uplinks_per_pod=st.integers(1, 2),
    core_lanes=st.none() | st.integers(1, 12),
    response_lanes=st.none() | st.integers(0, 2),
    link_gbps=st.sampled_from([100.0, 212.5]),
    agg_device=st.sampled_from([SwitchModel("lab", 0.012, 48), DEVICES["piezo_polatis"]]),
    core_device=st.sampled_from([SwitchModel("yes", 1e-5, 32), DEVICES["rotornet_infocus"]]),
    core_switches=st.none() | st.integers(1, 12),
)


@given(SHAPES)
def test_generated_sites_are_valid_and_round_trip(shape: dict[str, Any]) -> None:
    try:
        site = regular_site(SiteShape(**shape))
    except ImpossibleSite:
        return
    assert parse_site(site_text(site)) == site
    assert faults(site_document(site)) == []


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_compact_ranges_keep_numbers_and_order(numbers: list[int]) -> None:
    assert list(numbers_in(numbers_text(numbers))) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-2-3", "1.5", "٣", "1-99999999", "9" * 5000])
def test_invalid_ranges_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be numbers"):
        numbers_in(text)
