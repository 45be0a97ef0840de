"""pqn.py: Q(lambda) against its definition, the loss by hand, its rollout against the rules, and that it learns."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows

PQN = definitions("pqn")
SMALL = "--num-envs 2 --num-steps 16 --total-timesteps 128 --num-minibatches 2 --eval-episodes 1 --eval-every 0".split()
PROBE = "--total-timesteps 8192 --num-steps 32 --learning-rate 0.003 --eval-every 0 --eval-episodes 10".split()


def weights(module):
    """All parameters in one vector."""
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def mixture(reward, value, done, final_value, next_value, gamma, lam):
    """Q(lambda) of one environment by its definition: the returns G of n = 1, 2, ... steps, weighted by (1 - lam) *
    lam ** (n - 1); all that is left goes to the longest, which ends with the episode or the rollout."""
    T, result = len(reward), []
    for t in range(T):
        total, weight, so_far = 0.0, 1.0, 0.0
        for n in range(1, T - t + 1):
            k = t + n - 1  # the last step of this return
            so_far += gamma ** (n - 1) * reward[k]
            after = final_value[k] if done[k] else value[k + 1] if k + 1 < T else next_value
            longest = done[k] or k + 1 == T
            share = weight if longest else weight * (1 - lam)
            total += share * (so_far + gamma**n * after)
            weight -= share
            if longest:
                break
        result.append(total)
    return result


# ---------------------------------------------------------------------- pure functions
def test_q_lambda_by_hand():
    """Three steps, gamma 0.5, lambda 0.5; the last one leads to a state of value 8, which a time limit may cut off."""
    reward, value = np.array([[1.0], [2.0], [3.0]]), np.array([[10.0], [20.0], [30.0]])
    done, no = np.array([[0.0], [1.0], [0.0]]), np.zeros((3, 1))
    compute = lambda *args: PQN["q_lambda"](reward, value, *args, 0.5, 0.5)[:, 0].tolist()  # noqa: E731
    # last: 3 + 0.5 * 8 = 7; middle: 2 + 0.5 * (7 + 30) / 2 = 11.25; first: 1 + 0.5 * (11.25 + 20) / 2 = 8.8125
    assert compute(no, no, np.array([8.0])) == [8.8125, 11.25, 7.0]
    # the task is over with the middle step: 2; first: 1 + 0.5 * (2 + 20) / 2 = 6.5
    assert compute(done, no, np.array([8.0])) == [6.5, 2.0, 7.0]
    # a time limit there, at a state of value 6: 2 + 0.5 * 6 = 5; first: 1 + 0.5 * (5 + 20) / 2 = 7.25
    assert compute(done, 6 * done, np.array([8.0])) == [7.25, 5.0, 7.0]


@pytest.mark.parametrize("lam", [0.0, 0.65, 1.0])
def test_q_lambda_is_the_mixture_of_its_definition(lam):
    rng = np.random.default_rng(0)
    T, N, gamma = 20, 4, 0.9
    reward, value, next_value = rng.normal(size=(T, N)), rng.normal(size=(T, N)), rng.normal(size=N)
    done = (rng.random((T, N)) < 0.2).astype(float)
    done[-1] = [1, 1, 0, 0]  # also with the last step of the rollout
    final_value = done * rng.normal(size=(T, N)) * (rng.random((T, N)) < 0.5)  # half of the ends are time limits
    final_value[-1, 0] = 3.0
    assert done.sum() > 5 and 2 < (final_value != 0).sum() < done.sum()
    got = PQN["q_lambda"](reward, value, done, final_value, next_value, gamma, lam)
    for n in range(N):
        columns = (x[:, n] for x in (reward, value, done, final_value))
        np.testing.assert_allclose(got[:, n], mixture(*columns, next_value[n], gamma, lam), rtol=1e-12)


def test_q_lambda_changes_none_of_its_arrays():
    arrays = [np.ones((3, 2)) for _ in range(4)] + [np.ones(2)]
    PQN["q_lambda"](*arrays, 0.9, 0.5)
    assert all((x == 1).all() for x in arrays)


def values(net, x):
    """The network in NumPy and double precision: Linear, then layer normalisation and ReLU except after the last."""
    layers = list(net)
    assert [type(layer).__name__ for layer in layers] == ["Linear", "LayerNorm", "ReLU"] * 2 + ["Linear"]
    for linear, norm in zip(layers[::3], [layers[1], layers[4], None], strict=True):
        x = x @ linear.weight.detach().double().numpy().T + linear.bias.detach().double().numpy()
        if norm is not None:
            x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
            x = np.maximum(0, x * norm.weight.detach().double().numpy() + norm.bias.detach().double().numpy())
    return x


def test_loss_by_hand():
    torch.manual_seed(0)
    net = PQN["QNetwork"](3, 4)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    batch = PQN["Batch"](torch.randn(10, 3), torch.randint(4, (10,)), torch.randn(10))
    loss, metrics = PQN["q_lambda_loss"](net, batch)
    taken = values(net.net, batch.obs.double().numpy())[np.arange(10), batch.action.numpy()]
    assert loss.item() == pytest.approx(np.mean((taken - batch.returns.numpy()) ** 2), rel=1e-4)
    assert {name: x.item() for name, x in metrics.items()} == {
        "losses/td_loss": loss.item(),
        "losses/q_values": pytest.approx(taken.mean(), rel=1e-4),
    }


def test_layers_are_orthogonal():
    net = PQN["QNetwork"](5, 3).net
    for layer in net[::3]:
        w = layer.weight.detach().double()
        gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        torch.testing.assert_close(gram, 2 * torch.eye(len(gram), dtype=torch.float64), atol=1e-5, rtol=1e-4)
        assert (layer.bias == 0).all()


def test_acts_greedily():
    torch.manual_seed(0)
    net = PQN["QNetwork"](6, 4)
    obs = np.random.default_rng(0).normal(size=(300, 2, 3))
    action, q = net.act(obs), values(net.net, obs.reshape(300, 6))
    assert isinstance(action, np.ndarray) and len(set(action)) > 1
    np.testing.assert_allclose(q[np.arange(300), action], q.max(1), atol=1e-4)


# ---------------------------------------------------------------------- the real script's variables
def test_returns_are_those_of_the_rollout(train):
    """With a learning rate of 0 the script is a pure function of its rollout."""
    v = train("pqn", "--env-id", "probes:ShortCartPole-v0", "--learning-rate", "0", *SMALL)
    q = values(v["q_network"].net, v["obs"].reshape(32, -1).astype(float))
    np.testing.assert_allclose(v["value"].flatten(), q.max(1), rtol=1e-4, atol=1e-5)
    last = values(v["q_network"].net, v["next_obs"].astype(float)).max(1)
    assert v["done"].any() and v["rollout"].returns.shape == (32,)
    for n in range(2):
        columns = (v[name][:, n] for name in ("reward", "value", "done", "final_value"))
        want = mixture(*columns, last[n], 0.99, 0.65)
        np.testing.assert_allclose(v["rollout"].returns.numpy().reshape(16, 2)[:, n], want, rtol=1e-4)
    np.testing.assert_array_equal(v["rollout"].obs.numpy().reshape(v["obs"].shape), v["obs"])
    np.testing.assert_array_equal(v["rollout"].action.numpy().reshape(16, 2), v["action"])


def test_time_limit_bootstraps(train):
    """What a cut step must hold: the value of the best action where it led."""
    v = train("pqn", "--env-id", "probes:ShortCartPole-v0", "--learning-rate", "0", *SMALL)
    env = gym.make("CartPole-v1").unwrapped
    env.reset()
    ends = np.argwhere(v["done"])
    assert len(ends) >= 4
    for t, n in ends:
        env.state = v["obs"][t, n]
        final_obs, _, terminated, _, _ = env.step(int(v["action"][t, n]))
        assert not terminated
        expected = values(v["q_network"].net, final_obs[None].astype(float)).max()
        assert v["final_value"][t, n] == pytest.approx(expected, abs=1e-4) and expected != 0
    assert (v["final_value"][v["done"] == 0] == 0).all()


def test_a_real_end_does_not_bootstrap(train):
    v = train("pqn", "--env-id", "probes:OneStep-v0", *SMALL)
    assert v["done"].all() and (v["final_value"] == 0).all() and (v["rollout"].returns == 1).all()


def test_epsilon_falls_and_the_learning_rate_is_annealed(train):
    v = train("pqn", *SMALL, "--start-e", "0.9", "--end-e", "0.1", "--exploration-fraction", "0.5")
    logged = rows(v["run"].dir, "charts/epsilon")
    np.testing.assert_allclose([row["charts/epsilon"] for row in logged], [0.9, 0.5, 0.1, 0.1], atol=1e-12)
    rates = [row["charts/learning_rate"] for row in logged]
    np.testing.assert_allclose(rates, 2.5e-4 * np.array([1, 0.75, 0.5, 0.25]))
    v = train("pqn", *SMALL, "--no-anneal-lr")
    assert {row["charts/learning_rate"] for row in rows(v["run"].dir, "charts/learning_rate")} == {2.5e-4}


@pytest.mark.parametrize("epsilon", [0.0, 0.4])
def test_actions_are_random_with_probability_epsilon(epsilon, train):
    """Of two actions one is greedy: it is taken with probability 1 - epsilon + epsilon / 2, in every environment."""
    flags = ["--num-steps", "1024", "--total-timesteps", "2048", "--learning-rate", "0", "--update-epochs", "1"]
    v = train("pqn", *SMALL, *flags, "--start-e", epsilon, "--end-e", epsilon)
    is_greedy = v["action"] == v["q_network"].act(v["obs"].reshape(2048, -1)).reshape(1024, 2)
    share = 1 - epsilon / 2
    for n in range(2):
        assert is_greedy[:, n].mean() == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / 1024))


def test_minibatches_cover_the_batch_once_per_epoch(train, batches):
    rollout = train("pqn", *SMALL, "--update-epochs", "3")["rollout"]
    assert len(batches) == 4 * 3 * 2 and all(len(x) == 16 for batch in batches for x in batch)
    rows_of = lambda batch: torch.cat([x.reshape(len(x), -1).double() for x in batch], 1)  # noqa: E731
    epochs = [torch.cat([rows_of(batch) for batch in batches[i : i + 2]]).tolist() for i in (18, 20, 22)]
    assert all(sorted(epoch) == sorted(rows_of(rollout).tolist()) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_optimizer_is_radam_with_clipped_gradients(train):
    """The first steps of RAdam go along the mean of the clipped gradients; clipped to nothing, nothing is learned."""
    v, still = train("pqn", *SMALL), train("pqn", *SMALL, "--max-grad-norm", "0")
    assert type(v["optimizer"]) is torch.optim.RAdam and v["args"].max_grad_norm == 10
    torch.manual_seed(1)
    assert torch.equal(weights(still["q_network"]), weights(PQN["QNetwork"](4, 2)))
    assert not torch.equal(weights(v["q_network"]), weights(still["q_network"]))


def test_same_seed_same_weights_and_another_seed_others(train):
    a, b, c = (weights(train("pqn", *SMALL, "--seed", seed)["q_network"]) for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_resumed_equals_uninterrupted(train):
    """The last checkpoint thrown away, the run goes on from the one before."""
    whole = train("pqn", *SMALL, "--total-timesteps", "320", "--save-every", "192")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("pqn", "--resume", run_dir)
    assert v["start"] == 6 and comparable(run_dir) == expected
    assert torch.equal(weights(v["q_network"]), weights(whole["q_network"]))
    (state,), (same) = v["optimizer"].state.values(), next(iter(whole["optimizer"].state.values()))
    assert all(torch.equal(state[key], same[key]) for key in same) and "exp_avg" in same


def test_fast_changes_results_only_by_rounding(train):
    fast, plain = (train("pqn", *SMALL, *more) for more in ([], ["--no-fast"]))
    assert len(fast["optimizer"].state) == 1 and len(plain["optimizer"].state) == 10
    assert np.array_equal(fast["action"], plain["action"])
    torch.testing.assert_close(weights(fast["q_network"]), weights(plain["q_network"]), rtol=1e-5, atol=1e-6)


def test_other_spaces_and_minibatches_are_refused(train):
    train("pqn", "--env-id", "Pendulum-v1", *SMALL, code=2)
    assert "use ppo_continuous_action.py" in train.out
    train("pqn", "--env-id", "probes:Pixels-v0", *SMALL, code=2)
    assert "; use dqn_image.py" in train.out
    train("pqn", *SMALL, "--num-minibatches", "3", code=2)
    assert "--num-minibatches 3 must divide the batch of 32 steps" in train.out and "Traceback" not in train.out


def test_every_logged_key_is_on_the_page(train):
    logged = {key for row in rows(train("pqn", *SMALL)["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged == documented_keys("pqn")


# ---------------------------------------------------------------------- it learns
def best_value(variables, obs):
    return variables["q_network"](torch.tensor([[float(obs)]])).max().item()


def test_learns_a_value_from_the_observation(train):
    v = train("pqn", "--env-id", "probes:SeesReward-v0", *PROBE)
    assert best_value(v, 1) == pytest.approx(1, abs=0.1) and best_value(v, -1) == pytest.approx(-1, abs=0.1)


def test_learns_to_discount(train):
    v = train("pqn", "--env-id", "probes:Delayed-v0", "--gamma", "0.5", *PROBE)
    assert best_value(v, 0) == pytest.approx(0.5, abs=0.07) and best_value(v, 1) == pytest.approx(1, abs=0.07)


def test_learns_a_policy_of_the_observation(train):
    v = train("pqn", "--env-id", "probes:ActionMustMatch-v0", *PROBE)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] == 1.0
    assert v["q_network"].act(np.array([[1.0], [-1.0]])).tolist() == [1, 0]


def test_value_of_a_constant_reward_under_a_time_limit(train):
    """The time limit is no end of the task: 1 / (1 - gamma), where a limit taken for an end would give 6.5. At an
    observation of 0 only the last bias learns: the linear layers give 0, and so does their normalisation."""
    flags = ["--gamma", "0.9", *PROBE, "--learning-rate", "0.1"]
    v = train("pqn", "--env-id", "probes:Forever-v0", *flags)
    assert best_value(v, 0) == pytest.approx(10, abs=0.5)
