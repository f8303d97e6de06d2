"""Flows that come and go at any virtual time, with max-min fair rates at every moment. Pure: time comes in as a number.

`finish_s` is for flows that begin together; `Fluid` is for whoever has others beside them: KV moves, a broadcast of
weights, and what generation puts on the same links all the while.
"""

import numpy as np

from orchestrrl.sim.net.finish import finish_routed_s, finish_s, parts_of
from orchestrrl.sim.net.max_min import filled
from orchestrrl.sim.net.model import Floats, Flows, Ints, Network, Routes
from orchestrrl.sim.net.problem import bounding, problem_of, routes_of

__all__ = ["Fluid", "finish_routed_s", "finish_s"]

TOGETHER_S = 1e-9


class Fluid:
    """Flows have ids in the order in which they come. Those of inf bytes stay until they are removed: background
    traffic of a fixed wish has inf bytes and a cap."""

    def __init__(self, network: Network, *, now_s: float = 0.0, together_s: float = TOGETHER_S) -> None:
        """Flows that end within `together_s` of each other free their room together."""
        self._network = network
        self._together_s = together_s
        self.now_s = now_s
        self._next = 0
        self._id = np.empty(0, np.int64)  # [flow], ascending; so are all below
        self._flows = Flows.none()  # bytes: still to be sent
        self._cap = np.empty(0)
        self._anew = np.empty(0, np.bool_)  # came, or wishes otherwise, since rates were found
        self._rate = np.empty(0)
        self._routes = Routes(np.zeros(1, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))
        self._touched = np.zeros(len(network.capacity_bytes_per_s), np.bool_)  # [link], since rates were found
        self._held = np.zeros(len(network.capacity_bytes_per_s), np.bool_)  # [link], might have been full then
        self._stale = False

    def add(self, flows: Flows, *, cap_bytes_per_s: float | Floats = np.inf) -> Ints:
        """Ids. They begin now; none of them takes more than its cap."""
        ids = np.arange(self._next, self._next + len(flows))
        self._next += len(flows)
        routes = routes_of(self._network, flows)
        self._id = np.concatenate((self._id, ids))
        self._flows = Flows.joined([self._flows, flows])
        self._cap = np.concatenate((self._cap, np.broadcast_to(np.asarray(cap_bytes_per_s, np.float64), len(flows))))
        self._rate = np.concatenate((self._rate, np.full(len(flows), np.inf)))  # that of no link at all
        self._routes = _joined(self._routes, routes)
        self._anew = np.concatenate((self._anew, np.ones(len(flows), np.bool_)))
        self._touch(np.arange(len(self._id) - len(flows), len(self._id)))
        return ids

    def wish(self, ids: Ints, cap_bytes_per_s: float | Floats) -> None:
        """Other caps from now on."""
        at = self._at(ids)
        self._cap[at], self._anew[at] = cap_bytes_per_s, True
        self._touch(at)

    def remove(self, ids: Ints) -> Floats:
        """Bytes that were left of each."""
        at = self._at(ids)
        left = self._flows.bytes[at]
        self._drop(at)
        return left

    def change(self, network: Network) -> None:
        """From now on: circuits have changed, or links were lost. Flows go on by new routes with what is left."""
        self._network = network
        self._routes = routes_of(network, self._flows)
        self._touched = np.zeros(len(network.capacity_bytes_per_s), np.bool_)
        self._held = self._touched.copy()
        self._anew[:] = True
        self._stale = True

    def left_bytes(self, ids: Ints) -> Floats:
        return self._flows.bytes[self._at(ids)]

    def rates(self, ids: Ints) -> Floats:
        """Bytes/s."""
        self._settle()
        return self._rate[self._at(ids)]

    def link_bytes_per_s(self) -> Floats:
        """[link], what passes each."""
        self._settle()
        of_entry = np.repeat(self._rate, np.diff(self._routes.begin)) * self._routes.share
        return np.bincount(self._routes.link, of_entry, len(self._touched)).astype(np.float64)

    @property
    def next_event_s(self) -> float:
        """When the next flow ends; inf: none does."""
        return float(self._ends_s().min(initial=np.inf))

    def advance(self, to_s: float) -> list[tuple[float, int]]:
        """(end, id) of flows that end by then, in order."""
        if to_s < self.now_s:
            raise ValueError(f"time does not run back: it is {self.now_s}, got {to_s}")
        ended: list[tuple[float, int]] = []
        while True:
            ends_s = self._ends_s()
            first_s = float(ends_s.min(initial=np.inf))
            if first_s > to_s or first_s == np.inf:
                break
            done = np.flatnonzero(ends_s <= min(first_s + self._together_s, to_s))
            self._send(float(ends_s[done].max()))
            ended += sorted(zip(ends_s[done].tolist(), self._id[done].tolist(), strict=True))
            self._drop(done)
        self._send(to_s)
        return ended

    def _ends_s(self) -> Floats:
        self._settle()
        ends_s = np.full(len(self._id), np.inf)
        moves = (self._rate > 0) & np.isfinite(self._flows.bytes)
        ends_s[moves] = self.now_s + self._flows.bytes[moves] / self._rate[moves]
        ends_s[self._flows.bytes <= 0] = self.now_s
        return ends_s

    def _send(self, until_s: float) -> None:
        passed_s = until_s - self.now_s
        if passed_s > 0:
            self._flows.bytes[:] = np.maximum(self._flows.bytes - self._rate * passed_s, 0.0)
            self.now_s = until_s

    def _at(self, ids: Ints) -> Ints:
        at = np.searchsorted(self._id, ids)
        known = at < len(self._id)
        known[known] = self._id[at[known]] == np.asarray(ids)[known]
        if not known.all():
            raise KeyError(f"no such flows, or they have ended: {np.asarray(ids)[~known].tolist()}")
        return np.asarray(at)

    def _entries(self, at: Ints) -> np.ndarray:
        taken = np.zeros(len(self._id), np.bool_)
        taken[at] = True
        return np.repeat(taken, np.diff(self._routes.begin))

    def _touch(self, at: Ints) -> None:
        self._touched[self._routes.link[self._entries(at)]] = True
        self._stale = True

    def _drop(self, at: Ints) -> None:
        self._touch(at)
        stays = np.ones(len(self._id), np.bool_)
        stays[at] = False
        entries = np.repeat(stays, np.diff(self._routes.begin))
        old, length = self._routes, np.diff(self._routes.begin)[stays]
        self._routes = Routes(_begins(length), old.link[entries], old.share[entries], old.latency_s[stays])
        self._flows = Flows(self._flows.src[stays], self._flows.dst[stays], self._flows.bytes[stays])
        self._id, self._cap, self._rate = self._id[stays], self._cap[stays], self._rate[stays]
        self._anew = self._anew[stays]

    def _settle(self) -> None:
        """Rates anew of those that are joined to what was touched by links that may be full, or might before; others'
        cannot have changed."""
        if not self._stale:
            return
        routes = self._routes
        problem = bounding(problem_of(self._network, routes, cap=self._cap))
        holds = np.zeros(len(problem.capacity), np.bool_)
        holds[problem.link] = True
        changed = self._touched & (self._held | holds[: len(self._held)])
        part, parts = parts_of(len(holds), problem.begin, problem.link)
        again = np.zeros(parts + 1, np.bool_)
        row = np.repeat(np.arange(len(self._id)), np.diff(routes.begin))
        again[part[row[changed[routes.link]]]] = True
        again[part[self._anew]] = True
        rows = np.flatnonzero(again[part])
        self._rate[rows] = filled(problem.capacity, problem.begin, problem.link, problem.load, rows)
        self._held, self._stale = holds[: len(self._held)], False
        self._touched[:], self._anew[:] = False, False


def _begins(length: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(length))).astype(np.int64)


def _joined(first: Routes, then: Routes) -> Routes:
    return Routes(
        np.concatenate((first.begin, first.begin[-1] + then.begin[1:])),
        np.concatenate((first.link, then.link)),
        np.concatenate((first.share, then.share)),
        np.concatenate((first.latency_s, then.latency_s)),
    )
