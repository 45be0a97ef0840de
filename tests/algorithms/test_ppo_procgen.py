"""ppo_procgen.py: levels of training and evaluation, the IMPALA CNN, rewards in units of returns, time limits."""

import numpy as np
import pytest
import torch
from conftest import definitions, rows
from pixel_probe import FakeProcgen, use_fake_envpool

import solorl

PROCGEN = definitions("ppo_procgen")
CATCH = "--env-id CatchEasy-v0 --num-envs 2 --num-steps 32 --num-minibatches 2 --update-epochs 1".split()
SHORT = [*CATCH, "--total-timesteps", 128, "--eval-episodes", 2, "--learning-rate", 0.001, "--num-levels", 5]


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    """EnvPool replaced by a game of catching a ball; the pools that are opened, in their order."""
    use_fake_envpool(monkeypatch)
    opened, begin = [], FakeProcgen.__init__

    def note(self, *inputs, **options):
        begin(self, *inputs, **options)
        opened.append(self)

    monkeypatch.setattr(FakeProcgen, "__init__", note)
    return opened


# ---------------------------------------------------------------------- levels
@pytest.mark.parametrize(("num_levels", "start_level"), [(200, 0), (1, 0), (500, 70), (2**31 - 2, 0)])
def test_levels_of_training_and_evaluation_are_disjoint_and_all(num_levels, start_level):
    """Evaluation has exactly those from the first one after training to the last one there is, 2**31 - 2."""
    count, first = PROCGEN["unseen_levels"](num_levels, start_level)
    assert first == start_level + num_levels and first + count - 1 == 2**31 - 2 and count > 0
    assert PROCGEN["unseen_levels"](0, start_level) == (0, 0)


def test_training_plays_its_levels_and_evaluation_the_others(train, pools):
    v = train("ppo_procgen", *SHORT, "--start-level", 20)
    training, evaluation = pools
    assert len(training.rngs) == 2 and set(training.played) == set(range(20, 25)) and len(training.played) > 10
    assert len(evaluation.played) >= 2 and min(evaluation.played) >= 25
    assert v["envs"].options == {"num_levels": 5, "start_level": 20}
    policy = solorl.load(v["run"].dir)  # as `solo play` has it
    env = policy.make_env(num_envs=1)
    env.reset(seed=1)
    assert pools[-1].played[0] >= 25


def test_all_levels_in_both(train, pools):
    train("ppo_procgen", *SHORT, "--num-levels", 0)
    assert all((pool.low, pool.high) == (0, 2**31 - 1) for pool in pools) and len(pools) == 2


def test_too_many_levels_are_refused(train, tmp_path):
    train("ppo_procgen", *SHORT, "--num-levels", 2**31 - 1, code=2)
    assert "--num-levels must add up to less than 2147483647" in train.out
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------- the network
def test_the_network_is_that_of_impala():
    """By the functions of torch, from the paper: three times a convolution, a pool, two blocks x + conv(relu(...))."""
    torch.manual_seed(0)
    agent, obs = PROCGEN["Agent"](15), torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    weights = iter(agent.network.parameters())

    def convolution(x):
        return torch.conv2d(x, next(weights), next(weights), padding=1)

    with torch.no_grad():
        logits, value = agent(obs)
        x, shapes = obs.float() / 255, []
        for _ in range(3):
            x = torch.max_pool2d(convolution(x), 3, 2, 1)
            shapes.append(tuple(x.shape[1:]))
            for _ in range(2):
                x = x + convolution(convolution(x.relu()).relu())
        x = torch.nn.functional.linear(x.relu().flatten(1), next(weights), next(weights)).relu()
    assert shapes == [(16, 32, 32), (32, 16, 16), (32, 8, 8)] and x.shape == (2, 256) and not list(weights)
    torch.testing.assert_close(logits, agent.actor(x))
    torch.testing.assert_close(value, agent.critic(x).squeeze(1))
    assert sum(p.numel() for p in agent.network.parameters()) == 622_144  # with 16, 32, 32 channels and 256 features
    assert agent.act(obs.numpy()).tolist() == logits.argmax(1).tolist()


def test_sampled_actions_have_the_probabilities_of_the_policy():
    np.random.seed(0)
    agent = PROCGEN["Agent"](15)
    agent.network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 256))
    obs = torch.rand(1, 3)
    with torch.no_grad():
        agent.actor.bias[:2] = torch.tensor([3.0, 2.0])
        want = agent(obs)[0].softmax(1)[0].numpy()
    drawn = agent.sample(obs.expand(4000, 3).numpy())
    np.testing.assert_allclose(np.bincount(drawn, minlength=15) / 4000, want, atol=0.02)


