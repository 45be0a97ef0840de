"""ppo_lstm.py and ppo_lstm_masked.py: memory of vectors, and what masks allow, in acting, learning and evaluation."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows
from gymnasium.vector import SyncVectorEnv

from solorl.compute.speed import GradientStep
from solorl.games.cue import Cue
from solorl.run.evaluation import play_episodes

FILES = {name: definitions(name) for name in ("ppo_lstm", "ppo_lstm_masked")}
NAMES = pytest.mark.parametrize("name", FILES)
SIZE = 64  # of the memory
SMALL = "--num-envs 4 --num-steps 16 --num-minibatches 2 --update-epochs 1 --eval-episodes 2".split()


class Lessons(gym.Env):
    """Random observations (2, 2); an episode is cut after 7 steps or ends after 5. With `masked`
    one of 3 actions, drawn in each step, is not allowed, and to take it is an error; at the end none is allowed."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2, 2), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, masked=False, nothing_at=-1):
        self.masked, self.nothing_at = masked, nothing_at

    def _seen(self, over=False):
        self.mask = np.arange(3) != self.np_random.integers(3)
        self.mask &= not over and self.time != self.nothing_at
        obs = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return obs, {"action_mask": self.mask} if self.masked else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.long = 0, self.np_random.random() < 0.5
        return self._seen()

    def step(self, action):
        if self.masked and not self.mask[action]:
            raise ValueError(f"action {action} is not allowed")
        self.time += 1
        cut, over = self.long and self.time == 7, not self.long and self.time == 5
        obs, info = self._seen(cut or over)
        return obs, float(action), over, cut, info


gym.register("Lessons-v0", Lessons)
gym.register("LessonsMasked-v0", Lessons, kwargs={"masked": True})
gym.register("LessonsStuck-v0", Lessons, kwargs={"masked": True, "nothing_at": 3})
ENV = {"ppo_lstm": "Lessons-v0", "ppo_lstm_masked": "LessonsMasked-v0"}


def still(train, name):
    """Variables of a rollout with frozen weights, and the `infos` of its steps."""
    infos, step = [], SyncVectorEnv.step

    def note(self, action):
        result = step(self, action)
        infos.append(result[4])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncVectorEnv, "step", note)
        v = train(name, "--env-id", ENV[name], *SMALL, "--learning-rate", "0", "--total-timesteps", "128")
    return v, infos[-16:]


def make_agent(name, obs_dim=3, num_actions=3):
    """An agent with logits of some size."""
    torch.manual_seed(0)
    agent = FILES[name]["Agent"](obs_dim, num_actions)
    torch.nn.init.orthogonal_(agent.actor.weight)
    return agent


def sequence(steps, envs, seed=0):
    """Random observations, a memory, starts of episodes, and masks that allow at least one action."""
    rng = np.random.default_rng(seed)
    obs, state = rng.normal(size=(steps, envs, 3)), rng.normal(size=(2, envs, SIZE))
    first, mask = rng.random((steps, envs)) < 0.4, rng.random((steps, envs, 3)) < 0.5
    mask[..., 1] |= ~mask.any(-1)
    obs, state = (torch.as_tensor(x, dtype=torch.float32) for x in (obs, state))
    return obs, state, torch.as_tensor(first), torch.as_tensor(mask)


