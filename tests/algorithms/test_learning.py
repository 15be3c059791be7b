"""Each script learns more than an untrained policy or a mistaken script; see `learning`."""

import pytest

from tests import scripts

from .learning import MOST, REACHED, SEEDS, TRAININGS, learn

# These take five minutes. The other tests in this folder try these scripts, too.
LONG = TRAININGS.keys() - {"ppo_clusterenv.py"}


@pytest.mark.parametrize("script", scripts.parameters(TRAININGS, later=LONG))
def test_it_learns(script, tmp_path):
    assert REACHED < learn(script, tmp_path, SEEDS.get(script, 1)) <= MOST
