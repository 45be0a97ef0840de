"""ppg_procgen.py: the auxiliary phase: its loss, when it comes, what it learns from, what a checkpoint holds of it."""

import math
import shutil

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, rows
from pixel_probe import FakeProcgen, use_fake_envpool

from solorl.compute.speed import GradientStep
from solorl.envs.vector import VectorEnvs

PPG = definitions("ppg_procgen")
# phases of 2 rollouts of 24 steps
SHORT = (
    "--env-id CatchEasy-v0 --num-envs 2 --num-steps 12 --num-minibatches 2 --learning-rate 0.001 --policy-iterations 2 "
    "--aux-epochs 3 --aux-minibatches 2 --eval-episodes 1 --eval-every 0 --total-timesteps 96"
).split()


@pytest.fixture(autouse=True)
def envpool(monkeypatch):
    """EnvPool replaced by a game of catching a ball."""
    use_fake_envpool(monkeypatch)


@pytest.fixture
def aux_inputs(monkeypatch):
    """What the auxiliary phases of the trainings get from now on: obs, returns, old_logits, the weight, and the
    metrics that come of them, for each gradient step."""
    seen, step = [], GradientStep.__call__

    def note(self, *inputs):
        metrics = step(self, *inputs)
        if len(inputs) == 4:
            seen.append((*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs), metrics))
        return metrics

    monkeypatch.setattr(GradientStep, "__call__", note)
    return seen


def small_agent():
    """An agent that sees 3 numbers, with 4 actions."""
    torch.manual_seed(0)
    agent = PPG["Agent"](4)
    agent.policy_network, agent.value_network = (
        torch.nn.Sequential(torch.nn.Linear(3, 256), torch.nn.Tanh()) for _ in range(2)
    )
    torch.nn.init.normal_(agent.actor.weight)
    return agent


def gradients(agent, loss):
    """Names of the parts of the agent that a loss has a gradient for."""
    agent.zero_grad(set_to_none=True)
    loss.backward()
    return {name.partition(".")[0] for name, p in agent.named_parameters() if p.grad is not None and p.grad.any()}


# ---------------------------------------------------------------------- losses
def test_the_auxiliary_loss_is_that_of_the_paper():
    """L_aux + beta KL[old, new] + L_value, summed by hand over states and actions."""
    agent, obs, returns, old = small_agent(), torch.randn(6, 3), torch.randn(6), 2 * torch.randn(6, 4)
    loss, metrics = PPG["aux_loss"](agent, obs, returns, old, 0.7)
    with torch.no_grad():
        features = agent.policy_network(obs)
        logits, aux = agent.actor(features).tolist(), agent.aux_critic(features)[:, 0].tolist()
        value = agent.critic(agent.value_network(obs))[:, 0].tolist()

    def softmax(row):
        return [math.exp(x) / sum(map(math.exp, row)) for x in row]

    kl = sum(p * math.log(p / q) for a, b in zip(old.tolist(), logits, strict=True)
             for p, q in zip(softmax(a), softmax(b), strict=True)) / 6  # fmt: skip
    errors = [sum((x - r) ** 2 for x, r in zip(xs, returns.tolist(), strict=True)) / 12 for xs in (aux, value)]
    assert metrics["losses/aux_policy_kl"].item() == pytest.approx(kl, rel=1e-4) and kl > 0.1
    assert metrics["losses/aux_value_loss"].item() == pytest.approx(errors[0], rel=1e-4)
    assert metrics["losses/aux_true_value_loss"].item() == pytest.approx(errors[1], rel=1e-4)
    assert loss.item() == pytest.approx(errors[0] + 0.7 * kl + errors[1], rel=1e-4)


def test_cloning_holds_the_policy_where_it_is():
    """The distance from itself is 0, and least there; that of another policy pulls towards it, in its network only."""
    agent, obs, returns = small_agent(), torch.randn(6, 3), torch.zeros(6)
    logits = agent.logits(obs)
    _, at_home = PPG["aux_loss"](agent, obs, returns, logits + 5, 1.0)  # the same policy
    assert abs(at_home["losses/aux_policy_kl"].item()) < 1e-6
    agent.zero_grad()
    at_home["losses/aux_policy_kl"].backward()
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in agent.parameters())
    _, away = PPG["aux_loss"](agent, obs, returns, torch.randn(6, 4), 1.0)
    assert gradients(agent, away["losses/aux_policy_kl"]) == {"actor", "policy_network"}