# ---------------------------------------------------------------------- the networks
@NAMES
def test_the_memory_is_the_lstm_of_the_paper(name):
    """Gates and states by hand, in double precision; the same step by step, as in acting."""
    agent = make_agent(name)
    with torch.no_grad():
        for parameter in agent.lstm.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    obs, state, first, _ = sequence(5, 3)
    with torch.no_grad():
        logits, value, last = agent(obs, state, first)
    w = {key: x.detach().double().numpy() for key, x in agent.named_parameters()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    h, c = state.double().numpy()
    for t in range(5):
        step_logits, step_value, state = agent.step(obs[t].numpy(), state, first[t].numpy())
        h, c = h * ~first[t, :, None].numpy(), c * ~first[t, :, None].numpy()
        x = np.tanh(obs[t].double().numpy() @ w["encoder.0.weight"].T + w["encoder.0.bias"])
        gates = x @ w["lstm.weight_ih"].T + w["lstm.bias_ih"] + h @ w["lstm.weight_hh"].T + w["lstm.bias_hh"]
        i, f, g, o = np.split(gates, 4, 1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        for got in (logits[t], step_logits):
            np.testing.assert_allclose(got, h @ w["actor.weight"].T + w["actor.bias"], atol=1e-5)
        for got in (value[t], step_value):
            np.testing.assert_allclose(got, (h @ w["critic.weight"].T + w["critic.bias"])[:, 0], atol=1e-5)
    for got in (last, state):
        np.testing.assert_allclose(got, [h, c], atol=1e-5)


@NAMES
def test_loss_by_hand(name):
    """Eq. 9 in NumPy from logits and values; what a mask does not allow takes no part in the softmax."""
    agent, file = make_agent(name), FILES[name]
    obs, state, first, mask = sequence(4, 3)
    masked = name.endswith("masked")
    action = mask.long().argmax(-1) if masked else torch.randint(0, 3, (4, 3))
    given = {"obs": obs, "first": first, "state": state, "action": action} | ({"mask": mask} if masked else {})
    with torch.no_grad():
        logits, v, _ = (x.double().numpy() for x in agent(obs, state, first))
    p = np.exp(logits) * (mask.numpy() if masked else 1)
    p /= p.sum(-1, keepdims=True)
    logprob = np.log(np.take_along_axis(p, action[..., None].numpy(), -1)[..., 0])
    rng = np.random.default_rng(1)
    old_logprob, (old_value, adv, ret) = logprob + 0.2 * rng.normal(size=(4, 3)), rng.normal(size=(3, 4, 3))
    numbers = {"logprob": old_logprob, "value": old_value, "advantage": adv, "returns": ret}
    batch = file["Batch"](**given, **{key: torch.as_tensor(x, dtype=torch.float32) for key, x in numbers.items()})
    args = file["Args"](clip_coef=0.1, vf_coef=0.7, ent_coef=0.3)
    got, metrics = file["ppo_lstm_masked_loss" if masked else "ppo_lstm_loss"](agent, batch, args)
    ratio, adv = np.exp(logprob - old_logprob), (adv - adv.mean()) / (adv.std(ddof=1) + 1e-8)
    policy = np.minimum(ratio * adv, ratio.clip(0.9, 1.1) * adv).mean()
    value_loss = 0.5 * np.maximum((v - ret) ** 2, (old_value + (v - old_value).clip(-0.1, 0.1) - ret) ** 2).mean()
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1).mean()
    assert got.item() == pytest.approx(-policy + 0.7 * value_loss - 0.3 * entropy, rel=1e-4)
    assert metrics["losses/entropy"].item() == pytest.approx(entropy, rel=1e-4)
    got.backward()
    assert all(parameter.grad.isfinite().all() for parameter in agent.parameters())


# ---------------------------------------------------------------------- the rollout
@NAMES
def test_the_memory_is_forgotten_between_episodes_and_bootstraps_where_one_is_cut(name, train):
    """Step by step from the memory before the rollout: its values, and that of each final observation, which is seen
    with the memory of the episode that was cut. An end of the task has none."""
    v, infos = still(train, name)
    agent, state = v["agent"], v["rollout"].state
    assert (v["first"][1:] == v["done"][:-1]).all() and v["timeout"].any() and (v["done"] > v["timeout"]).any()
    assert (state != 0).any() and (v["final_value"][~v["timeout"]] == 0).all()
    none = np.zeros(1, bool)
    for t in range(16):
        state = state * torch.as_tensor(~v["first"][t])[:, None]  # by hand, so that no step forgets
        _, value, state = agent.step(v["obs"][t], state, np.zeros(4, bool))
        np.testing.assert_allclose(v["value"][t], value, atol=1e-5)
        for n in np.flatnonzero(v["timeout"][t]):
            final_obs = infos[t]["final_obs"][n][None]
            want, empty = (agent.step(final_obs, s, none)[1][0] for s in (state[:, [n]], 0 * state[:, [n]]))
            assert v["final_value"][t, n] == pytest.approx(want, abs=1e-5) and abs(want - empty) > 1e-3
            target = v["reward"][t, n] + 0.99 * want
            assert v["rollout"].returns[t, n].item() == pytest.approx(target, abs=1e-4)


@NAMES
def test_the_first_ratio_of_an_iteration_is_one(name, train, monkeypatch):
    """The loss finds the log-probabilities of acting, over ends of episodes, until the weights change."""
    found, step = [], GradientStep.__call__

    def note(self, batch, args):
        given = [x for key, x in batch._asdict().items() if key in ("obs", "mask", "action")]
        with torch.no_grad():
            logprob = self.module.evaluate_actions(given[0], batch.state, batch.first, *given[1:])[0]
        found.append((logprob - batch.logprob).exp().sub(1).abs().max().item())
        return step(self, batch, args)

    monkeypatch.setattr(GradientStep, "__call__", note)
    train(name, "--env-id", ENV[name], *SMALL, "--total-timesteps", "192", "--learning-rate", "0.01")
    assert len(found) == 3 * 2 and max(found[::2]) < 1e-4 and min(found[1::2]) > 1e-4


@NAMES
def test_a_minibatch_is_the_whole_rollout_of_some_environments(name, train, batches):
    v = train(name, "--env-id", ENV[name], *SMALL, "--total-timesteps", "64", "--update-epochs", "2")
    assert len(batches) == 4 and all(batch.action.shape == (16, 2) for batch in batches)
    for epoch in (batches[:2], batches[2:]):
        found = []
        for batch in epoch:
            for k in range(2):  # all parts are of the same environment
                n = next(n for n in range(4) if torch.equal(v["rollout"].logprob[:, n], batch.logprob[:, k]))
                assert all(torch.equal(x[:, n], y[:, k]) for x, y in zip(v["rollout"], batch, strict=True))
                found.append(n)
        assert sorted(found) == [0, 1, 2, 3]


@NAMES
def test_minibatches_must_divide_the_environments(name, train):
    train(name, "--env-id", ENV[name], *SMALL, "--num-minibatches", "3", code=2)
    assert "--num-minibatches must divide --num-envs" in train.out
    assert train.out.count("\n") == 1


# ---------------------------------------------------------------------- masks
def test_no_masked_action_is_ever_taken(train):
    """The environment refuses them with an error, in training and evaluation; the stored masks agree."""
    v = train("ppo_lstm_masked", "--env-id", "LessonsMasked-v0", *SMALL, "--total-timesteps", "512")
    taken = np.take_along_axis(v["mask"], v["action"][..., None], -1)
    assert taken.all() and v["mask"].sum() == 2 * 16 * 4 and set(np.unique(v["action"])) == {0, 1, 2}


def test_the_probability_of_masked_actions_is_exactly_zero():
    """Also where their logits are the largest: in learning, in acting and in evaluation."""
    agent, file = make_agent("ppo_lstm_masked"), FILES["ppo_lstm_masked"]
    torch.nn.init.orthogonal_(agent.actor.weight, 300.0)
    obs, state, first, mask = sequence(50, 4)
    with torch.no_grad():
        logits = agent(obs, state, first)[0]
        for action in range(3):
            logprob = agent.evaluate_actions(obs, state, first, mask, torch.full((50, 4), action))[0]
            assert (logprob.exp()[~mask[..., action]] == 0).all() and logprob.isfinite().all()
    logits, mask = logits.flatten(0, 1).numpy(), mask.flatten(0, 1).numpy()
    assert not mask[np.arange(200), logits.argmax(1)].all()
    np.random.seed(0)
    for _ in range(20):
        action, logprob = file["sample_categorical"](file["allowed_logits"](logits, mask))
        assert mask[np.arange(200), action].all() and np.isfinite(logprob).all()
    greedy, _ = agent.act(obs.flatten(0, 1).numpy(), None, np.ones(200, bool), mask)
    assert mask[np.arange(200), greedy].all()


def test_without_masks_another_file_is_named(train, tmp_path):
    train("ppo_lstm_masked", "--env-id", "Lessons-v0", *SMALL, code=2)
    assert train.out == "error: Lessons-v0 gives no action_mask; use ppo_lstm.py\n" and not list(tmp_path.iterdir())


def test_a_mask_that_allows_nothing_ends_the_run_in_one_sentence(train):
    """At an observation acted on; that of a final observation may."""
    train("ppo_lstm_masked", "--env-id", "LessonsStuck-v0", *SMALL, code=2)
    assert train.out.splitlines()[-1] == "error: LessonsStuck-v0 gives an action_mask that allows no action"
    assert "Traceback" not in train.out


# ---------------------------------------------------------------------- checkpoints and evaluation
@NAMES
def test_resumed_equals_uninterrupted(name, train):
    """In the middle of an episode: what was remembered is in the checkpoint."""
    flags = ["--env-id", ENV[name], *SMALL, "--total-timesteps", "256", "--save-every", "128"]
    whole = train(name, *flags, "--learning-rate", "0.01", "--no-anneal-lr")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] == 2 and comparable(run_dir) == expected
    weights = zip(v["agent"].parameters(), whole["agent"].parameters(), strict=True)
    assert all(torch.equal(x, y) for x, y in weights)
    assert torch.equal(v["now"].state, whole["now"].state) and np.array_equal(v["obs"], whole["obs"])