# ---------------------------------------------------------------------- credit
def test_rewards_are_divided_by_the_deviation_of_the_returns_and_the_score_is_of_raw_ones(train):
    v = train("ppo_procgen", *SHORT, "--total-timesteps", 64, "--gamma", 0.9, "--gae-lambda", 1)  # one rollout
    reward, done, returns = v["reward"], v["done"], np.zeros((32, 2))
    for i in range(2):
        so_far = 0.0
        for t in range(32):
            so_far = returns[t, i] = 0.9 * so_far + reward[t, i]
            so_far *= 1 - done[t, i]
    assert set(np.unique(reward)) == {0.0, 10.0} and done.sum() == 8
    want = np.clip(reward / np.sqrt(returns.var() + 1e-8), -10, 10)
    np.testing.assert_allclose(v["scaled_reward"], want, rtol=1e-5)
    inside = slice(0, 8)  # the first game: discounted rewards to its end less the value
    to_end = 0.9 ** np.arange(7, -1, -1)[:, None] * want[7]
    np.testing.assert_allclose(v["advantage"][inside], to_end - v["value"][inside], rtol=1e-4, atol=1e-5)
    scores = [row["charts/episodic_return"] for row in rows(v["run"].dir, "charts/episodic_return")]
    assert sorted(scores) == sorted(reward[done == 1].tolist()) and 10.0 in scores


def test_the_games_own_limit_bootstraps_from_its_last_image(train, monkeypatch):
    """A game that only its limit ends: 20 steps as EnvPool has it, a time limit after 19."""
    monkeypatch.setattr(FakeProcgen, "LENGTH", 1000)
    v = train("ppo_procgen", *SHORT, "--total-timesteps", 64, "--learning-rate", 0)
    assert v["timeout"].sum() == 2 and v["timeout"][18].all() and (v["done"] == v["timeout"]).all()
    last, before, after = (x.reshape(-1, 3, 64, 64) for x in (v["final_obs"][18], v["obs"][18], v["obs"][19]))
    assert (last[:, 2] == before[:, 2]).all()  # of the level that was played
    assert (after[:, 0, :8].max((1, 2)) == 255).all() and (last[:, 0, :8] == 0).all()  # the ball is up, and down
    with torch.no_grad():
        want = v["agent"](torch.as_tensor(last))[1].numpy()
    np.testing.assert_allclose(v["final_value"][18], want, atol=1e-6)
    np.testing.assert_allclose(v["rollout"].returns.reshape(32, 2)[18], 0.999 * want, atol=1e-5)


def test_first_ratio_is_one(train):
    v = train("ppo_procgen", *SHORT, "--num-minibatches", 1)
    assert len(v["kl"]) == 1 and all(abs(v["metrics"][f"losses/{key}"]) < 1e-6 for key in ("approx_kl", "clipfrac"))


# ---------------------------------------------------------------------- training
def test_a_resumed_run_begins_new_games_and_keeps_the_statistics(train):
    flags = [*SHORT, "--save-every", 64]
    folder = train("ppo_procgen", *flags, "--target-return", -1, "--eval-every", 64)["run"].dir
    assert rows(folder)[-1]["global_step"] == 64
    v = train("ppo_procgen", "--resume", folder, "--target-return", "None")
    assert v["start"] == 1 and v["return_normalizer"].count == 128
    ends = np.flatnonzero(v["done"][:, 0])
    assert ends[0] == 7  # a game of 8 steps from the start
    so_far, want = np.zeros(2), []
    for reward, done in zip(v["reward"], v["done"], strict=True):
        want.append(0.999 * so_far + reward)
        so_far = want[-1] * (1 - done)
    np.testing.assert_allclose(v["returns"], want, rtol=1e-4)


@pytest.mark.slow
def test_learns_to_catch_on_levels_that_it_has_not_seen(train):
    """Random actions have about 1, the best ones 10."""
    fast = "--num-envs 16 --num-steps 32 --num-minibatches 4 --total-timesteps 14336 --learning-rate 1e-3 --gamma 0.9"
    v = train("ppo_procgen", *CATCH, *fast.split(), "--update-epochs", 3, "--eval-every", 0, "--eval-episodes", 50)
    assert v["run"].evaluator.score > 8
