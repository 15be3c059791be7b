"""Each script learns what neither an untrained policy nor a mistaken script returns; see
`learning`.
"""

import pytest

from .learning import MOST, REACHED, TRAININGS, learn


@pytest.mark.parametrize("script", TRAININGS)
def test_it_learns(script, tmp_path):
    assert REACHED < learn(script, tmp_path) <= MOST
