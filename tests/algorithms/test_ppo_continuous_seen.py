"""ppo_image_continuous_action.py, ppo_dict_continuous_action.py and ppo_lstm_continuous_action.py: the Gaussian, what
is normalised and when, memory, clipped actions, and that they learn. Their other functions are those of other files."""

import math

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from gymnasium.vector import SyncVectorEnv
from probes_seen import HIGH, LOW, SeenEntries

import solorl

ENVS = {
    "ppo_image_continuous_action": "Image", "ppo_dict_continuous_action": "SeenEntries",
    "ppo_lstm_continuous_action": "Once",
}  # fmt: skip
IMAGE, DICT, LSTM = ENVS
NAMES = pytest.mark.parametrize("name", ENVS)
NORMALIZED = pytest.mark.parametrize("name", [DICT, LSTM])
FILES = {name: definitions(name) for name in ENVS}
SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --eval-episodes 1".split()


def flags(name, steps, *more):
    """A small training in the probe of a file."""
    return [name, "--env-id", f"probes_seen:{ENVS[name]}-v0", *SMALL, "--total-timesteps", steps, *more]


def make_agent(name):
    """An agent with means of some size, which has seen something."""
    torch.manual_seed(0)
    space = {IMAGE: (3, 16, 20), DICT: SeenEntries.observation_space.spaces, LSTM: 3}[name]
    agent = FILES[name]["Agent"](space, 2, 1.0)
    torch.nn.init.normal_((agent.actor[-1] if name == DICT else agent.actor).weight)
    agent.log_std.data = torch.tensor([0.3, -1.2])
    return agent


def inputs(name, count=10):
    """Arguments of `evaluate_actions` before the action, with normalised observations."""
    if name == LSTM:
        return torch.randn(5, count, 3), torch.randn(2, count, 64), torch.rand(5, count) < 0.4
    if name == IMAGE:
        return [torch.randint(0, 256, (count, 3, 16, 20), dtype=torch.uint8)]
    return [{"items": torch.randint(0, 256, (count, 6, 8, 1), dtype=torch.uint8), "keys": torch.randn(count, 2),
             "matrix": torch.randn(count, 2, 3)}]  # fmt: skip


def noted(train, *words):
    """Variables of a training, and the results of its steps in the environments, not those of evaluation."""
    seen, step = [], SyncVectorEnv.step

    def note(self, action):
        result = step(self, action)
        seen.extend([result] * (len(action) == 4))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncVectorEnv, "step", note)
        return train(*words), seen


def values(agent, name, obs, state=None):
    """Values of raw observations by the agent's statistics as they are: by hand, one entry after the other."""
    if name == IMAGE:
        return agent(torch.as_tensor(obs))[1].detach().numpy()
    if name == DICT:
        return agent.step(obs)[1]
    mean, deviation = (x.numpy() for x in (agent.obs_normalizer.mean, agent.obs_normalizer.var.sqrt()))
    scaled = ((obs.reshape(len(obs), -1) - mean) / (deviation + 1e-8)).clip(-10, 10)
    return agent.step(scaled, state, np.zeros(len(obs), bool))[1]


