"""Each script learns more than an untrained policy or a mistaken script; see `learning`."""

import pytest

from .learning import MOST, REACHED, SEEDS, TRAININGS, learn


@pytest.mark.parametrize("script", TRAININGS)
def test_it_learns(script, tmp_path):
    assert REACHED < learn(script, tmp_path, SEEDS.get(script, 1)) <= MOST
