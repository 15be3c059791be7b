"""Signals to a run in this process: the run saves and ends."""

import errno
import signal

import numpy as np
import pytest

import dqn_clusterenv
from clusterenv_runtime import EnvError, Interrupted
from clusterenv_utils import Run
from clusterenv_utils.checkpoint import load_checkpoint
from clusterenv_utils.errors import CheckpointError, ScriptError
from clusterenv_utils.signals import TOLD, Signals

from .nets import linear


class Envs:
    """The part of a `ClusterEnv` that a run uses, without workers."""

    closed, interruptions = False, 0
    num_workers = policy_version = 0
    hosts = restarts = ()
    pulls = held_versions = divergence = steps = waiting_seconds = np.empty(0)

    def interrupt(self):
        self.interruptions += 1

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


NUMBERS = *TOLD, signal.SIGINT


@pytest.fixture
def signals():
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    yield Signals()
    for number, handler in before.items():
        signal.signal(number, handler)


CODES = pytest.mark.parametrize(
    ("number", "code"),
    [*((number, 75) for number in TOLD), (signal.SIGINT, 130)],
    ids=lambda value: str(value),
)


@CODES
def test_a_signal_interrupts_and_saves_and_a_schedulers_next_signal_is_ignored(
    signals, capsys, number, code
):
    envs, saves = Envs(), []
    with (
        pytest.raises(SystemExit) as exit,
        signals.saving(envs, lambda: saves.append(1), "--resume runs/x"),
    ):
        signal.raise_signal(number)
        assert envs.interruptions == 1 and not saves
        raise Interrupted
    assert exit.value.code == code and saves == [1]
    assert capsys.readouterr().err == "interrupted; to resume: --resume runs/x\n"
    left = [signal.getsignal(each) for each in NUMBERS]
    assert left == [*[signal.SIG_IGN] * len(TOLD), signal.default_int_handler]


def test_an_environments_error_is_raised_after_the_run_is_saved(signals, capsys):
    saves, error = [], ValueError("the simulator is gone")
    error.__cause__ = EnvError("environment 3")
    with (
        pytest.raises(ValueError, match="the simulator is gone"),
        signals.saving(Envs(), lambda: saves.append(1), "--resume runs/x"),
    ):
        raise error
    assert saves == [1] and capsys.readouterr().err == "saved; to resume: --resume runs/x\n"

    def cannot_save():
        raise CheckpointError("the weights are not finite")

    with pytest.raises(ValueError), signals.saving(Envs(), cannot_save, "--resume runs/x"):
        raise error
    assert capsys.readouterr().err == "not saved: the weights are not finite\n"
    with pytest.raises(ValueError), signals.saving(Envs(), None, "--resume runs/x"):
        raise ValueError("of the script: something may be half done")


@CODES
def test_a_signal_before_the_training_or_after_it_ends_the_process_where_it_is(
    signals, capsys, number, code
):
    with signals.saving(Envs(), None, "--resume runs/x"):
        pass
    with pytest.raises(SystemExit) as exit:
        signal.raise_signal(number)
        pytest.fail("it was not heeded")
    assert (exit.value.code, capsys.readouterr().err) == (code, "interrupted\n")


def test_a_lost_learner_is_an_error_after_the_run_is_saved_and_a_full_disk_is_one_line(
    signals, capsys
):
    saves = []
    for error in Interrupted("learner 1 is lost"), OSError(errno.ENOSPC, "No space left on device"):
        says = "^learner 1 is lost; to resume: runs/x$|^cannot write logs: No space left on device$"
        with (
            pytest.raises(ScriptError, match=says),
            signals.saving(Envs(), lambda: saves.append(1), "runs/x"),
        ):
            raise error
    assert saves == [1, 1] and capsys.readouterr().err == "saved; to resume: runs/x\n"


def test_a_hangup_that_is_ignored_stays_so(signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Signals()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_signal_during_the_last_update_is_heeded_before_the_evaluation(signals):
    envs, saves = Envs(), []
    with (
        pytest.raises(SystemExit) as exit,
        signals.saving(envs, lambda: saves.append(1), "--resume runs/x"),
    ):
        signals.raise_if_received()
        signal.raise_signal(signal.SIGTERM)
        envs.close()
        signals.raise_if_received()
        pytest.fail("it was not heeded")
    assert exit.value.code == 75 and saves == [1]


def test_a_second_ctrl_c_raises_keyboard_interrupt(signals):
    envs = Envs()
    with pytest.raises(KeyboardInterrupt), signals.saving(envs, None, "--resume runs/x"):
        signal.raise_signal(signal.SIGINT)
        assert envs.interruptions == 1
        signal.raise_signal(signal.SIGINT)


def test_a_signal_is_heeded_at_once_when_there_are_no_workers_to_wait_for(signals):
    envs, saves = Envs(), []
    envs.close()

    def save():  # a scheduler may send the signal twice
        signal.raise_signal(signal.SIGTERM)
        saves.append(1)

    with pytest.raises(SystemExit) as exit, signals.saving(envs, save, "--resume runs/x"):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it was not heeded")
    assert exit.value.code == 75 and saves == [1]


def test_weights_that_are_not_finite_are_not_saved(signals, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    run, model = Run(dqn_clusterenv.Args(checkpoint_interval=0, run_name="x")), linear()
    run.begin()
    run.keep("q_network", model)
    with run.training(Envs(), model, None):
        for _ in run.iterations(3, 8):
            run.global_step += 8
            if run.global_step == 16:
                model[0].weight.data[0] = np.nan
    assert load_checkpoint("runs/x")["global_step"] == 8
    says = "no checkpoint of runs/x at step 24: the weights are not finite; training goes on"
    assert caplog.messages[-1] == says


@pytest.mark.parametrize(("interval", "at"), [(0, [0, 8, 16, 24]), (300, [24])])
def test_saves_are_due_when_the_interval_is_over_and_at_the_end(
    signals, tmp_path, monkeypatch, interval, at
):
    monkeypatch.chdir(tmp_path)
    envs, saved_at = Envs(), []
    run = Run(dqn_clusterenv.Args(checkpoint_interval=interval))
    run.begin()
    monkeypatch.setattr(run, "save", lambda: saved_at.append(run.global_step))
    with run.training(envs, linear(), None):
        for _ in run.iterations(3, 8):
            assert not envs.closed
            run.global_step += 8
        assert not envs.closed  # the evaluation needs them
    assert envs.closed
    assert saved_at == at
