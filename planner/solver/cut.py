"""Cut the requests, longest first, into blocks that run at once, and place the blocks one after another on instances.

Every instance with a long request pays alpha for all its iterations, so long requests belong together. A block is as
large as time and KV room allow. A block that leaves much time unused shares its instance with blocks of shorter
requests, which are admitted when the first block ends. The configuration of each block is chosen as in a shortest-path
search. The remaining distance is estimated by a lower bound on the number of GPUs that the later requests take.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from planner.solver.bound import price, units
from planner.solver.columns import Floats, ProblemColumns


@dataclass(frozen=True, slots=True)
class RequestCut:
    """The requests of one instance, as ranges of positions in the order of descending length.

    The ranges are in order of admission.
    """

    configuration: int
    kept: bool
    blocks: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Option:
    configuration: int
    kept: bool
    price: float
    alpha_s: float
    switch_s: float
    cost_s: Floats  # [position], work and move
    area_s: Floats  # [position], cost_s plus the share of alpha by KV room and sequences
    spent: list[float]  # [position + 1], sum of cost_s over all earlier positions
    slots: int
    capacity: int


class RequestCutter:
    """Cuts the requests of one problem into blocks for given makespans."""

    def __init__(self, columns: ProblemColumns, every: int = 1) -> None:
        """Prepare the cuts. If `every` is n > 1, only every n-th request and one n-th of the GPUs are used.

        The costs assume that every running request moves, even if its instance is kept.
        """
        order = columns.longest_first[every // 2 :: every]
        self.remaining = columns.remaining[order]
        self._left = self.remaining.tolist()
        self._footprint = np.concatenate(([0], np.cumsum(columns.footprint[order]))).tolist()
        self._largest = columns.footprint[order].tolist()
        self._units = max(1.0, units(columns) / every)
        self._kept = np.bincount(columns.current_configuration, minlength=len(columns.gpus)) // every
        self._options: list[_Option] = []
        for configuration in np.flatnonzero(columns.placeable).tolist():
            cost_s = (columns.work_s[configuration] + columns.moved_s[configuration])[order]
            slot = np.maximum(
                columns.footprint[order] / columns.capacity[configuration], 1 / columns.slots[configuration]
            )
            area_s = cost_s + columns.alpha_s[configuration] * self.remaining * slot
            spent = [0.0, *np.cumsum(cost_s).tolist()]
            for kept in (True, False) if self._kept[configuration] else (False,):
                self._options.append(
                    _Option(
                        configuration,
                        kept,
                        price(columns, configuration),
                        float(columns.alpha_s[configuration]),
                        0.0 if kept else float(columns.switch_s[configuration]),
                        cost_s,
                        area_s,
                        spent,
                        int(columns.slots[configuration]),
                        int(columns.capacity[configuration]),
                    )
                )

    def cut(self, makespan_s: float, only: frozenset[int] | None = None) -> list[RequestCut] | None:
        """Return the cut of each instance so that all instances finish by `makespan_s`; None if there are too few GPUs.

        If `only` is given, only these configurations are used.
        """
        options = [option for option in self._options if only is None or option.configuration in only]
        after = self._after(makespan_s, options)
        instances: list[RequestCut] = []
        # Per configuration: (unused seconds, instance), ascending.
        gaps: dict[int, list[tuple[float, int]]] = {option.configuration: [] for option in options}
        left_kept = self._kept.tolist()
        position, used, count = 0, 0.0, len(self._left)
        while position < count:
            best = None
            best_value, best_end, best_height = float("inf"), position, 0.0
            for option in options:
                if option.kept and not left_kept[option.configuration]:
                    continue
                end, height = self._block(option, position, makespan_s - option.switch_s)
                if end > position:
                    share = min(1.0, height / (makespan_s - option.switch_s))
                    value = option.price * share + after[end]
                    if value < best_value:
                        best, best_value, best_end, best_height = option, value, end, height
            if best is None:
                return None
            waiting = gaps[best.configuration]
            fit = bisect_right(waiting, (best_height, -1))
            if fit < len(waiting):
                gap_s, instance = waiting.pop(fit)
                instances[instance].blocks.append((position, best_end))
            else:
                used += best.price
                if used > self._units + 1e-9:
                    return None
                left_kept[best.configuration] -= best.kept
                gap_s, instance = makespan_s - best.switch_s, len(instances)
                instances.append(RequestCut(best.configuration, best.kept, [(position, best_end)]))
            if gap_s - best_height > 0.01 * makespan_s:
                insort(waiting, (gap_s - best_height, instance))
            position = best_end
        return instances

    def _block(self, option: _Option, position: int, free_s: float) -> tuple[int, float]:
        """Return the end position of the block that starts at `position`, and the time, in seconds, that the block
        takes. If no request fits, the end position is `position`."""
        alone_s = option.alpha_s * self._left[position]
        room_s = free_s - alone_s
        if room_s <= 0 or self._largest[position] > option.capacity:
            return position, 0.0
        before = option.spent[position]
        end = min(bisect_right(option.spent, before + room_s, position) - 1, position + option.slots)
        if self._footprint[end] - self._footprint[position] > option.capacity:
            end = bisect_right(self._footprint, self._footprint[position] + option.capacity, position) - 1
        return end, alone_s + option.spent[end] - before

    def _after(self, makespan_s: float, options: list[_Option]) -> list[float]:
        """Return, for each position, a lower bound on the number of GPU units for the requests from that position
        on."""
        shares = np.full(len(self._left), np.inf)
        for option in options:
            room_s = makespan_s - option.switch_s - option.alpha_s * self.remaining
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.maximum(option.cost_s / room_s, option.area_s / (makespan_s - option.switch_s))
            np.minimum(shares, np.where(room_s > 0, option.price * share, np.inf), out=shares)
        shares[~np.isfinite(shares)] = 1e12
        return [*np.cumsum(shares[::-1])[::-1].tolist(), 0.0]
