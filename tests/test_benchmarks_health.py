"""`python -m benchmarks.health`: that its ratios are of steps that are, and are not, counted."""

from __future__ import annotations

from benchmarks import health, networks


def test_a_row_is_three_ratios() -> None:
    [row] = health.cost([networks.mlp(8, 4, layers=2)], rounds=3)
    assert len(row) == 4
    quiet, counted, average = (float(cell.split()[0]) for cell in row[1:])
    assert quiet > 0
    assert min(quiet, counted) <= average <= max(quiet, counted) + 0.01


def test_steps_are_counted_as_often_as_asked() -> None:
    network = networks.mlp(8, 4, layers=2)
    for every, counted in ((None, None), (10**9, [0]), (2, [0, 2])):
        step = health.watched_step(network, every)
        for _ in range(4):
            step()
        monitor = vars(step)["monitor"]
        if every is None:
            assert monitor is None
        else:
            assert {tuple(e["steps"]) for e in monitor.as_dict()["modules"]} == {
                tuple(counted or ())
            }
            monitor.detach()


def test_the_page_has_a_place_for_the_figures() -> None:
    page = health.PAGE.read_text(encoding="utf-8")
    assert page.count(health.BEGIN) == page.count(health.END) == 1