def test_values_and_policy_learn_apart_outside_the_auxiliary_phase():
    agent, args = small_agent(), PPG["Args"]()
    obs, zeros = torch.randn(6, 3), torch.zeros(6)
    batch = PPG["Batch"](obs, zeros.long(), zeros, zeros, torch.randn(6), torch.randn(6))
    _, metrics = PPG["ppo_loss"](agent, batch, args)
    loss = 0.5 * ((agent(obs)[1] - batch.returns) ** 2).mean()
    assert gradients(agent, loss) == {"value_network", "critic"}
    assert metrics["losses/value_loss"].item() == pytest.approx(loss.item())  # not clipped
    loss, _ = PPG["ppo_loss"](agent, batch, args)
    assert gradients(agent, loss) == {"policy_network", "value_network", "actor", "critic"}
    loss, _ = PPG["aux_loss"](agent, obs, batch.returns, torch.randn(6, 4), 1.0)
    assert gradients(agent, loss) == {"policy_network", "value_network", "actor", "critic", "aux_critic"}


def test_actions_are_those_of_the_policys_network():
    np.random.seed(0)
    agent, obs = small_agent(), torch.randn(5, 3)
    logits, value = agent(obs)
    kept, aux, same = agent.auxiliary(obs)
    assert agent.act(obs.numpy()).tolist() == logits.argmax(1).tolist()
    torch.testing.assert_close((kept, same), (logits, value), rtol=0, atol=0)
    assert not torch.isclose(aux, value).any() and not agent.logits(obs).requires_grad
    drawn = np.stack([agent.sample(obs.numpy()) for _ in range(2000)])
    for i, want in enumerate(logits.softmax(1).detach().numpy()):
        np.testing.assert_allclose(np.bincount(drawn[:, i], minlength=4) / 2000, want, atol=0.05)


# ---------------------------------------------------------------------- the auxiliary phase
def test_it_comes_after_every_phase_and_sees_each_of_its_states_once_in_an_epoch(train, aux_inputs):
    v = train("ppg_procgen", *SHORT)  # 4 rollouts of 24 steps
    assert len(aux_inputs) == 2 * 3 * 4 and all(len(inputs[0]) == 12 for inputs in aux_inputs)  # phases, epochs, parts
    for phase in range(2):
        epochs = [aux_inputs[12 * phase + 4 * epoch :][:4] for epoch in range(3)]
        returns = [torch.cat([inputs[1] for inputs in epoch]) for epoch in epochs]
        assert all(torch.equal(each.sort()[0], returns[0].sort()[0]) for each in returns[1:])
        assert not torch.equal(returns[0], returns[1])  # in another order
    buffer = v["buffer"].arrays
    assert torch.equal(returns[0].sort()[0], torch.as_tensor(buffer["returns"]).sort()[0])
    newest = v["rollout"].returns.numpy(), v["obs"].reshape(24, 3, 64, 64)
    np.testing.assert_array_equal(buffer["returns"][24:], newest[0])
    np.testing.assert_array_equal(buffer["obs"][24:], newest[1])
    assert v["buffer"].inserted == 96 and v["buffer"].capacity == 48
    keys = [set(row) & {"losses/aux_policy_kl", "losses/policy_loss"} for row in rows(v["run"].dir, "charts/SPS")]
    assert [len(found) for found in keys] == [1, 2, 1, 2]


def test_states_and_targets_belong_together(train, aux_inputs):
    """In each minibatch they are rows of the buffer."""
    v = train("ppg_procgen", *SHORT, "--total-timesteps", 48)
    rows_of = {(image.tobytes(), r) for image, r in zip(*v["buffer"].arrays.values(), strict=True)}
    assert len(rows_of) > 40 and len({image for image, _ in rows_of}) > 30
    for images, targets, *_ in aux_inputs:
        assert {(x.tobytes(), r) for x, r in zip(images.numpy(), targets.numpy(), strict=True)} <= rows_of


def test_the_policy_to_be_kept_is_that_before_the_phase(train, aux_inputs):
    """The same for a state in all epochs, though the network changes; so the first step has the distance 0."""
    train("ppg_procgen", *SHORT, "--total-timesteps", 48)
    kept = {}
    for images, _, old_logits, beta, _ in aux_inputs:
        assert beta == 1.0 and old_logits.shape == (12, 15)
        for image, logits in zip(images.numpy(), old_logits, strict=True):
            torch.testing.assert_close(kept.setdefault(image.tobytes(), logits), logits, rtol=0, atol=1e-6)
    assert len(kept) > 30
    distances = [inputs[-1]["losses/aux_policy_kl"].item() for inputs in aux_inputs]
    assert abs(distances[0]) < 1e-6 and max(distances) > 1e-5


def test_without_epochs_there_is_no_such_phase(train, aux_inputs):
    train("ppg_procgen", *SHORT, "--aux-epochs", 0, "--total-timesteps", 24)
    assert not aux_inputs


