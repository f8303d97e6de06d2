"""Check the contract of `sync plan` clause by clause on its JSON alone: what a plan does, and whether that is
allowed."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
Span = tuple[int, int]  # first and last byte of a shard's range
ROUNDING = 1e-6


def check(problem: Document, answer: Document) -> None:
    """Raise AssertionError that names the violated clause."""
    checking = _Checking(problem)
    total_s = 0.0
    for number, wave in enumerate(answer["waves"]):
        assert wave["wave"] == number
        seconds = checking.wave(wave["edges"])
        assert abs(seconds - wave["seconds"]) <= ROUNDING * seconds, f"wave {number} takes {seconds} s"
        total_s += seconds
    checking.delivered()
    assert abs(total_s - answer["estimate_s"]) <= ROUNDING * total_s
    assert answer["lower_bound_s"] <= answer["estimate_s"] * (1 + ROUNDING)
    assert answer["lower_bound_s"] <= answer["naive_s"] * (1 + ROUNDING)


@dataclass
class _Checking:
    problem: Document

    def __post_init__(self) -> None:
        self.ends = {end["id"]: end for end in self.problem["endpoints"]}
        self.shards = {shard["id"]: shard for shard in self.problem["shards"]}
        self.held: dict[tuple[str, str], list[Span]] = defaultdict(list)  # at the start of the wave
        self.received: dict[tuple[str, str], list[Span]] = defaultdict(list)
        self.seeded: dict[tuple[str, str], list[tuple[Span, str]]] = defaultdict(list)  # into a pod from outside
        for shard in self.shards.values():
            for holder in shard["holders"]:
                self.held[shard["id"], holder].append((0, shard["bytes"]))

    def wave(self, edges: list[Document]) -> float:
        """Return the wave's seconds."""
        for edge in edges:
            self._edge(edge)
        self._capacities(edges)
        depths = _Depths(self.held, edges)
        seconds = max(self._seconds(edge, depths.of(number)) for number, edge in enumerate(edges))
        for edge in edges:
            key = edge["shard"], edge["dst"]
            self.held[key].append(_span(edge))
            self.received[key].append(_span(edge))
            pod = self.ends[edge["dst"]]["pod"]
            if edge["phase"] == "A":
                self.seeded[edge["shard"], pod].append((_span(edge), edge["dst"]))
        return seconds

    def delivered(self) -> None:
        """Check that every byte reaches every receiver exactly once, and few receivers from outside the pod."""
        for shard in self.shards.values():
            for receiver in set(shard["receivers"]) - set(shard["holders"]):
                at = 0
                for start, end in sorted(self.received.pop((shard["id"], receiver), [])):
                    assert start == at, f"{receiver} gets {shard['id']} twice or not at {at}"
                    at = end
                assert at == shard["bytes"], f"{receiver} lacks {shard['id']} from {at}"
        assert not self.received, f"unwanted bytes received: {list(self.received)}"
        for key, seeds in self.seeded.items():
            for (start, _), _ in seeds:
                there = {dst for span, dst in seeds if span[0] <= start < span[1]}
                assert len(there) <= self.problem["seeds_per_pod"], f"{key} has seeds {there}"

    def _edge(self, edge: Document) -> None:
        assert edge["bytes"] > 0
        assert edge["rate_gbps"] > 0
        assert edge["offset"] >= 0
        assert edge["offset"] + edge["bytes"] <= self.shards[edge["shard"]]["bytes"]
        if self.ends[edge["src"]]["pod"] == self.ends[edge["dst"]]["pod"]:
            assert (edge["phase"], edge["circuits"]) == ("B", 0)
        else:
            assert edge["phase"] == "A"
            assert edge["circuits"] >= 1
            assert edge["rate_gbps"] <= edge["circuits"] * self._circuit_gbps(edge) * (1 + ROUNDING)

    def _circuit_gbps(self, edge: Document) -> float:
        """Return the rate of a circuit. If links are given, there are no others."""
        if self.problem.get("links") is None:
            return float(self.problem["link_gbps"])
        return float(self._link(edge)["gbps"])

    def _link(self, edge: Document) -> Document:
        pods = {self.ends[edge[end]]["pod"] for end in ("src", "dst")}
        found = [link for link in self.problem["links"] if {link["a"], link["b"]} == pods]
        assert found, f"no link joins {pods}"
        return dict(found[0])

    def _capacities(self, edges: list[Document]) -> None:
        circuits: dict[str, int] = defaultdict(int)
        linked: dict[tuple[str, str], int] = defaultdict(int)
        rates: dict[tuple[str, str], float] = defaultdict(float)
        for edge in edges:
            src, dst, rate = self.ends[edge["src"]], self.ends[edge["dst"]], edge["rate_gbps"]
            rates["out of endpoint", src["id"]] += rate
            rates["into endpoint", dst["id"]] += rate
            if src["pod"] != dst["pod"]:
                circuits[src["pod"]] += edge["circuits"]
                circuits[dst["pod"]] += edge["circuits"]
                if self.problem.get("links") is not None:
                    one_way = src["pod"], dst["pod"]
                    linked[one_way] += edge["circuits"]
                    assert linked[one_way] <= self._link(edge)["circuits"], f"{linked[one_way]} circuits {one_way}"
            if src["tor"] != dst["tor"]:
                rates["out of ToR", src["tor"]] += rate
                rates["into ToR", dst["tor"]] += rate
        for pod in self.problem["pods"]:
            assert circuits[pod["id"]] <= pod["boundary_circuits"], f"{pod['id']} has {circuits[pod['id']]} circuits"
        for (kind, name), rate in rates.items():
            if kind.endswith("ToR"):
                most = self.problem["tor_circuits"][name] * self.problem["link_gbps"]
            else:
                most = self.ends[name]["nic_gbps"]
            assert rate <= most * (1 + ROUNDING), f"{rate} Gbit/s {kind} {name}"

    def _seconds(self, edge: Document, above: int) -> float:
        per_byte_s = 8 / (edge["rate_gbps"] * 1e9)
        chunk_s: float = self.problem["chunk_bytes"] * per_byte_s + self.problem["hop_latency_s"]
        return float(edge["bytes"] * per_byte_s + above * chunk_s)


