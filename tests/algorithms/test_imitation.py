"""Imitation: mixtures and labels of DAgger, losses and rewards of GAIL and AIRL by hand, ends of episodes; that rewards
of the environment are never learned from; what they must learn."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, rows
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from plain_expert import POLICIES, expert_folder
from recorded import recorded

import solorl
from solorl.data.dataset import Dataset, read

DAGGER, GAIL, AIRL = (definitions(name) for name in ("dagger", "gail", "airl"))
PPO, PPO_BOX = definitions("ppo"), definitions("ppo_continuous_action")
SHORT = "--eval-every 0 --eval-episodes 1".split()
ROUNDS = ["--num-envs", "2", "--num-steps", "6", "--gradient-steps", "3", "--batch-size", "8", *SHORT]
TINY = "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2".split() + SHORT
TINY += "--discriminator-batch-size 8 --discriminator-steps 3".split()


def episodes(env_id):
    """Recorded steps of the expert of a formula, whole episodes and two that the end of the recording cuts."""
    return recorded(env_id, 1200, 2, POLICIES[env_id])


def expert_of(name, env_id):
    """The flags of an environment and its expert: a run to ask, or what one has done."""
    own = ["--expert", expert_folder("--env-id", env_id)] if name == "dagger" else ["--dataset", episodes(env_id)]
    return ["--env-id", env_id, *own]


def words(name, total):
    return [*(ROUNDS if name == "dagger" else TINY), "--total-timesteps", total]


# ---------------------------------------------------------------------- all three
ADVERSARIAL = ("gail", "airl")
NAMES = ("dagger", *ADVERSARIAL)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("name", NAMES)
def test_resumed_equals_uninterrupted(train, name, env_id):
    """With the labels of all rounds; with the discriminator and its optimiser."""
    flags = [*expert_of(name, env_id), *words(name, 96), "--save-every", "32"]
    whole = train(name, *flags)
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train(name, "--resume", run_dir)
    assert v["start"] > 0 and comparable(run_dir) == expected
    for part in ("actor",) if name == "dagger" else ("agent", "discriminator"):
        for key, x in v[part].state_dict().items():
            assert torch.equal(x, whole[part].state_dict()[key]), key


@pytest.mark.parametrize("name", NAMES)
def test_rewards_of_the_environment_are_not_learned_from(train, name, monkeypatch):
    """With other rewards all weights are equal, and all metrics that are not returns."""
    flags = [*expert_of(name, "CartPole-v1"), *words(name, 64)]
    whole, step = train(name, *flags), CartPoleEnv.step

    def other(self, action):
        obs, _, *rest = step(self, action)
        return obs, 1000 * float(obs[0]) - 7, *rest

    monkeypatch.setattr(CartPoleEnv, "step", other)
    v = train(name, *flags)
    for part in ("actor",) if name == "dagger" else ("agent", "discriminator"):
        for key, x in v[part].state_dict().items():
            assert torch.equal(x, whole[part].state_dict()[key]), key
    earned = {"charts/episodic_return", "charts/expert_share", "eval/episodic_return", "eval/episodic_return_std"}
    found = [
        [{k: x for k, x in row.items() if k not in earned} for row in comparable(each["run"].dir)]
        for each in (v, whole)
    ]
    assert found[0] == found[1]
    assert comparable(v["run"].dir) != comparable(whole["run"].dir)


@pytest.mark.parametrize("name", NAMES)
def test_the_share_is_that_of_the_experts_return_and_the_keys_those_of_the_page(train, name):
    """Of episodes that ended since the last row, their mean return by the expert's."""
    env_id = "probes:ActionMustMatch-v0" if name == "dagger" else "CartPole-v1"  # where some episodes end
    v = train(name, *expert_of(name, env_id), *words(name, 96))
    expert = v["expert"].score if name == "dagger" else read(episodes(env_id)).whole_returns().mean()
    assert expert == {"dagger": 1}.get(name, 500)
    returns, shares = [], 0
    for row in rows(v["run"].dir):
        returns += [row["charts/episodic_return"]] if "charts/episodic_return" in row else []
        if any(key.startswith("losses/") for key in row):
            assert ("charts/expert_share" in row) == bool(returns)
            if returns:
                assert row["charts/expert_share"] == pytest.approx(np.mean(returns) / expert, rel=1e-5)
            returns, shares = [], shares + bool(returns)
    assert shares > 0
    logged = {key for row in comparable(v["run"].dir) for key in row} | {"charts/SPS"}
    assert logged - {"global_step"} == documented_keys(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_plays_without_its_expert(train, name):
    v = train(name, *expert_of(name, "Pendulum-v1"), *words(name, 32))
    policy = solorl.load(v["run"].dir, device="cpu")
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    act = v["actor"].act if name == "dagger" else v["agent"].act
    np.testing.assert_allclose(policy(obs), act(obs), atol=1e-6)


@pytest.mark.parametrize("env_id", ["probes:ActionMustMatch-v0", "probes_offpolicy:AimWhereSeen-v0"])
@pytest.mark.parametrize("name", ["dagger", *(pytest.param(name, marks=pytest.mark.slow) for name in ADVERSARIAL)])
def test_learns_what_the_expert_does(train, name, env_id):
    """The best returns are 1 and 0, those without learning 0 and -0.5, of one action of two."""
    flags = "--num-envs 8 --num-steps 32 --learning-rate 0.003 --eval-every 0 --eval-episodes 20".split()
    flags += "--gradient-steps 60 --total-timesteps 1024".split() if name == "dagger" else []
    if name != "dagger":
        flags += "--num-minibatches 4 --update-epochs 4 --discriminator-batch-size 64 --std-init 0.3".split()
        flags += ["--total-timesteps", "7680"]
    v = train(name, *expert_of(name, env_id), *flags, "--log-every", "1024")
    score = rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"]
    assert score == 1.0 if env_id.startswith("probes:") else score > -0.25


# ---------------------------------------------------------------------- DAgger
def test_the_experts_share_of_the_actions_falls_linearly():
    assert [DAGGER["beta_of"](i, 4) for i in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]
    assert [DAGGER["beta_of"](i, 1) for i in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("shape", [(), (2,)])
def test_each_environment_draws_who_acts(shape):
    """Whole actions are of one of the two, each with its probability, apart from those of other environments."""
    expert, learner = np.ones((20_000, *shape), np.float32), np.zeros((20_000, *shape), np.float32)
    np.random.seed(0)
    for beta in (0, 0.3, 1):
        action = DAGGER["mixed_action"](expert, learner, beta)
        assert abs(action.mean() - beta) < 0.01 and action.shape == learner.shape
        assert (action.reshape(20_000, -1).min(1) == action.reshape(20_000, -1).max(1)).all()
    assert not learner.any() and expert.all()


def test_actions_of_an_expert_in_other_bounds():
    box = gym.spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([1.0, 10.0], np.float32))
    action = np.array([[-2.0, 10.0], [-0.5, 5.0], [7.0, -3.0]])
    np.testing.assert_allclose(DAGGER["in_unit_box"](action, box), [[-1, 1], [0, 0], [1, -1]], atol=1e-7)


def test_the_data_is_what_was_visited_in_the_order_of_rounds(train):
    """CartPole's own equations lead from each state to the next, by the expert's action in the first round and by the
    learner's after it; each state has the label of the expert."""
    flags = [*expert_of("dagger", "CartPole-v1"), *words("dagger", 36), "--beta-rounds", "1", "--learning-rate", "0"]
    v = train("dagger", *flags)
    assert v["num_rounds"] == 3 and [len(each) for each in v["data"].obs] == [12, 12, 12]
    assert [row["charts/beta"] for row in rows(v["run"].dir, "charts/beta")] == [1, 0, 0]
    obs = np.array(v["data"].obs).reshape(3, 6, 2, 4)
    label = np.array(v["data"].action).reshape(3, 6, 2)
    np.testing.assert_array_equal(label.ravel(), POLICIES["CartPole-v1"](obs.reshape(-1, 4)))
    scale, env, seen = DAGGER["Standardize"], CartPoleEnv(), 0
    for i in range(3):
        acting = label[i]
        if i > 0:  # the weights stand still, the statistics are those of the rounds before
            actor = DAGGER["Actor"](scale(obs[:i].reshape(-1, 4)), 2, True)
            actor.net.load_state_dict(v["actor"].net.state_dict())
            acting = actor.act(obs[i].reshape(-1, 4)).reshape(6, 2)
            seen += (acting != label[i]).sum()
        for t in range(5):
            for n in range(2):
                env.reset()
                env.state = obs[i, t, n].astype(np.float64)
                following, _, over, *_ = env.step(int(acting[t, n]))
                if not over:  # else a new episode begins
                    np.testing.assert_allclose(obs[i, t + 1, n], following, atol=1e-5)
    assert seen > 0  # else the learner's actions could be the expert's


def test_all_rounds_are_learned_from(train, batches):
    v = train("dagger", *expert_of("dagger", "CartPole-v1"), *words("dagger", 36))
    seen, asked = np.concatenate(v["data"].obs), np.concatenate(v["data"].action)
    found = set()
    for batch in batches[-3:]:
        for row, action in zip(batch.obs.numpy(), batch.action.numpy(), strict=True):
            [place] = np.flatnonzero((seen == row).all(1))
            assert asked[place] == action
            found.add(place // 12)
    assert found == {0, 1, 2} and len(batches) == 9
    np.testing.assert_allclose(v["actor"].scale.mean, seen.mean(0), rtol=1e-4)


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "turned:Turned-v0"])
def test_an_expert_that_its_environment_clips_gives_labels_within_bounds(train, env_id):
    """Those that the registered environment has, whatever it wraps."""
    folder = expert_folder("--env-id", env_id, "--clipped")
    v = train("dagger", "--env-id", env_id, "--expert", folder, *words("dagger", 24))
    seen, asked = np.concatenate(v["data"].obs), np.concatenate(v["data"].action)
    expected = np.clip(1.5 * POLICIES["Pendulum-v1"](seen), -1, 1)
    np.testing.assert_allclose(asked, expected, atol=1e-6)
    assert (np.abs(asked) == 1).any() and (np.abs(asked) < 1).any()


