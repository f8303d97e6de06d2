"""Charts as figures, files and elements of a page."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from orchestrrl.core.charts import ChartBar, ChartLine, add_legend, add_stairs, axes, bar_chart, inline_svg, save

BARS = [ChartBar(0, 0.0, 2.0, "C0", "first <it> & more", "2 s"), ChartBar(1, 2.0, 2.0 + 1e-9, "C1", "second")]


def chart() -> Figure:
    figure = bar_chart(BARS, {0: "one", 1: "a name that is so long that it takes more than one line"}, "seconds")
    add_legend(figure, {"blue": "C0", "orange": "C1"})
    return figure


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_equal_data_gives_equal_files(kind: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(chart(), tmp_path / f"{name}.{kind}")
    one, two = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
    assert one == two
    assert b"dc:date" not in one
    assert b"CreationDate" not in one
    save(chart(), tmp_path / "three", kind=kind)
    assert (tmp_path / "three").read_bytes() == one


def test_unknown_format_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exe"):
        save(chart(), tmp_path / "chart.exe")


def test_inline_svg_has_tooltips_and_no_external_references() -> None:
    text = inline_svg(chart(), 'a "title"')
    assert text == inline_svg(chart(), 'a "title"')
    assert "http" not in text
    root = ElementTree.fromstring(text)
    assert (root.tag, root.attrib["aria-label"]) == ("svg", 'a "title"')
    assert [each.text for each in root.iter("title")] == ["first <it> & more", "second"]
    assert "one" in [each.text for each in root.iter("text")]


def test_ids_of_two_inline_svgs_differ() -> None:
    one, two = (
        {each.attrib["id"] for each in ElementTree.fromstring(inline_svg(chart(), name)).iter() if "id" in each.attrib}
        for name in ("one", "two")
    )
    assert one
    assert not one & two


def test_short_bars_are_widened_and_names_wrapped() -> None:
    axis = chart().axes[0]
    assert [bar.get_width() for bar in axis.containers[0]] == [2.0, pytest.approx(0.004)]
    assert "\n" in axis.get_yticklabels()[1].get_text()
    assert axis.get_ylim()[0] > axis.get_ylim()[1]


def test_dollar_signs_in_names_are_literal() -> None:
    figure = bar_chart(BARS[:1], {0: "$a^$"}, "seconds")
    add_legend(figure, {"$b_$": "C0"})
    texts = [each.text for each in ElementTree.fromstring(inline_svg(figure, "$")).iter("text")]
    assert {"$a^$", "$b_$"} <= set(texts)


def test_empty_lines_keep_their_colours() -> None:
    figure, [[axis]] = axes()
    add_stairs(axis, [ChartLine("none", ()), ChartLine("one", ((0.0, 2.0), (1.0, 0.0)))])
    add_legend(figure)
    (line,) = axis.get_lines()
    assert (line.get_color(), line.get_linestyle(), line.get_label()) == ("C1", "--", "one")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one"]


def test_legend_without_entries_is_omitted() -> None:
    figure, _ = axes()
    add_legend(figure)
    assert figure.legends == []
