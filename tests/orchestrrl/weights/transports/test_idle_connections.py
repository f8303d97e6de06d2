"""Connections between versions: who gets them again, and that they are bounded in number and time."""

import threading

from orchestrrl.weights.transports.idle import IdleConnections

PATIENT_S = 60.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kept(most: int = 3) -> tuple[IdleConnections[str], list[str], Clock]:
    let_go: list[str] = []
    clock = Clock()
    return IdleConnections(let_go.append, most, 1000.0, clock), let_go, clock


def test_one_is_had_again_once_and_by_who_goes_there() -> None:
    idle, let_go, _ = kept()
    idle.keep("a", "here", "connection a")
    assert idle.take_first(["b", "a"], "elsewhere") is None
    assert idle.take_first(["b", "a"], "here") == ("a", "connection a")
    assert idle.take_first(["b", "a"], "here") is None
    assert idle.take("a") is None
    idle.close()
    assert let_go == []


def test_too_many_and_too_old_are_let_go_of_the_oldest_first() -> None:
    idle, let_go, clock = kept(most=3)
    for number in range(5):
        clock.now_s = float(number)
        idle.keep(str(number), "", str(number))
    assert let_go == ["0", "1"]
    clock.now_s = 1003.0
    idle.tidy()
    assert let_go == ["0", "1", "2", "3"]
    idle.close()
    assert let_go == ["0", "1", "2", "3", "4"]
    idle.keep("late", "", "late")
    assert let_go[-1] == "late"


def test_what_is_offered_stays_until_the_other_end_has_chosen() -> None:
    idle, let_go, clock = kept()
    idle.keep("a", "", "a")
    with idle.offered() as names:
        assert names == ["a"]
        clock.now_s = 2000.0
        idle.tidy()
        assert idle.take("a") == "a"
        idle.keep("b", "", "b")
        assert let_go == []
    idle.close()


def test_one_that_is_on_its_way_back_is_waited_for() -> None:
    idle, _, _ = kept()
    coming = threading.Timer(0.1, idle.keep, ("a", "", "a"))
    coming.start()
    assert idle.take("a", PATIENT_S) == "a"
    coming.join()
    idle.close()