def test_experts_that_cannot_be_asked_are_refused(train):
    flags = ["--env-id", "CartPole-v1", *words("dagger", 24)]
    cart, pendulum = expert_folder("--env-id", "CartPole-v1"), expert_folder("--env-id", "Pendulum-v1")
    remembers = expert_folder("--env-id", "CartPole-v1", "--remembers")
    cases = {
        "there is no expert: --expert must name a run folder": [],
        "was trained on Pendulum-v1, not on CartPole-v1": ["--expert", pendulum],
        "acts by more than an observation alone": ["--expert", remembers],
    }
    for sentence, more in cases.items():
        train("dagger", *flags, *more, code=2)
        assert sentence in train.out and train.out.count("\n") == 1
    train("dagger", *flags, "--expert", cart)


# ---------------------------------------------------------------------- GAIL
def steps(obs, action):
    return GAIL["Steps"](torch.tensor(obs), torch.tensor(action))


def linear(steps):
    """A discriminator whose gradient is (1, 2) everywhere."""
    return steps.obs[:, 0] + 2 * steps.action[:, 0]


def test_discriminator_loss_by_hand():
    """D of the expert is .9 and .5, of the learner .2 twice; the gradient has the length 5 ** .5."""
    logit = {d: math.log(d / (1 - d)) for d in (0.9, 0.2)}
    expert, learner = (
        steps([[logit[0.9]], [-2.0]], [[0.0], [1 - 1e-6]]),
        steps([[logit[0.2]], [logit[0.2]]], [[0.0]] * 2),
    )
    cross_entropy = -(math.log(0.9) + math.log(0.5)) / 2 - math.log(0.8)
    for weight in (0, 3):
        loss, metrics = GAIL["discriminator_loss"](linear, expert, learner, weight)
        assert loss.item() == pytest.approx(cross_entropy + weight * (5**0.5 - 1) ** 2, rel=1e-5)
        assert metrics["losses/discriminator_loss"].item() == pytest.approx(cross_entropy, rel=1e-5)
    assert metrics["losses/expert_accuracy"] == 0.5 and metrics["losses/learner_accuracy"] == 1


