"""`orchestrrl fabric check`, `show` and `generate`, as a network engineer uses them."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.main import application
from orchestrrl.fabric.pictures import site_figure
from orchestrrl.fabric.site import read_site
from planner.fabric.generate import SiteShape, regular_site

EXAMPLE = Path(__file__).parents[3] / "deploy" / "examples" / "site.yaml"


def fabric(*words: object) -> Any:
    return CliRunner().invoke(application(), ["fabric", *map(str, words)])


def generated(folder: Path, *words: object) -> Path:
    file = folder / "site.yaml"
    done = fabric("generate", *words, "-o", file)
    assert done.exit_code == 0, done.stderr
    return file


def test_check_summarizes_a_valid_site() -> None:
    done = fabric("check", EXAMPLE)
    assert done.exit_code == 0
    assert "2 train and 2 gen PoDs with 16 servers and 32 GPUs" in done.stdout
    assert re.search(r"gen1 +gen +4 +8 +2 +4 +1\.6 +1\.6 \(1:1\) +0\.8 \(2:1\)", done.stdout)
    assert re.search(r"core0 +core +piezo_polatis +25 ms +576 +4 +560", done.stdout)
    assert "warning" not in done.stdout


def test_check_prints_the_summary_as_json() -> None:
    found = json.loads(fabric("check", EXAMPLE, "--json").stdout)
    assert found["gpus"] == 32
    assert found["pods"][3]["uplink_oversubscription"] == 2.0
    assert found["switches"][4]["spare"] == 560
    assert found["warnings"] == []


def test_check_prints_all_errors_on_standard_error(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    text = EXAMPLE.read_text().replace('gen1/up0: "13-16"', 'gen1/up0: "12-14"').replace('gpus: "2-3"', 'gpus: "1-2"')
    file.write_text(text)
    for verb in (("check",), ("check", "--json"), ("show",)):
        done = fabric(verb[0], file, *verb[1:])
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.splitlines() == [
            "servers[1].gpus: GPU 1 is in servers[0] already, got '1-2'",
            "switches[4].ports.gen1/up0: port 12 of core0 has a fibre to gen0/up0 already, got '12-14'",
            "uplinks[3]: must have as many fibres in its PoD as in the core (gen1/agg0:12 have no far end),"
            " got 4 and 3 ('gen1/up0')",
            "reserved[0].ports: port 16 of core0 has no fibre, got '4,8,12,16'",
        ]


def test_check_prints_warnings(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    text = text.replace('gen0/r0: "1-4"', 'gen0/r0: "1"').split("reserved:")[0]
    text += "  - {id: core1, tier: core, device: piezo_polatis, ports: {}}\n"
    file = tmp_path / "site.yaml"
    file.write_text(text)
    done = fabric("check", file)
    assert done.exit_code == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("warning")] == [
        "warning: gen0: ToRs have more capacity to hosts than upwards; worst: gen0/r0 4 times",
        "warning: core1: cannot form a circuit, as it has fibres of 0 endpoints",
        "warning: no lane is reserved for responses from gen0, gen1",
    ]


def test_check_warns_about_endpoints_that_circuits_cannot_join(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace('train0/r1: "5-8", ', "").split("reserved:")[0]
    text = text.replace(', gen0/up0: "9-12", gen1/up0: "13-16"', "")
    text += '  - {id: train0/agg1, tier: agg, pod: train0, device: piezo_polatis, ports: {train0/r1: "1-4"}}\n'
    text += '  - {id: core1, tier: core, device: piezo_polatis, ports: {gen0/up0: "1-4", gen1/up0: "5-8"}}\n'
    file = tmp_path / "site.yaml"
    file.write_text(text)
    warnings = json.loads(fabric("check", file, "--json").stdout)["warnings"]
    assert "train0: no switch has fibres of both train0/r0 and train0/r1, so no circuit can connect them" in warnings
    assert "core: no switch has fibres of both gen0 and train0, so no circuit can connect them" in warnings


def test_drawing_of_a_small_site() -> None:
    done = fabric("show", EXAMPLE)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 train and 2 gen PoDs")
    assert "core: 4 uplinks with 16 lanes" in lines
    assert "gen0, gen1 (gen): 4 servers each, GPUs 16-31, 4 lanes to the core each" in lines
    (agg, _) = [line for line in lines if line.startswith("  agg0")]
    assert re.fullmatch(r"  agg0 ═+ 4 ═+ 4 ═+ 4 ═+   12 of 576 ports \(piezo_polatis, 25 ms\)", agg)
    (core,) = [line for line in lines if line.startswith("  core0")]
    assert core.count("═ 4 ═") == 4
    assert "16 of 576 ports, 4 reserved" in core
    names = lines[lines.index(core) - 2]
    assert [names.index(pod) for pod in ("train0", "train1", "gen0", "gen1")] == sorted(
        names.index(pod) for pod in ("train0", "train1", "gen0", "gen1")
    )


def test_large_site_is_drawn_on_one_page(tmp_path: Path) -> None:
    file = generated(tmp_path, "--train-pods", 24, "--gen-pods", 40, "--servers-per-pod", 32)
    done = fabric("show", file)
    assert done.exit_code == 0
    assert "16,384 GPUs" in done.stdout
    assert len(done.stdout.splitlines()) < 40
    assert max(map(len, done.stdout.splitlines())) < 160
    assert "gen00 ... gen39 (40) (gen): 32 servers each, GPUs 6144-16383, 128 lanes to the core each" in done.stdout
    done = fabric("check", file)
    assert "train00/agg0 ... gen39/agg0 (64)" in done.stdout


def test_drawing_as_json() -> None:
    found = json.loads(fabric("show", EXAMPLE, "--json").stdout)
    assert found["core"]["lanes"] == 16
    train, gen = found["pods"]
    assert (train["pods"], gen["pods"]) == (["train0", "train1"], ["gen0", "gen1"])
    assert [each["kind"] for each in gen["endpoints"]] == ["tor", "tor", "uplink"]


def test_picture_is_valid_svg_and_deterministic(tmp_path: Path) -> None:
    """The picture in docs/ also shows the example site."""
    picture = tmp_path / "site.svg"
    assert fabric("show", EXAMPLE, "--svg", picture).exit_code == 0
    text = picture.read_text()
    root = ElementTree.fromstring(text)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in ("train0", "gen1", "core0", "agg0", "r0", "r1", "up0"):
        assert name in texts
    assert text == (EXAMPLE.parents[2] / "docs" / "site.svg").read_text()


def test_example_site_can_be_generated() -> None:
    shape = SiteShape(train_pods=2, gen_pods=2, servers_per_pod=4, gpus_per_server=2, nics_per_server=2)
    assert regular_site(shape) == read_site(EXAMPLE)


def test_drawing_counts_fibres_per_endpoint_and_switch() -> None:
    core, train0, *_, gen1 = site_figure(read_site(EXAMPLE)).axes
    assert [label.get_text() for label in core.get_xticklabels()] == ["train0", "train1", "gen0", "gen1"]
    assert [label.get_text() for label in core.get_yticklabels()] == ["core0\n16/576, 4 kept"]
    assert [label.get_text() for label in gen1.get_xticklabels()] == ["r0\n4 NICs", "r1\n4 NICs"]
    assert [(text.get_position(), text.get_text()) for text in train0.texts] == [
        ((0, 0), "4"),
        ((1, 0), "4"),
        ((2, 0), "4"),
        ((2, -0.8), "up0"),
    ]


@pytest.mark.parametrize("pods", [1, 2, 30])
def test_pictures_stay_inside_their_frame(pods: int) -> None:
    figure = site_figure(regular_site(SiteShape(train_pods=1, gen_pods=pods - 1, servers_per_pod=40)))
    figure.draw_without_rendering()
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert width < 35
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height


def test_unwritable_picture_is_reported(tmp_path: Path) -> None:
    done = fabric("show", EXAMPLE, "--svg", tmp_path / "nowhere" / "site.svg")
    assert done.exit_code == 1
    assert "No such file" in done.stderr


def test_generate_with_a_custom_device(tmp_path: Path) -> None:
    file = generated(
        tmp_path, "--train-pods", 2, "--gen-pods", 4, "--servers-per-pod", 8, "--gpus-per-server", 8,
        "--nics-per-server", 8, "--rails", 8, "--tor-uplinks", 16, "--core-lanes", 24, "--device", "lab:128:0.012",
        "--core-device", "mems_3d_calient", "--link-gbps", 400, "--agg-switches", 2,
    )  # fmt: skip
    found = json.loads(fabric("check", file, "--json").stdout)
    assert {pod["lanes"] for pod in found["pods"]} == {24}
    assert {pod["tor_oversubscription"] for pod in found["pods"]} == {0.25}
    assert [each["id"] for each in found["switches"]][-3:] == ["gen3/agg0", "gen3/agg1", "core0"]
    assert {(each["device"], each["ports"]) for each in found["switches"]} == {("lab", 128), ("mems_3d_calient", 320)}


def test_site_generated_as_json_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "site.json"
    file.write_text(fabric("generate", "--gen-pods", 2, "--json").stdout)
    assert len(read_site(file).pods) == 3


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--rails", 3], ["--rails: must divide the 8 NICs of a server, got 3"]),
        (
            ["--device", "lab:8", "--core-device", "x"],
            [
                "--device: must be NAME:PORTS:RECONFIGURATION_S, such as lab:64:0.012, got 'lab:8'",
                "--core-device: must be one of rotornet_infocus, mems_3d_calient, piezo_polatis,"
                " liquid_crystal_coherent, robotic_telescent, or NAME:PORTS:RECONFIGURATION_S, got 'x'",
            ],
        ),
        (
            ["--device", "lab:8:1", "--core-device", "piezo_polatis"],
            [
                "--device: must have more ports for the 8 ToRs and 1 uplink of a PoD: even over 8 switches one needs"
                " 12; take fewer --servers-per-pod, more --servers-per-tor or another device, got lab (8 ports)"
            ],
        ),
        (
            ["--device", "piezo_polatis:8:1"],
            [
                "--device: must not have the name piezo_polatis, which is the name of a known device with 576 "
                "ports, got 'piezo_polatis:8:1'"
            ],
        ),
        (
            ["--train-pods", -1, "--servers-per-pod", 0],
            [
                "--train-pods: must be >= 0 and <= 1048576, got -1",
                "--servers-per-pod: must be >= 1 and <= 1048576, got 0",
            ],
        ),
    ],
)
def test_impossible_site_is_reported_with_flags(words: list[object], shown: list[str]) -> None:
    done = fabric("generate", *words)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == shown