@NAMES
def test_evaluation_remembers(name):
    """A whole game step by step gives the most likely of the allowed actions of the sequence."""
    agent, seen = make_agent(name, num_actions=3 if name.endswith("masked") else 2), []

    def act(obs, state, first, action_mask):
        masks = {"action_mask": action_mask} if name.endswith("masked") else {}
        action, state = agent.act(obs, state, first, **masks)
        seen.append((obs.copy(), first, action))
        return action, state

    play_episodes([Cue(masked=name.endswith("masked"))], act, [3])
    obs, first, action = (torch.as_tensor(np.stack(x)) for x in zip(*seen, strict=True))
    assert len(obs) == 31 and first[0].all() and not first[1:].any()
    with torch.no_grad():
        logits = agent(obs, torch.zeros(2, 1, SIZE), first)[0]
    if name.endswith("masked"):
        assert (action[:-1] == 2).all() and action[-1] == logits[-1, :, :2].argmax(-1)
    else:
        assert torch.equal(action, logits.argmax(-1))


# ---------------------------------------------------------------------- it learns
@pytest.mark.slow
@NAMES
def test_remembers_a_cue_over_30_steps(name, train):
    flags = ["--target-return", "0.95", "--eval-every", "20000", "--eval-episodes", "100", "--save-every", "0"]
    v = train(name, *flags, "--log-every", "20000")
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.95
