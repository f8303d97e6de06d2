"""Tests of the HTML report: sections, numbers, charts, and no external resources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from orchestrrl.core.charts import SHORTEST
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.lab.sim.net.fabrics.base import FabricStage
from orchestrrl.lab.sim.report_page import charts
from orchestrrl.lab.sim.report_page.groups import ARMS as ARM_NAMES
from orchestrrl.lab.sim.report_page.groups import ArmGroup, frontier, groups_of
from orchestrrl.lab.sim.report_page.page import page, write
from orchestrrl.lab.sim.rl.model import TimelineSpan
from orchestrrl.lab.sim.rl.results import ClusterResult
from orchestrrl.lab.sim.scenario import ARMS
from orchestrrl.lab.sim.train.stages import WAITS
from tests.orchestrrl.lab.sim.report.results_builder import SCENARIO, bare, result, run, several

SECTIONS = [
    *("summary", "cost", "timeline", "stages", "bandwidth", "remaining", "slack", "staleness", "scenarios"),
]
VOID = {"meta", "line", "link", "img", "br"}
LOADS = {"src", "href", "xlink:href", "data", "action", "srcset"}


@dataclass
class Read(HTMLParser):
    """A parser that collects the contents of a page by section."""

    ids: list[str] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)  # by section, of cells
    rows: dict[str, list[list[str]]] = field(default_factory=dict)
    pictures: dict[str, list[str]] = field(default_factory=dict)  # labels
    titles: dict[str, list[str]] = field(default_factory=dict)  # of shapes
    text: dict[str, str] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)  # external resources
    tags: list[str] = field(default_factory=list)  # open
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def section(self) -> str:
        return self.ids[-1] if self.ids else ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.seen.add(tag)
        self.outside += [value for name, value in values.items() if name in LOADS and not value.startswith("#")]
        if tag == "section":
            self.ids.append(values["id"])
        if "data-value" in values:
            self.values.setdefault(self.section, []).append(float(values["data-value"]))
        if tag == "svg":
            self.pictures.setdefault(self.section, []).append(values["aria-label"])
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        if tag not in VOID:
            self.tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.tags.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text[self.section] = self.text.get(self.section, "") + data
        if self.tags and self.tags[-1] in ("td", "th"):
            self.rows[self.section][-1][-1] += data
        if self.tags and self.tags[-1] == "title":
            self.titles.setdefault(self.section, []).append(data)


def drawn(figure: Figure | None) -> Figure:
    assert figure is not None
    return figure


def bars(figure: Figure | None) -> list[tuple[float, float, str]]:
    """Return (begin, end, colour) of each bar."""
    return [
        (float(bar.get_x()), float(bar.get_x() + bar.get_width()), to_hex(bar.get_facecolor()))
        for bar in drawn(figure).axes[0].patches
        if isinstance(bar, Rectangle)
    ]


def points(figure: Figure | None) -> list[list[tuple[float, float]]]:
    """Return the points of each line."""
    return [[(float(x), float(y)) for x, y in line.get_xydata()] for line in drawn(figure).axes[0].get_lines()]


def read(results: list[ClusterResult]) -> Read:
    found = Read()
    found.feed(page(results))
    found.close()
    assert found.tags == []
    return found


@cache
def read_several() -> Read:
    return read(several())


def test_page_has_all_sections_and_no_external_resources() -> None:
    text, found = page(several()), read_several()
    assert found.ids == SECTIONS
    assert all(f'href="#{name}"' in text for name in SECTIONS)
    assert found.outside == []
    assert not found.seen & {"script", "link", "img", "iframe", "object"}
    assert "http" not in text
    assert "url(" not in text.replace("url(#", "")
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_summary_has_median_throughput_relative_to_the_first() -> None:
    found, results = read_several(), several()
    rates = [median(each.samples_per_s for each in results if each.run.fabric == name) for name in ("rfabric", "rail")]
    header, first, _, last = found.rows["summary"]
    assert header[2:6] == ["samples/s", "minimum over seeds", "maximum over seeds", "relative to the first"]
    assert first == ["rfabric · both", "1, 2", "41.5", "41", "42", "1", "1", "41.5", "25.0%", "12.5%", "12,288"]
    assert last[2] == "51.5"
    assert found.values["summary"][0] == rates[0]
    assert found.values["summary"][3] == 1.0
    assert rates[1] / rates[0] in found.values["summary"]


def test_time_line_has_every_stage_and_fault() -> None:
    found = read([result()])
    assert "gen 1, with version 0: 100 to 210 s, 110 s" in found.titles["timeline"]
    shown = bars(charts.time_line(run(), 300.0))
    assert sorted((begin, end) for begin, end, _ in shown) == sorted((each.begin_s, each.end_s) for each in run().spans)
    assert [(begin, end) for begin, end, colour in shown if colour == to_hex(charts.FAULT_COLOUR)] == [(50.0, 70.0)]


def test_overlapping_faults_have_separate_lanes() -> None:
    def lanes(faults: list[str]) -> list[str]:
        spans = tuple(TimelineSpan("fault", FabricStage.TRAIN, 0, 50.0, 70.0, label) for label in faults)
        figure = drawn(charts.time_line(replace(run(), spans=spans), 300.0))
        return [label.get_text() for label in figure.axes[0].get_yticklabels()]

    assert lanes(["nic 3", "engine 0, 1"]) == ["nic 3", "engine 0, 1"]
    assert lanes([f"nic {number}" for number in range(9)]) == ["faults"]


def test_bandwidth_is_bytes_over_stage_duration() -> None:
    found = read([result()])
    assert [row[:3] for row in found.rows["bandwidth"][1:]] == [
        ["rfabric · both", "training", "NVLink"],
        ["rfabric · both", "training", "server to ToR"],
    ]
    assert found.values["bandwidth"] == [8000.0, 8e12 * 8e-9 / 80.0, 2000.0, 2e12 * 8e-9 / 80.0]
    assert [end for _, end, _ in bars(charts.tiers(groups_of([result()])))] == pytest.approx([800.0, 200.0])


def test_windows_staleness_and_remaining_match_the_run() -> None:
    found = read([result()])
    lengths_ms = [window.length_s * 1e3 for window in run().windows]
    count, *quantiles, longest = found.values["slack"]
    assert (count, longest) == (8, pytest.approx(max(lengths_ms)))
    assert quantiles[1] == pytest.approx(median(lengths_ms))
    (shares,) = points(charts.slack(groups_of([result()])))
    assert shares[0] == (pytest.approx(lengths_ms[0]), 0.0)
    assert shares[1:] == [(pytest.approx(value), 12.5 * place) for place, value in enumerate(lengths_ms, 1)]
    assert found.values["staleness"] == [0.25, 0.75]
    assert points(charts.remaining(groups_of([result()]))) == [list(run().remaining)]


def test_stage_tables_and_charts_have_all_parts() -> None:
    found = read([result()])
    assert found.rows["stages"][1][1:] == ["80", "105", "6.5", "41.0%"]
    parts = {
        "compute: 60 s",
        "bubble: 12 s",
        "dp: 8 s",
        "afd24+16: 70 s",
        "tp8: 40 s",
        "phase A: 4 s",
        "circuits: 0.5 s",
    }
    assert parts <= {title.partition(", ")[2] for title in found.titles["stages"]}
    assert found.rows["stages"][-1][1:] == ["105", "3.25", "40"]
    assert ["", "generation, s", "weight sync, s", "training, s"] in found.rows["stages"]


def test_pareto_frontier_is_marked() -> None:
    """rfabric is the cheapest, rail the fastest; fat_tree is more expensive and slower than rfabric."""
    assert frontier(groups_of(several())) == (True, False, True)
    found = read_several()
    assert [row[1] for row in found.rows["cost"][1:]] == ["yes", "", "yes"]
    dots = drawn(charts.pareto(groups_of(several()))).axes[0].collections
    assert [to_hex(dot.get_edgecolor()[0]) for dot in dots] == ["#000000", "#ffffff", "#000000"]
    assert [to_hex(dot.get_facecolor()[0]) for dot in dots] == [to_hex(f"C{place}") for place in range(3)]
    assert [float(dot.get_offsets()[0][0]) for dot in dots] == [1.0, 3.0, 5.0]
    assert any(title.endswith("samples/s for $3,000,000") for title in found.titles["cost"])
    assert found.values["cost"][0] == 1.0e6
    assert found.values["cost"][3] == several()[0].samples_per_s_per_musd + 0.5  # the median of seeds


def test_equal_groups_are_both_on_the_frontier() -> None:
    same = [result(fabric=fabric) for fabric in ("one", "other")]
    assert frontier(groups_of(same)) == (True, True)
    dearer = replace(same[1], bill=replace(same[1].bill, network_usd=2e6))
    assert frontier(groups_of([same[0], dearer])) == (True, False)


def test_page_has_scenarios_seeds_and_command(tmp_path: Path) -> None:
    found = read_several()
    assert "seeds 1, 2" in found.text["scenarios"]
    assert '"train_gpus": 32' in found.text["scenarios"]
    write([result()], tmp_path / "of" / "page.html", command="orchestrrl sim report out/<it> & more")
    assert "<code>orchestrrl sim report out/&lt;it&gt; &amp; more</code>" in (tmp_path / "of" / "page.html").read_text()


def test_scenarios_of_one_name_get_distinct_labels() -> None:
    other = {**SCENARIO, "model": "qwen3-32b"}
    first, second = groups_of([result(), result(scenario=other)])
    assert [first.title, second.title] == ["model qwen2.5-14b · rfabric · both", "model qwen3-32b · rfabric · both"]


def test_sweep_points_are_named_and_sorted_by_swept_values() -> None:
    def scenario(gbps: float, ratio: int, name: str = "swept") -> dict[str, Any]:
        three = {"kind": "oversubscribed", "options": {"ratio": ratio}}
        return {**SCENARIO, "name": name, "cluster": {"train_gpus": 32, "nic_gbps": gbps}, "fabrics": [three]}

    points = [scenario(400.0, 3), scenario(100.0, 10), scenario(100.0, 2)]
    assert [group.scenario for group in groups_of([result(scenario=each) for each in points])] == [
        "nic_gbps 100, ratio 2",
        "nic_gbps 100, ratio 10",
        "nic_gbps 400, ratio 3",
    ]
    others = [result(scenario=each) for each in (*points, scenario(100.0, 3, "alone"))]
    assert groups_of(others)[0].scenario == "alone"
    assert groups_of(others)[1].scenario == "swept nic_gbps 100, ratio 2"


def test_runs_of_one_scenario_are_merged() -> None:
    """The results are as in a folder that several commands have written to."""

    def of(fabric: str, arm: str, seed: int) -> ClusterResult:
        scenario = {**SCENARIO, "seeds": [seed], "generation": {"arms": [arm]}, "fabrics": [{"kind": fabric}]}
        return result(scenario=scenario, fabric=fabric, arm=arm, seed=seed)

    several = [of("rfabric", "both", 2), of("rfabric", "both", 1), of("rfabric", "both", 1), of("fat_tree", "both", 1)]
    groups = groups_of([*several, of("fat_tree", "planning", 1)])
    assert [(group.title, group.seeds) for group in groups] == [
        ("rfabric · both", (1, 2)),
        ("fat_tree · both", (1,)),
        ("fat_tree · planning", (1,)),
    ]
    assert "4 simulated runs: " in page([*several, of("fat_tree", "planning", 1)])


def test_sweep_points_share_a_chart() -> None:
    def point(gpus: int, name: str, rate: float) -> ClusterResult:
        return result(scenario={**SCENARIO, "name": name, "cluster": {"train_gpus": gpus}}, rate=rate)

    found = read([point(8, "one", 39.0), point(16, "one", 79.0), point(8, "other", 9.0)])
    assert found.pictures["remaining"] == ["remaining requests"] * 2
    assert len(found.titles["remaining"]) == 3
    columns, *rows = found.rows["summary"]
    assert [row[columns.index("relative to the first")] for row in rows] == ["1", "2", "–"]


def test_scenarios_with_long_differences_are_labelled_by_digest() -> None:
    long = {"model": "a model with a name that takes more room than there is beside its bar in a picture"}
    first, second = groups_of([result(), result(scenario={**SCENARIO, **long})])
    assert {len(first.scenario), len(second.scenario)} == {6}


def test_page_omits_unknown_prices() -> None:
    unpriced = [result(0.0), result(0.0, fabric="fat_tree")]
    assert frontier(groups_of(unpriced)) == (False, False)
    found = read(unpriced)
    assert "The results contain no such data." in found.text["cost"]
    assert "network, M$" not in found.rows["summary"][0]
    assert frontier(groups_of([result(0.0), result(2e6, fabric="fat_tree")])) == (False, True)


def test_notes_are_merged_and_steps_exclude_the_warm_up() -> None:
    looped = {**SCENARIO, "loop": {"warmup_steps": 1}}
    found = read([result(scenario=looped), result(scenario=looped, fabric="fat_tree")])
    assert "weight sync to 4 x tp8 (all)" in found.text["summary"]
    assert found.rows["stages"][-1][1:] == ["110", "6.5"]


def test_uniform_fleets_are_named_by_configuration() -> None:
    one = replace(result(), gen_phases_s={"4 x tp2": 3.0, "redeploying": 1.0, "4 x tp2 + 1 x tp8": 2.0})
    (group,) = groups_of([one])
    assert group.gen_phases_s == {"tp2": 3.0, "redeploying": 1.0, "4 x tp2 + 1 x tp8": 2.0}


def test_bars_and_dots_are_always_visible() -> None:
    groups = groups_of([result(), result(fabric="other")])
    widths = [end - begin for begin, end, _ in bars(charts.parts([{"compute": 1e6, "dp": 1e-6}], groups[:1]))]
    assert min(widths) >= 1e6 * SHORTEST
    behind, ahead = (float(dot.get_sizes()[0]) for dot in drawn(charts.pareto(groups)).axes[0].collections)
    assert behind > ahead > 0


def test_parts_of_a_training_step_have_distinct_colours() -> None:
    parts = dict.fromkeys(["log probs", "compute", "bubble", *WAITS, "pp", "dp", "optimizer", "circuits"], 1.0)
    assert len({colour for _, _, colour in bars(charts.parts([parts], groups_of([result()])))}) == len(parts)


@pytest.mark.parametrize("draw", [charts.tiers, charts.remaining, charts.slack, charts.pareto])
def test_charts_stay_inside_their_frame(draw: Callable[[Sequence[ArmGroup]], Figure | None]) -> None:
    names = [f"a fabric of {place} with a name that is long" for place in range(charts.PER_CHART)]
    groups = groups_of([result(fabric=name, rate=40.0 + place) for place, name in enumerate(names)])
    for figure in (drawn(draw(groups)), drawn(charts.parts([group.gen_phases_s for group in groups], groups))):
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert (0 <= box.x0 < box.x1 <= width, 0 <= box.y0 < box.y1 <= height) == (True, True), box
        assert figure.axes[0].get_position().width > 0.5
        assert figure.axes[0].get_position().height > 0.5


def test_every_arm_has_a_description() -> None:
    assert set(ARM_NAMES) == set(ARMS)
    assert "both: OrchestrRL's planner and balancer." in read([result()]).text["summary"]


def test_names_are_escaped() -> None:
    found = read([result(scenario={"name": "<script>alert(1)</script>"}, fabric='"><img src=x>', arm="a & b")])
    assert found.outside == []
    assert '"><img src=x> · a & b' in found.rows["summary"][1]
    assert "<script>alert(1)</script>" in found.text[""]


def test_empty_results_make_a_page_without_data() -> None:
    found = read([bare()])
    assert found.ids == SECTIONS
    for name in ("timeline", "bandwidth", "remaining", "slack", "staleness"):
        assert "The results contain no such data." in found.text[name]
    read([bare(remaining=((0.0, 0),), samples_per_s=0.0), bare(seed=2)])
    read([bare(windows=run().windows[:1], tier_bytes={"train": {"nic": 1.0}})])


def test_write_rejects_missing_results(tmp_path: Path) -> None:
    with pytest.raises(ProblemFaults, match="results: must not be empty"):
        write([], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ProblemFaults, match="cannot be written"):
        write([result()], tmp_path / "file" / "page.html")


def test_many_groups_are_split_into_several_charts() -> None:
    found = read([result(fabric=f"fabric {place}") for place in range(20)])
    assert len(found.pictures["remaining"]) == 3
    assert len(found.titles["remaining"]) == 20
    several = drawn(charts.remaining(groups_of([result(fabric=f"fabric {place}") for place in range(8)])))
    assert len({(line.get_color(), line.get_linestyle()) for line in several.axes[0].get_lines()}) == 8
