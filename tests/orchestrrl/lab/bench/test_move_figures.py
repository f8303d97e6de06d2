"""The figures about moves, on one step each."""

from orchestrrl.lab.bench.moves import move_groups, move_room
from orchestrrl.lab.bench.policies import Setting


def test_fewer_moves_end_in_preemptions_where_room_is_judged_by_lengths() -> None:
    (figure,) = move_room(seeds=(4,))
    assert 0 <= figure.value < figure.baseline_value <= 1


def test_groups_that_stay_together_are_measured_beside_those_that_do_not() -> None:
    (figure,) = move_groups(Setting("small", 16, 800.0, 1.2, 6_000, 200_000), seeds=(1,))
    assert figure.value > 0
    assert figure.baseline_value > 0