class _Depths:
    """Computes the number of edges above each edge in its wave: none if the source had all of the piece before."""

    def __init__(self, held: dict[tuple[str, str], list[Span]], edges: list[Document]) -> None:
        self._held, self._edges = held, edges
        self._into: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, edge in enumerate(edges):
            self._into[edge["shard"], edge["dst"]].append(number)
        self._known: dict[int, int] = {}

    def of(self, number: int, below: tuple[int, ...] = ()) -> int:
        if number not in self._known:
            assert number not in below, "edges go in a circle"
            self._known[number] = self._find(number, (*below, number))
        return self._known[number]

    def _find(self, number: int, below: tuple[int, ...]) -> int:
        edge = self._edges[number]
        source, span = (edge["shard"], edge["src"]), _span(edge)
        held = self._held.get(source, [])
        if _covers(held, span):
            return 0
        feeding = [each for each in self._into[source] if _overlap(_span(self._edges[each]), span)]
        assert _covers([*held, *(_span(self._edges[each]) for each in feeding)], span), f"{edge['src']} lacks {span}"
        for each in feeding:
            assert self._edges[each]["rate_gbps"] >= edge["rate_gbps"] * (1 - ROUNDING), "sent on faster than it comes"
        return 1 + max(self.of(each, below) for each in feeding)


def _span(edge: Document) -> Span:
    return edge["offset"], edge["offset"] + edge["bytes"]


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _covers(spans: list[Span], wanted: Span) -> bool:
    at, last = wanted
    for start, end in sorted(spans):
        if start <= at < end:
            at = end
    return at >= last
