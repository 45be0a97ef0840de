"""Cal-QL: returns to go, the lower bound of the policy's values, episodes and mixtures; both phases, resumed."""

import math
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, rows
from recorded import recorded
from safetensors.numpy import load_file
from test_iql import OBS

from solorl import Run

CAL = definitions("cal_ql")
Batch = CAL["Batch"]


def test_returns_to_go_end_with_the_episode():
    reward = np.array([1, 2, 3, 4], np.float32)
    got = CAL["returns_to_go"](reward, np.array([False, True, False, True]), 0.5)
    np.testing.assert_allclose(got, [2, 2, 5, 4])
    assert len(CAL["returns_to_go"](reward[:0], np.zeros(0, bool), 0.5)) == 0


def test_values_of_the_policys_actions_are_at_least_the_return_of_the_data():
    """Against NumPy: the bound of each state holds for its own actions, those of the policy only."""
    torch.manual_seed(0)
    scale = CAL["Standardize"](OBS)
    actor, critic = CAL["Actor"](scale, 2).double(), CAL["Critic"](scale, 2).double()
    obs, next_obs = (torch.randn(4, 3, dtype=torch.float64) for _ in range(2))
    bound = torch.tensor([-100.0, 5.0, 100.0, 0.0], dtype=torch.float64)
    zeros = torch.zeros(4, dtype=torch.float64)
    batch = Batch(obs, torch.zeros(4, 2).double(), zeros, zeros, next_obs, bound)
    n = 3
    uniform = 2 * torch.rand(n, 4, 2, dtype=torch.float64) - 1
    noise = torch.randn(2, n, 4, 2, dtype=torch.float64)
    got = CAL["calibrated_log_sum_exp"](critic, actor, batch, uniform, noise)
    with torch.no_grad():
        terms = [[], []]
        for k in range(n):
            drawn = [(uniform[k], torch.full((4,), -2 * math.log(2)), None)]
            drawn += [(*actor(x, noise[i, k]), bound) for i, x in enumerate((obs, next_obs))]
            for action, logprob, least in drawn:
                for of_critic, q in zip(terms, critic(obs, action), strict=True):
                    value = q.numpy() if least is None else np.maximum(q.numpy(), least.numpy())
                    of_critic.append(np.exp(value - logprob.numpy()))
    for values, expected in zip(got, terms, strict=True):
        np.testing.assert_allclose(values.detach().numpy(), np.log(np.mean(expected, 0)))


def test_an_episode_is_stored_whole_with_its_returns():
    """Observations of two dimensions and an action of one, after three steps; the buffer has them in this order."""
    episode = []
    for step in range(3):
        obs = np.full((1, 2), step)
        episode.append((obs, np.full((1, 1), 0.5), np.array([1.0]), np.array([step == 2]), obs + 1))
    replay = CAL["ReturnReplay"](5, 2, SimpleNamespace(shape=(1,), dtype=np.float32))
    replay.add(CAL["with_returns"](episode, 0.5))
    stored = {name: array[:3] for name, array in replay.arrays.items()}
    assert replay.inserted == 3
    np.testing.assert_allclose(stored["obs"], [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_allclose(stored["next_obs"], stored["obs"] + 1)
    np.testing.assert_allclose(stored["mc_return"], [1.75, 1.5, 1])
    np.testing.assert_allclose(stored["done"], [0, 0, 1])


def test_a_mixture_has_its_share_from_the_data():
    def arrays(value):
        return Batch(*(np.full(5, value, np.float32) for _ in Batch._fields))

    batch = CAL["mixture"](CAL["Data"](arrays(1)), CAL["Data"](arrays(0)), 40, 0.25, "cpu")
    assert batch.reward.shape == (40,) and batch.reward.sum() == 10


FLAGS = (
    "--env-id Pendulum-v1 --total-timesteps 240 --offline-steps 20 --batch-size 4 --cql-actions 2 --log-every 10 "
    "--save-every 10 --save-replay --eval-every 120 --eval-episodes 1".split()
)


@pytest.mark.slow
def test_resumed_anywhere_as_if_it_had_never_stopped(train, tmp_path, monkeypatch):
    """Killed in the offline phase, at the switch, in the first episode online, which no replay has yet, and after it;
    ended by a signal at the switch and later: the same rows and weights, bit for bit."""
    save, cuts = Run.save, {step: tmp_path / f"killed{step}" for step in (10, 20, 30, 210, 230)}

    def copy_as_if_killed(run, step):
        save(run, step)
        if step in cuts:
            shutil.copytree(run.dir, cuts[step])

    with monkeypatch.context() as patched:
        patched.setattr(Run, "save", copy_as_if_killed)
        run = train("cal_ql", "--dataset", recorded("Pendulum-v1"), *FLAGS)["run"]
    whole, weights = comparable(run.dir), load_file(run.dir / "model_last.safetensors")
    assert {row["global_step"] for row in rows(run.dir, "losses/cql_gap")} == {10, 20, 220, 230, 240}

    for stop in (20, 220):
        runs_dir = tmp_path / f"ended{stop}"

        def end_here(run, step, stop=stop):
            if step == stop:
                run.ending.hear(signal.SIGTERM, None)
            save(run, step)

        with monkeypatch.context() as patched:
            patched.setattr(Run, "save", end_here)
            train("cal_ql", "--dataset", recorded("Pendulum-v1"), *FLAGS, "--runs-dir", runs_dir)
        [cuts[-stop]] = runs_dir.iterdir()
        assert max(row["global_step"] for row in rows(cuts[-stop])) == stop

    for stop, folder in cuts.items():
        train("cal_ql", "--resume", folder)
        assert comparable(folder) == whole, stop
        again = load_file(folder / "model_last.safetensors")
        assert again.keys() == weights.keys()
        assert all(np.array_equal(again[key], weights[key]) for key in weights), stop