def test_the_penalty_is_of_the_slopes_between_both_kinds_of_steps():
    """L = o^2 / 2 has the slope o, which is asked for between -1 and 1 only; its weights get a gradient."""
    weight, seen = torch.tensor(1.0, requires_grad=True), []

    def square(steps):
        seen.append(steps.obs.detach())
        return weight * steps.obs[:, 0] ** 2 / 2 + 0 * steps.action.sum(1)

    expert, learner = steps(np.ones((4000, 1)), np.zeros((4000, 2))), steps(-np.ones((4000, 1)), np.zeros((4000, 2)))
    torch.manual_seed(0)
    penalty = GAIL["slope_penalty"](square, expert, learner)
    assert seen[0].abs().max() <= 1 and seen[0].min() < -0.99 and seen[0].max() > 0.99
    assert penalty.item() == pytest.approx(((seen[0].abs() - 1) ** 2).mean().item())
    penalty.backward()
    assert weight.grad.item() == pytest.approx((2 * (seen[0].abs() - 1) * seen[0].abs()).mean().item())


def test_rewards_by_hand():
    """softplus is never negative and grows with D; logit is 0 where D cannot tell."""
    d = np.array([0.01, 0.2, 0.5, 0.9])
    logit = torch.tensor(np.log(d / (1 - d)))
    np.testing.assert_allclose(GAIL["imitation_reward"](logit, "softplus"), -np.log(1 - d))
    np.testing.assert_allclose(GAIL["imitation_reward"](logit, "logit"), np.log(d) - np.log(1 - d))


