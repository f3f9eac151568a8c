"""The choice is the best one, and never exceeds the limit."""

import itertools
import random

import numpy as np
import pytest

from qtorch.calibration.allocation.allocate import Frontier, swaps


def brute_force(costs: list[list[int]], values: list[list[float]], limit: int) -> float:
    return min(
        sum(value[option] for value, option in zip(values, options))
        for options in itertools.product(*(range(len(of_item)) for of_item in costs))
        if sum(cost[option] for cost, option in zip(costs, options)) <= limit
    )


def problem(seed: int, items: int, options: int, largest: int) -> tuple[list[list[int]], list[list[float]]]:
    generator = random.Random(seed)
    costs = [[generator.randint(1, largest) for _ in range(options)] for _ in range(items)]
    return costs, [[generator.random() for _ in range(options)] for _ in range(items)]


@pytest.mark.parametrize("largest", [3, 10**6])
def test_it_equals_brute_force_on_6_layers_of_3_choices(largest: int) -> None:
    for seed in range(10):
        costs, values = problem(seed, 6, 3, largest)
        least, most = sum(map(min, costs)), sum(map(max, costs))
        for limit in (least, (3 * least + most) // 4, most):
            found = Frontier(costs, values, limit).solution()
            assert found.value == pytest.approx(brute_force(costs, values, limit), rel=1e-12)
            assert found.cost == sum(cost[option] for cost, option in zip(costs, found.options)) <= limit
            assert found.value == pytest.approx(sum(value[o] for value, o in zip(values, found.options)), rel=1e-12)


def test_layers_of_different_numbers_of_choices() -> None:
    costs, values = [[4], [1, 2, 3, 9], [5, 5]], [[0.5], [0.9, 0.5, 0.1, 0.0], [0.2, 0.1]]
    for limit in (10, 11, 12, 18):
        assert Frontier(costs, values, limit).solution().value == pytest.approx(brute_force(costs, values, limit))
    with pytest.raises(ValueError, match="no choice of options is within the limit"):
        Frontier([[3, 4], [5]], [[1.0, 0.5], [0.0]], 7).solution()


def test_few_states_keep_the_limit_and_lose_little() -> None:
    costs, values = problem(1, 60, 4, 10**9)
    limit = (sum(map(min, costs)) + sum(map(max, costs))) // 2
    exact = Frontier(costs, values, limit, states=1 << 15).solution()
    for states in (16, 256, 4096):
        found = Frontier(costs, values, limit, states).solution()
        assert found.cost <= limit
        # The loss of an item is about what an interval of costs is worth.
        assert exact.value <= found.value + 1e-12
        assert found.value <= exact.value * (1 + 60 / states)
    tight = Frontier(costs, values, sum(map(min, costs)), states=16).solution()
    assert tight.cost == sum(map(min, costs))


def test_the_curve_is_the_best_for_every_limit() -> None:
    costs, values = problem(3, 6, 3, 50)
    curve = Frontier(costs, values)
    assert (np.diff(curve.cost) > 0).all()
    assert (np.diff(curve.value) < 0).all()
    for limit in range(int(curve.cost[0]), int(curve.cost[-1]) + 1, 7):
        within = curve.value[curve.cost <= limit]
        assert within[-1] == pytest.approx(brute_force(costs, values, limit), rel=1e-12)
    for index in (0, len(curve) // 2, -1):
        found = curve.solution(index)
        assert (found.cost, found.value) == (curve.cost[index], curve.value[index])


def test_swaps_are_those_within_the_limit_in_the_order_of_the_scores() -> None:
    costs, scores = [[1, 2], [1, 2], [1, 2]], [[5.0, 1.0], [3.0, 2.0], [9.0, 2.0]]
    found = swaps([0, 0, 1], costs, scores, 4)
    assert [(swap.options, swap.change) for swap in found] == [
        ({0: 1, 2: 0}, 3.0),
        ({1: 1, 2: 0}, 6.0),
        ({2: 0}, 7.0),
    ]
    assert [swap.options for swap in swaps([0, 0, 0], costs, scores, 4)] == [{2: 1}, {0: 1}, {1: 1}]
