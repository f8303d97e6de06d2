"""Tests of membership: the transitions, and their recovery by a restarted daemon."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrrl.core.clock import VirtualClock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.journal.store import Journal
from orchestrrl.daemon.configuration import parse_config
from orchestrrl.daemon.control_plane import ControlPlane
from orchestrrl.daemon.wiring import build_daemon
from orchestrrl.fleet.membership_changes import MEMBERSHIP, REMOVED_REMEMBERED, Membership
from orchestrrl.fleet.state import EngineFacts
from planner.model import EngineId

CONFIGURED = ("e0", "e1")
NAMES = (*CONFIGURED, "e2", "e3")
CONFIG = """
fleet:
  gpus: {count: 8}
  engines:
    - {id: e0, url: "http://e0", pool: wide}
    - {id: e1, url: "http://e1"}
"""

Word = tuple[str, str]
words = st.tuples(
    st.sampled_from(("add", "readmit", "drain", "move", "undrain", "remove", "restart", "reload")),
    st.sampled_from(NAMES),
)


class Oracle:
    """A model of membership in plain sets."""

    def __init__(self) -> None:
        self.there = set(CONFIGURED)
        self.drained: set[str] = set()
        self.leaving: set[str] = set()

    def hear(self, word: str, name: str) -> bool:
        """Apply a change and return whether it is valid."""
        match word:
            case "restart" | "reload":
                return True
            case "add":
                if name in self.there:
                    return False
                self.there.add(name)
            case "readmit":
                if name in self.there or name not in CONFIGURED:
                    return False
                self.there.add(name)
            case _ if name not in self.there:
                return False
            case "drain" | "move":
                self.drained.add(name)
                self.leaving |= {name} if word == "move" else set()
            case "undrain":
                self.drained.discard(name)
                self.leaving.discard(name)
            case "remove":
                for names in (self.there, self.drained, self.leaving):
                    names.discard(name)
        return True


async def say(plane: ControlPlane, word: str, name: str) -> None:
    engine, membership_changes = EngineId(name), plane.fleet.membership_changes
    match word:
        case "add":
            membership_changes.add(EngineFacts(name, f"http://{name}", gpus=(NAMES.index(name),), pool="added"))
        case "readmit":
            membership_changes.add(EngineFacts(name, ""))
        case "drain" | "move":
            membership_changes.drain(engine, word == "move")
        case "undrain":
            membership_changes.undrain(engine)
        case "remove":
            await membership_changes.remove(engine)
        case "reload":
            plane.reconfigure(parse_config(CONFIG))


@example([("add", "e2"), ("move", "e2"), ("remove", "e2"), ("restart", ""), ("add", "e2")])
@example([("drain", "e0"), ("remove", "e0"), ("reload", ""), ("add", "e0"), ("remove", "e0"), ("readmit", "e0")])
@given(st.lists(words, min_size=4, max_size=30))
async def test_restarted_daemon_recovers_any_sequence_of_changes(message: Sequence[Word]) -> None:
    oracle, clock = Oracle(), VirtualClock(1000.0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        journal = Journal(path, clock.now_s())
        plane = build_daemon(parse_config(CONFIG), journal, clock).control_plane
        for word, name in (*message, ("restart", "")):
            before = plane.fleet.membership_changes.membership
            if oracle.hear(word, name):
                await say(plane, word, name)
            else:
                with pytest.raises(ProblemFaults, match=r"engine_id|url"):
                    await say(plane, word, name)
                assert plane.fleet.membership_changes.membership == before
            if word == "restart":
                journal.close()
                journal = Journal(path, clock.now_s())
                plane = build_daemon(parse_config(CONFIG), journal, clock).control_plane
                assert plane.fleet.membership_changes.membership == before
            views = {view.id: view for view in plane.fleet.state.engines(clock.now_s())}
            assert set(views) == oracle.there
            assert {id for id, view in views.items() if view.draining} == oracle.drained
            assert plane.fleet.membership_changes.membership.leaving == oracle.leaving
            assert {view.pool for view in views.values() if view.url not in ("http://e0", "http://e1")} <= {"added"}
        journal.close()


def test_each_transition_is_idempotent() -> None:
    e2 = EngineFacts(EngineId("e2"), "http://e2")
    full = Membership().with_added(e2).with_drained(e2.id, move=True)
    for step in (
        lambda membership: membership.with_added(e2),
        lambda membership: membership.with_drained(e2.id),
        lambda membership: membership.with_drained(e2.id, move=True),
        lambda membership: membership.with_undrained(e2.id),
        lambda membership: membership.with_removed(e2.id),
    ):
        once = step(full)
        assert step(once) == once
        assert MEMBERSHIP.validate_python(MEMBERSHIP.dump_python(once, mode="json")) == once
    assert full.with_drained(e2.id) == full, "moves are not called back"


def test_names_of_removed_engines_are_limited() -> None:
    membership = Membership(removed=tuple(EngineId(f"pod-{n}") for n in range(REMOVED_REMEMBERED)))
    after = membership.with_removed(EngineId("newest"))
    assert len(after.removed) == REMOVED_REMEMBERED
    assert (after.removed[0], after.removed[-1]) == ("pod-1", "newest")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"leaving": frozenset({"e0"})}, "leaving engines must be draining"),
        ({"draining": frozenset({"e0"}), "removed": ("e0",)}, "must not be added or draining"),
        ({"added": (EngineFacts(EngineId("b"), ""), EngineFacts(EngineId("a"), ""))}, "must be sorted by id"),
    ],
)
def test_contradictory_membership_is_rejected(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Membership(**fields)  # type: ignore[arg-type]