def test_the_discriminator_finds_the_ratio_of_the_probabilities():
    """One state, two actions: the expert takes the second in 80 % of the steps, the learner in 30 %."""
    torch.manual_seed(0)
    obs, choose = np.zeros((10, 1), np.float32), np.eye(2, dtype=np.float32)
    expert, learner = steps(obs, choose[[1] * 8 + [0] * 2]), steps(obs, choose[[1] * 3 + [0] * 7])
    discriminator = GAIL["Discriminator"](1, 2)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        GAIL["discriminator_loss"](discriminator, expert, learner, 0)[0].backward()
        optimizer.step()
    found = discriminator(steps(obs[:2], choose)).detach().numpy()
    np.testing.assert_allclose(found, np.log([0.2 / 0.7, 0.8 / 0.3]), atol=0.05)


def test_the_discriminator_sees_actions_as_the_environment_takes_them():
    taken = GAIL["as_taken"](torch.tensor([[-3.0, 0.5], [1.0, 1.25]]), None)
    assert taken.tolist() == [[-1, 0.5], [1, 1]]
    assert GAIL["as_taken"](torch.tensor([2, 0]), 3).tolist() == [[0, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_only_whole_episodes_are_learned_from(count):
    """Against a loop over episodes, of which the end of the recording cut some."""
    episode = np.repeat(np.arange(6), [3, 1, 4, 2, 5, 2])
    cut = np.array([True, False, False, True, False, False])
    rest = [np.zeros(len(episode))] * 6
    data = Dataset(*rest, episode=episode, cut=cut)
    whole = [i for i in range(6) if not cut[i]]
    kept = whole[:count] if count else whole
    assert GAIL["whole_episodes"](data, count).tolist() == [i in kept for i in episode]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_agent_is_that_of_ppo(env_id):
    torch.manual_seed(0)
    discrete = env_id == "CartPole-v1"
    agent = GAIL["Agent"](3, 2, 0.7, discrete).double()
    plain = (PPO["Agent"](3, 2) if discrete else PPO_BOX["Agent"](3, 2, 0.7)).double()
    plain.load_state_dict({key: x for key, x in agent.state_dict().items() if key in plain.state_dict()})
    obs, action = torch.randn(6, 3).double(), torch.randint(2, (6,)) if discrete else torch.randn(6, 2).double()
    for x, y in zip(agent.evaluate_actions(obs, action), plain.evaluate_actions(obs, action), strict=True):
        torch.testing.assert_close(x, y)
    raw = np.random.default_rng(0).normal(size=(6, 3))
    np.testing.assert_allclose(agent.float().act(raw), plain.float().act(raw.astype(np.float32)), rtol=1e-5)
    assert ("log_std" in agent.state_dict()) != discrete


@pytest.mark.parametrize("part", [GAIL, AIRL], ids=ADVERSARIAL)
def test_greedy_actions_lie_in_the_bounds_of_their_space(part):
    """A data set holds actions of their space only."""
    agent = part["Agent"](3, 2, 0.7, False)
    with torch.no_grad():
        agent.actor[-1].bias += torch.tensor([3.0, -0.25])
    action = agent.act(np.zeros((5, 3)))
    assert (action[:, 0] == 1).all() and (action[:, 1] > -1).all() and (action[:, 1] < 0).all()


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("reward", ["softplus", "logit"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_rewards_are_those_of_the_discriminator(train, name, reward, env_id):
    """Of the learner's own steps, after it has learned; the statistics of observations stand still meanwhile."""
    v = train(name, *expert_of(name, env_id), *words(name, 64), "--reward", reward, "--learning-rate", "0")
    obs, action = v["obs"].reshape(32, -1), v["action"].reshape(32, *v["space"].shape)
    np.testing.assert_array_equal(v["learner"].obs, obs)
    taken = np.eye(2)[action] if env_id == "CartPole-v1" else action.clip(-1, 1)
    np.testing.assert_allclose(v["learner"].action, taken)
    with torch.no_grad():
        d = v["discriminator"](v["learner"]).double().sigmoid().numpy()
    expected = -np.log(1 - d) if reward == "softplus" else np.log(d) - np.log(1 - d)
    np.testing.assert_allclose(v["reward"].ravel(), expected, rtol=1e-3, atol=1e-5)
    assert np.std(v["reward"]) > 0 and not np.allclose(v["reward"], v["true_reward"])
    mean = rows(v["run"].dir, "losses/imitation_reward")[-1]["losses/imitation_reward"]
    assert mean == pytest.approx(v["reward"].mean(), rel=1e-5)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_the_experts_steps_are_those_of_the_data(train, name):
    """The first whole episodes, seen with the statistics with which the learner acted."""
    v = train(name, *expert_of(name, "CartPole-v1"), *words(name, 32), "--expert-episodes", "1")
    data = read(episodes("CartPole-v1"))
    first = np.flatnonzero(~data.cut)[0]
    rows_of = data.episode == first
    np.testing.assert_allclose(v["expert"].obs, data.obs[rows_of].clip(-10, 10), rtol=1e-5)  # nothing was seen before
    np.testing.assert_array_equal(v["expert"].action.argmax(1), data.action[rows_of])
    assert v["expert_return"] == data.returns()[first]


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_data_that_does_not_do_is_refused(train, name):
    flags = ["--env-id", "CartPole-v1", *words(name, 32)]
    train(name, *flags, code=2)
    assert "error: --dataset must name a data set" in train.out
    whole = int((~read(episodes("CartPole-v1")).cut).sum())
    train(name, *flags, "--dataset", episodes("CartPole-v1"), "--expert-episodes", whole + 1, code=2)
    assert f"has {whole} whole episodes; --expert-episodes {whole + 1}" in train.out and train.out.count("\n") == 1
    train(name, *flags, "--dataset", recorded("CartPole-v1", 8, 2), code=2)  # none ends
    assert "has 0 whole episodes" in train.out


# ---------------------------------------------------------------------- AIRL
def transitions(terminated=(0.0, 1.0), logprob=(-0.5, -2.0)):
    rng = torch.Generator().manual_seed(1)
    obs, next_obs, action = (torch.randn(2, width, generator=rng) for width in (3, 3, 2))
    return AIRL["Transitions"](obs, action, next_obs, torch.tensor(terminated), torch.tensor(logprob))


def test_f_by_hand():
    """f = g + gamma h' - h, h' = 0 after the end of the task; D = exp(f) / (exp(f) + pi)."""
    torch.manual_seed(0)
    discriminator, x = AIRL["ShapedDiscriminator"](3, 2, 0.9), transitions()
    with torch.no_grad():
        g = discriminator.g(torch.cat([x.obs, x.action], 1))[:, 0].numpy()
        h, next_h = (discriminator.h(each)[:, 0].numpy() for each in (x.obs, x.next_obs))
        f, d = discriminator.f(x).numpy(), discriminator(x).sigmoid().numpy()
    np.testing.assert_allclose(f, [g[0] + 0.9 * next_h[0] - h[0], g[1] - h[1]], rtol=1e-5)
    np.testing.assert_allclose(d, np.exp(f) / (np.exp(f) + np.exp([-0.5, -2.0])), rtol=1e-5)
    assert abs(next_h[1]) > 1e-3


def test_shaping_adds_up_to_the_value_of_the_first_state():
    """Over an episode to its end the discounted sum of f is that of g less h of the first state."""
    torch.manual_seed(0)
    discriminator = AIRL["ShapedDiscriminator"](3, 2, 0.9)
    obs, action, zero = torch.randn(6, 3), torch.randn(5, 2), torch.zeros(5)
    x = AIRL["Transitions"](obs[:-1], action, obs[1:], torch.tensor([0.0, 0, 0, 0, 1]), zero)
    with torch.no_grad():
        discount = 0.9 ** torch.arange(5)
        g = discriminator.g(torch.cat([x.obs, x.action], 1))[:, 0]
        expected = (discount * g).sum() - discriminator.h(obs[:1])[0, 0]
        torch.testing.assert_close((discount * discriminator.f(x)).sum(), expected)


@pytest.mark.parametrize(
    ("env_id", "ends"), [("probes:ShortCartPole-v0", "time limit"), ("probes:ActionMustMatch-v0", "task")]
)
def test_only_the_end_of_the_task_ends_the_shaping(train, env_id, ends):
    data = recorded(env_id, 40, 2)
    v = train("airl", "--env-id", env_id, "--dataset", data, *words("airl", 32))
    learner, expert, done = v["learner"], v["expert"], v["done"]
    assert done.any() and v["timeout"].any() == (ends == "time limit")
    assert bool(learner.terminated.any()) == bool(expert.terminated.any()) == (ends == "task")
    np.testing.assert_array_equal(learner.terminated, (done * (ends == "task")).ravel())
    np.testing.assert_array_equal(learner.next_obs, v["final_obs"].reshape(32, -1))
    inside = ~(done[:-1] > 0)
    np.testing.assert_array_equal(v["final_obs"][:-1][inside], v["obs"][1:][inside])
    chosen = ~read(data).cut[read(data).episode]
    np.testing.assert_allclose(expert.next_obs, read(data).next_obs[chosen].clip(-10, 10), rtol=1e-5)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_log_probabilities_are_the_policys_of_what_was_done(train, env_id):
    """Of clipped actions; those that a Gaussian never draws are bounded."""
    flags = [*expert_of("airl", env_id), *words("airl", 32), "--learning-rate", "0", "--std-init", "0.02"]
    v = train("airl", *flags)
    agent, discrete = v["agent"], env_id == "CartPole-v1"
    for each in (v["expert"], v["learner"]):
        action = each.action.argmax(1) if discrete else each.action
        with torch.no_grad():
            logprob = agent.evaluate_actions(each.obs, action)[0]
        torch.testing.assert_close(each.logprob, logprob.clamp(-10, 10))
        if not discrete:
            assert each.action.abs().max() <= 1
    if discrete:
        torch.testing.assert_close(v["learner"].logprob, torch.as_tensor(v["logprob"].ravel()))
    else:
        assert v["expert"].logprob.min() == -10


def test_at_its_optimum_f_is_the_experts_log_probability():
    """One state that always ends: where D cannot tell better, f = ln of the expert's share of the steps."""
    torch.manual_seed(0)
    obs, choose, done = torch.zeros(10, 1), torch.eye(2), torch.ones(10)
    pi = torch.tensor([0.7, 0.3]).log()
    kinds = {"expert": [1] * 8 + [0] * 2, "learner": [1] * 3 + [0] * 7}
    both = [AIRL["Transitions"](obs, choose[i], obs, done, pi[i]) for i in kinds.values()]
    discriminator = AIRL["ShapedDiscriminator"](1, 2, 0.99)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=0.01)
    for _ in range(300):
        optimizer.zero_grad()
        AIRL["discriminator_loss"](discriminator, *both, 0)[0].backward()
        optimizer.step()
    x = AIRL["Transitions"](obs[:2], choose, obs[:2], done[:2], pi)
    np.testing.assert_allclose(discriminator.f(x).detach(), np.log([0.2, 0.8]), atol=0.05)