# ---------------------------------------------------------------------- the networks
@NAMES
def test_policy_is_a_gaussian(name):
    """Log-probabilities and entropies are those of torch.distributions, also far beyond the bounds of actions."""
    agent, given = make_agent(name), inputs(name)
    mean, same, *_ = agent(*given)
    action = 3 * torch.randn(mean.shape)
    logprob, entropy, value = agent.evaluate_actions(*given, action)
    gaussian = torch.distributions.Normal(mean, agent.log_std.exp().expand(mean.shape))
    torch.testing.assert_close(logprob, gaussian.log_prob(action).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, gaussian.entropy().sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(value, same) and value.shape == mean.shape[:-1]


@NAMES
def test_layers_are_orthogonal_with_their_gains(name):
    agent = make_agent(name)
    fresh = FILES[name]["Agent"](
        *({IMAGE: (3, 16, 20), DICT: SeenEntries.observation_space.spaces, LSTM: 3}[name], 2), 0.5
    )
    assert set(fresh.state_dict()) == set(agent.state_dict())
    torch.testing.assert_close(fresh.log_std, torch.full((2,), math.log(0.5)))
    heads = {"actor.weight": 0.01, "critic.weight": 1.0, "actor.2.weight": 0.01, "critic.2.weight": 1.0}
    for key, parameter in fresh.named_parameters():
        if parameter.ndim > 1:
            w = parameter.detach().double().flatten(1)
            gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
            gain = heads.get(key, 1.0 if "lstm" in key else 2**0.5)
            torch.testing.assert_close(gram, gain**2 * torch.eye(len(gram), dtype=w.dtype), atol=1e-4, rtol=1e-4)


@NAMES
def test_act_gives_the_means_for_raw_observations(name):
    """Of what was seen so far: mean and deviation are taken away from all but images, and nothing is counted."""
    agent, rng = make_agent(name), np.random.default_rng(0)
    if name == IMAGE:
        obs = rng.integers(256, size=(5, 3, 16, 20)).astype(np.uint8)
        expected, got = agent(torch.as_tensor(obs))[0], agent.act(obs)
    elif name == DICT:
        obs = {"matrix": rng.normal(5, 3, (50, 2, 3)), "keys": rng.normal([1.7e9, 0], [100, 1e-6], (50, 2)),
               "items": rng.integers(256, size=(50, 6, 8, 1)).astype(np.uint8)}  # fmt: skip
        for normalizer, key in zip(agent.obs_normalizers, ("keys", "matrix"), strict=True):
            normalizer.update(obs[key])
        scaled = {key: torch.as_tensor((x - x.mean(0)) / x.std(0)).float() for key, x in obs.items() if key != "items"}
        expected, got = agent(scaled | {"items": torch.as_tensor(obs["items"])})[0], agent.act(obs)
    else:
        obs = rng.normal([1.7e9, 0, 3], [100, 1e-6, 1], (50, 3))
        agent.obs_normalizer.update(obs)
        scaled, state = torch.as_tensor((obs - obs.mean(0)) / obs.std(0)).float(), torch.randn(2, 50, 64)
        first = rng.random(50) < 0.5
        expected, _, memory = agent(scaled[None], state, torch.as_tensor(first)[None])
        before = {key: x.clone() for key, x in agent.state_dict().items()}
        got, after = agent.act(obs, state, first)
        torch.testing.assert_close(after, memory.detach(), rtol=1e-3, atol=1e-4)
        empty, _ = agent.act(obs, None, np.zeros(50, bool))
        np.testing.assert_allclose(empty, agent.act(obs, state, np.ones(50, bool))[0], atol=1e-5)
        assert all(torch.equal(before[key], x) for key, x in agent.state_dict().items())
        expected = expected[0]
    np.testing.assert_allclose(got, expected.detach(), rtol=1e-3, atol=1e-3)


def test_statistics_of_entries_stay_on_the_host():
    agent = make_agent(DICT).to("meta")
    assert agent.log_std.device.type == "meta" and len(agent.obs_normalizers) == 2
    assert all(x.dtype == torch.float64 and x.device.type == "cpu" for x in agent.half().buffers())


# ---------------------------------------------------------------------- the rollout
@NAMES
def test_the_first_ratio_of_an_iteration_is_one(name, train, batches):
    """The loss finds the log-probabilities of acting, over ends of episodes, until the weights change; actions are
    those that were drawn, not clipped, and observations normalised as in acting."""
    v = train(*flags(name, 192, "--learning-rate", "0"))
    assert len(batches) == 6 and v["iteration"] == 2 and v["done"].sum() > 4
    agent = v["agent"]
    for batch in batches:
        given = [getattr(batch, key) for key in ("obs", "state", "first", "action") if hasattr(batch, key)]
        logprob, _, value = agent.evaluate_actions(*given)
        torch.testing.assert_close(logprob, batch.logprob, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(value, batch.value, rtol=1e-4, atol=1e-4)
    action = torch.as_tensor(v["action"])
    assert ((action < torch.as_tensor(LOW)) | (action > torch.as_tensor(HIGH))).float().mean() > 0.3
    assert action.std() == pytest.approx(1, abs=0.2)


@NAMES
def test_time_limits_bootstrap_in_the_units_of_the_value(name, train):
    """From the final observation, with the statistics of acting and with the memory of the episode that was cut; not
    where the task was over. Rewards are scaled by the returns of all environments, values are not scaled again."""
    before = train(*flags(name, 64, "--learning-rate", "0"))["agent"]
    v, seen = noted(train, *flags(name, 128, "--learning-rate", "0"))
    agent, seen = v["agent"], seen[-16:]
    ends, cuts = np.argwhere(v["done"] > v["timeout"]), np.argwhere(v["timeout"])
    assert len(ends) > 3 and len(cuts) > 3 and (v["final_value"][~v["timeout"]] == 0).all()
    scaled = v["reward"] / agent.return_normalizer.var.sqrt().item()
    np.testing.assert_allclose(v["scaled_reward"], scaled.clip(-10, 10), rtol=1e-4)
    assert agent.return_normalizer.count == 128
    state = v["rollout"].state if name == LSTM else None
    for t in range(16):
        if name == LSTM:
            state = state * torch.as_tensor(~v["first"][t])[:, None]
            _, value, state = before.step(v["obs"][t], state, np.zeros(4, bool))
            np.testing.assert_allclose(v["value"][t], value, atol=1e-5)
        for n in np.flatnonzero(v["timeout"][t]):
            final_obs = seen[t][4]["final_obs"][n]
            final_obs = {key: np.asarray(x)[None] for key, x in final_obs.items()} if name == DICT else final_obs[None]
            memory = state[:, [n]] if name == LSTM else None
            want = values(before, name, final_obs, memory)[0]
            assert v["final_value"][t, n] == pytest.approx(want, abs=1e-4)
            if name == LSTM:
                assert abs(values(before, name, final_obs, 0 * memory)[0] - want) > 1e-3
            target = v["scaled_reward"][t, n] + 0.99 * want
            returns = v["rollout"].returns.reshape(16, 4)
            assert returns[t, n].item() == pytest.approx(target, abs=1e-4)


@NORMALIZED
def test_what_is_learned_from_is_normalised_by_the_statistics_before(name, train):
    """All of the second rollout by the statistics of the first, those after it have seen both."""
    first = train(*flags(name, 64, "--learning-rate", "0"))
    v = train(*flags(name, 128, "--learning-rate", "0"))
    if name == LSTM:
        pairs = [(first["agent"].obs_normalizer, v["agent"].obs_normalizer, first["raw_obs"], v["raw_obs"],
                  v["rollout"].obs.reshape(64, 4))]  # fmt: skip
    else:
        assert v["agent"].vectors == ["keys", "matrix"]
        both = zip(v["agent"].vectors, first["agent"].obs_normalizers, v["agent"].obs_normalizers, strict=True)
        pairs = [(old, new, first["obs"][key], v["obs"][key], v["rollout"].obs[key]) for key, old, new in both]
        assert v["rollout"].obs["items"].dtype == torch.uint8
        np.testing.assert_array_equal(v["rollout"].obs["items"], v["obs"]["items"].reshape(64, 6, 8, 1))
    for old, new, raw_before, raw, learned in pairs:
        shape = raw.shape[2:]
        seen = np.concatenate([raw_before, raw]).reshape(128, *shape).astype(np.float64)
        assert old.count == 64 and new.count == 128
        np.testing.assert_allclose(new.mean, seen.mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(new.var, seen.var(0), rtol=1e-6, atol=1e-9)
        deviation = (old.var + 1e-16).sqrt().numpy()
        want = ((raw.reshape(64, *shape) - old.mean.numpy()) / deviation).clip(-10, 10)
        np.testing.assert_allclose(learned, want, rtol=1e-4, atol=1e-5)
        assert learned.dtype == torch.float32 and np.abs(want).max() > 1


def test_a_minibatch_is_the_whole_rollout_of_some_environments(train, batches):
    v = train(*flags(LSTM, 64, "--update-epochs", "2"))
    assert len(batches) == 4 and all(batch.action.shape == (16, 2, 2) for batch in batches)
    for epoch in (batches[:2], batches[2:]):
        found = []
        for batch in epoch:
            for k in range(2):
                n = next(n for n in range(4) if torch.equal(v["rollout"].logprob[:, n], batch.logprob[:, k]))
                assert all(torch.equal(x[:, n], y[:, k]) for x, y in zip(v["rollout"], batch, strict=True))
                found.append(n)
        assert sorted(found) == [0, 1, 2, 3]


# ---------------------------------------------------------------------- whole trainings
@NAMES
def test_the_environment_clips_and_evaluation_too(name, train):
    """The probe refuses what is out of its bounds; a loaded policy has the same environment."""
    v = train(*flags(name, 64, "--std-init", "3"))
    assert np.abs(v["action"]).max() > 3
    policy = solorl.load(v["run"].dir)
    env = policy.make_env()
    obs, _ = env.reset(seed=1)
    env.step(np.full(2, 9.0, np.float32))
    batch = {key: x[None] for key, x in obs.items()} if name == DICT else obs[None]
    args = (None, np.ones(1, bool)) if name == LSTM else ()
    got = policy(batch, *args)
    assert (got[0] if name == LSTM else got).shape == (1, 2)


@NAMES
def test_resumed_equals_uninterrupted(name, train):
    """In the middle of an episode: statistics, running returns and memory are in the checkpoint."""
    whole = train(*flags(name, 180, "--num-steps", "15", "--save-every", "60", "--learning-rate", "0.01"))
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 2 and v["run"].restarted == [] and comparable(run_dir) == expected
    for key, x in whole["agent"].state_dict().items():
        assert torch.equal(x, v["agent"].state_dict()[key]), key
    assert (whole["now"].so_far == v["now"].so_far).all() and (v["now"].so_far != 0).any()
    if name == LSTM:
        assert torch.equal(v["now"].state, whole["now"].state)


@NAMES
def test_same_seed_same_weights_and_another_seed_others(name, train):
    a, b, c = (train(*flags(name, 64, "--seed", seed))["agent"].state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not any(torch.equal(a[key], c[key]) for key in a if key.endswith("weight"))


@pytest.mark.parametrize(("name", "env_id", "words"), [
    (IMAGE, "games/MovingDot-v0", "discrete actions, but {} takes continuous actions; use ppo_image.py"),
    (IMAGE, "Pendulum-v1", "vector observations, but {} takes image observations; use ppo_continuous_action.py"),
    (IMAGE, "games/PoleDict-v0", "dict observations, but {} takes image observations; use ppo_dict_continuous_action"),
    (DICT, "games/TwoSenses-v0", "discrete actions, but {} takes continuous actions; use ppo_dict.py"),
    (DICT, "Pendulum-v1", "vector observations, but {} takes dict observations; use ppo_continuous_action.py"),
    (LSTM, "games/Cue-v0", "discrete actions, but {} takes continuous actions; use ppo_lstm.py"),
    (LSTM, "games/PoleImage-v0", "image observations, but {} takes vector observations; use ppo_image_continuous_ac"),
])  # fmt: skip
def test_other_spaces_are_refused_with_the_file_to_use(name, env_id, words, train, tmp_path):
    train(name, "--env-id", env_id, code=2)
    assert words.format(f"{name}.py") in train.out and train.out.count("\n") == 1 and not list(tmp_path.iterdir())


@NAMES
def test_the_first_deviation_must_be_positive(name, train):
    train(*flags(name, 64, "--std-init", "0"), code=2)
    assert "--std-init 0.0 must be above 0" in train.out


FAST = "--num-envs 32 --num-steps 16 --num-minibatches 4 --update-epochs 8 --learning-rate 0.003 --std-init 0.5".split()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "steps"), [(IMAGE, 12_288), (DICT, 16_384), (LSTM, 24_576)])
def test_learns_to_aim_at_what_it_sees_or_saw(name, steps, train):
    """The best return is 0; without the number it is that of 6 steps with a variance of 1/12 each, -0.5."""
    more = ["--gamma", "0.5", "--eval-every", "0", "--eval-episodes", "20", "--log-every", "10000"]
    v = train(*flags(name, steps), *FAST, *more)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -0.1