@pytest.mark.slow
def test_learning_rates_fall_over_the_whole_training(train):
    """Of both optimisers; not within each phase."""
    v = train("ppg_procgen", *SHORT, "--anneal-lr")
    rates = [row["charts/learning_rate"] for row in rows(v["run"].dir, "charts/learning_rate")]
    np.testing.assert_allclose(rates, [1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert v["aux_optimizer"].param_groups[0]["lr"] == v["optimizer"].param_groups[0]["lr"] == rates[-1]


def test_a_training_shorter_than_a_phase_is_refused(train):
    train("ppg_procgen", *SHORT, "--total-timesteps", 24, code=2)
    assert "--total-timesteps is less than 2 rollouts (--policy-iterations)" in train.out
    train("ppg_procgen", *SHORT, "--aux-minibatches", 7, code=2)
    assert "--aux-minibatches must divide the 24 steps of a rollout" in train.out


def test_a_phase_that_does_not_fit_into_memory_is_refused(train, monkeypatch):
    monkeypatch.setattr("solorl.machine.memory", lambda: 10**6)
    assert sum(x.nbytes for x in PPG["Buffer"](64, (3, 64, 64)).arrays.values()) == 64 * (12_288 + 4)
    train("ppg_procgen", *SHORT, "--policy-iterations", 4, code=2)
    assert "needs 0.0 GiB of memory, but there are 0.0 GiB; it must be less than 81" in train.out


# ---------------------------------------------------------------------- resume
class Catch(gym.Env):
    """A single game, whose state a checkpoint can hold."""

    observation_space, action_space = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8), gym.spaces.Discrete(15)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.pool = FakeProcgen(1, [int(self.np_random.integers(1000))], 100, 0, 0)
        return self.pool.reset()[0][0], {}

    def step(self, action):
        obs, reward, terminated, *_ = self.pool.step(np.array([action]))
        return obs[0], float(reward[0]), bool(terminated[0]), False, {}


@pytest.fixture
def saved_games(monkeypatch):
    """In the place of EnvPool's games, which a checkpoint cannot hold."""
    monkeypatch.setattr(
        "solorl.envs.envpool.EnvPoolVectorEnv", lambda env_id, num_envs, **options: VectorEnvs([Catch] * num_envs)
    )
    monkeypatch.setattr("solorl.checkpoints.checkpoint.KEEP", 100)
    monkeypatch.setattr("solorl.checkpoints.replay.ReplayLog.forget", lambda self: None)


def cut(run_dir, step):
    """Throw all checkpoints after a step away."""
    for path in (run_dir / "checkpoint").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("step", [72, *(pytest.param(step, marks=pytest.mark.slow) for step in (24, 48))])
def test_resumed_in_any_rollout_of_a_phase_equals_uninterrupted(step, train, saved_games):
    """With --save-replay also in the middle of a phase, as before and after the auxiliary one."""
    whole = train("ppg_procgen", *SHORT, "--save-every", 24, "--save-replay", "--gamma", 0.9)
    expected, run_dir = comparable(whole["run"].dir), cut(whole["run"].dir, step)
    v = train("ppg_procgen", "--resume", run_dir)
    assert v["start"] == step // 24 and comparable(run_dir) == expected
    for name in ("agent", "aux_optimizer", "return_normalizer"):
        torch.testing.assert_close(v[name].state_dict(), whole[name].state_dict(), rtol=0, atol=0)
    for name, array in v["buffer"].arrays.items():
        np.testing.assert_array_equal(array, whole["buffer"].arrays[name])


@pytest.mark.slow
def test_without_save_replay_the_next_auxiliary_phase_has_the_rollouts_since_the_resume(train, saved_games, aux_inputs):
    """A checkpoint then holds no images, and the run says what is lost."""
    run_dir = cut(train("ppg_procgen", *SHORT, "--save-every", 24)["run"].dir, 72)
    assert not (run_dir / "replay").exists()
    assert sum(path.stat().st_size for path in (run_dir / "checkpoint" / "step_72").rglob("*")) < 30e6
    aux_inputs.clear()
    v = train("ppg_procgen", "--resume", run_dir)
    assert "the part buffer was not saved (--save-replay does it)" in train.out
    assert v["start"] == 3 and len(v["buffer"]) == 24 and len(aux_inputs) == 3 * 2
    seen = torch.cat([inputs[1] for inputs in aux_inputs[:2]]).sort()[0]
    assert torch.equal(seen, v["rollout"].returns.sort()[0])


@pytest.mark.slow
def test_learns_to_catch_on_levels_that_it_has_not_seen(train):
    """Random actions have about 1, the best ones 10."""
    fast = (
        "--env-id CatchEasy-v0 --num-envs 16 --num-steps 16 --num-minibatches 4 --total-timesteps 16384 --gamma 0.9 "
        "--learning-rate 1e-3 --policy-iterations 4 --aux-epochs 1 --aux-minibatches 4"
    )
    v = train("ppg_procgen", *fast.split(), "--eval-every", 0, "--eval-episodes", 50)
    assert v["run"].evaluator.score > 4
