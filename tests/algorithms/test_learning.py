"""Each script learns more than an untrained policy or a mistaken script; see `learning`."""

import pytest

from tests import scripts

from .learning import MOST, REACHED, SEEDS, TRAININGS, learn

# These take five minutes. The other tests in this folder try these scripts, too.
LONG = {
    "dqn_clusterenv.py",
    "scripts/ppo_continuous_clusterenv.py",
    "scripts/sac_clusterenv.py",
    "scripts/ppo_lstm_clusterenv.py",
    "scripts/ppo_multilearner_clusterenv.py",
    "scripts/ppo_minatar_clusterenv.py",
    "scripts/ppo_atari_clusterenv.py",
    "scripts/dqn_atari_clusterenv.py",
}


@pytest.mark.parametrize("script", scripts.parameters(TRAININGS, later=LONG))
def test_it_learns(script, tmp_path):
    assert REACHED < learn(script, tmp_path, SEEDS.get(script, 1)) <= MOST
