"""The small games: what the scripted best policy and random actions score, masks, and the same games in JAX."""

import gymnasium as gym
import numpy as np
import pytest
from best_actions import best_action
from gymnasium.utils.env_checker import check_env

import solorl.games as games

IDS = [f"games/{name}" for name in games.GAMES]
# Mean return of the best policy and of random (allowed) actions
SCORES = {
    "games/Cue-v0": (1.0, 0.5),
    "games/Cue60-v0": (1.0, 0.5),
    "games/CueMasked-v0": (1.0, 0.5),
    "games/CueContinuous-v0": (1.0, 0.5),
    "games/KeyAndDoor-v0": (1.0, 0.0),
    "games/KeyAndDoorLarge-v0": (1.0, 0.0),
    "games/ResourceGrid-v0": (2.9, 0.0),
    "games/Tool-v0": (1.0, 1 / 9),
    "games/TwoNumbers-v0": (1.0, 1 / 4),
    "games/TwoNumbersMasked-v0": (1.0, 1 / 4),
    "games/TwoSenses-v0": (1.0, 0.5),
    "games/TwoSensesContinuous-v0": (1.0, 0.5),
    "games/MovingDot-v0": (1.0, 1 / 4),
    "games/MovingDotGrey-v0": (1.0, 1 / 4),
    "games/BitFlip15-v0": (-6.5, -15.0),
    "games/PointReach-v0": (-11.8, -50.0),
    **dict.fromkeys(("games/Pole-v0", "games/PoleImage-v0", "games/PoleDict-v0", "games/PoleHidden-v0"), (1.0, 0.08)),
}


def random_action(env, info):
    """A random action that the mask allows."""
    mask = info.get("action_mask")
    if mask is None:
        return env.action_space.sample()
    if isinstance(env.action_space, gym.spaces.Discrete):
        return env.np_random.choice(np.flatnonzero(mask))
    parts = np.split(mask, np.cumsum(env.action_space.nvec)[:-1])
    return np.array([env.np_random.choice(np.flatnonzero(part)) for part in parts])


def play(env, policy, episodes):
    """Mean return; `policy` maps an environment and the last info to an action."""
    env.action_space.seed(1)
    total = 0.0
    for episode in range(episodes):
        _, info = env.reset(seed=episode)
        over = False
        while not over:
            _, reward, terminated, truncated, info = env.step(policy(env, info))
            total, over = total + reward, terminated or truncated
    return total / episodes


@pytest.mark.parametrize("env_id", IDS)
def test_the_best_policy_and_random_actions_have_the_scores_of_the_page(env_id):
    env, (best, random) = gym.make(env_id), SCORES[env_id]
    assert play(env, lambda env, info: best_action(env), 40) == pytest.approx(
        best, abs=1.0 if best < 0 else 0.25 if best > 1 else 1e-6
    )
    assert play(env, random_action, 150) == pytest.approx(random, abs=0.13)


@pytest.mark.parametrize("env_id", IDS)
def test_they_keep_gymnasiums_interface(env_id):
    if "Masked" not in env_id:  # the checker takes any action
        check_env(gym.make(env_id).unwrapped, skip_render_check=True)


def test_the_cue_is_seen_only_at_the_start():
    env = gym.make("games/Cue-v0", steps=3)
    obs = [env.reset(seed=1)[0]] + [env.step(0)[0] for _ in range(3)]
    assert obs[0][:2].sum() == 1 and not np.any([each[:2] for each in obs[1:]])
    assert [each[2] for each in obs] == [0, 0, 0, 1]


def test_masked_actions_are_refused():
    env = gym.make("games/CueMasked-v0", steps=1, disable_env_checker=True).unwrapped
    _, info = env.reset(seed=1)
    assert info["action_mask"].tolist() == [False, False, True]
    with pytest.raises(ValueError, match="not allowed"):
        env.step(0)
    assert env.step(2)[4]["action_mask"].tolist() == [True, True, False]


def test_an_invalid_action_changes_nothing_but_costs_its_penalty():
    env = gym.make("games/ResourceGrid-v0", invalid_reward=-0.1).unwrapped
    obs, info = env.reset(seed=1)
    for action in np.flatnonzero(~info["action_mask"]):
        after, reward, *_ = env.step(action)
        assert reward == -0.1 and (after == obs).all()
    assert info["action_mask"].sum() <= 5


@pytest.mark.parametrize("hide", ["image", "vector"])
def test_one_sense_alone_tells_nothing(hide):
    """Among observations that are equal in the other entry both answers are right equally often."""
    env = gym.make("games/TwoSenses-v0", hide=hide).unwrapped
    seen = {}
    obs, _ = env.reset(seed=1)
    for _ in range(3000):
        key = bool(obs["image"][:, :4].any()) if hide == "vector" else bool(obs["vector"][1] > 0)
        seen.setdefault(key, []).append(best_action(env))
        assert not obs[hide].any()
        obs, *_ = env.step(0)
    assert len(seen) == 2 and all(abs(np.mean(answers) - 0.5) < 0.05 for answers in seen.values())


GOALS = ["games/BitFlip15-v0", "games/PointReach-v0", *(f"games/{name}" for name in games.GOALS)]


def transitions(env, steps, policy):
    """What `steps` steps led to: rewards, achieved and desired goals, which steps were the end of the task, infos."""
    env.action_space.seed(1)
    obs, info = env.reset(seed=1)
    seen = []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(policy(env, info))
        seen.append((reward, obs["achieved_goal"], obs["desired_goal"], terminated, info))
        if terminated or truncated:
            env.reset()
    reward, achieved, desired, terminated, infos = zip(*seen, strict=True)
    return np.array(reward), np.stack(achieved), np.stack(desired), np.array(terminated), infos


@pytest.mark.parametrize("env_id", GOALS)
def test_rewards_follow_from_the_goals(env_id):
    """One by one and as a batch; the penalty of a crash, which ends an episode, does not belong to the goal."""
    if env_id.removeprefix("games/") in games.GOALS:
        pytest.importorskip("envpool")
    env, half = gym.make(env_id), 150
    policies = [random_action] + ([lambda env, info: best_action(env)] if env_id in SCORES else [])
    for policy in policies:
        reward, achieved, desired, terminated, infos = transitions(env, half, policy)
        compute = env.get_wrapper_attr("compute_reward")
        crashed = terminated if "parking" in env_id else np.zeros(half, bool)
        np.testing.assert_allclose(compute(achieved, desired, {})[~crashed], reward[~crashed], atol=1e-6)
        pairs = [compute(a, d, {}) for a, d in zip(achieved, desired, strict=True)]
        np.testing.assert_allclose(pairs, compute(achieved, desired, {}), atol=1e-6)
    if env_id in SCORES:  # the last policy has reached goals
        assert [info["is_success"] for info in infos] == (reward == 0).tolist() and 0 < (reward == 0).mean() < 1
        assert terminated.tolist() == ((reward == 0) & (env_id != "games/PointReach-v0")).tolist()
        assert env.unwrapped.compute_reward(np.zeros((2, 3, 4)), np.zeros(4), {}).shape == (2, 3)


def test_the_number_of_bits_is_that_of_the_steps():
    env = gym.make("games/BitFlip15-v0", bits=4)
    obs, _ = env.reset(seed=3)
    flipped = [env.step(0)[0]["observation"] - obs["observation"], env.step(0)[0]["observation"] - obs["observation"]]
    assert np.abs(flipped).tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]
    assert env.step(1)[3] is False and env.step(1)[3] is True and env.action_space.n == 4


def test_the_point_moves_as_it_is_pushed_and_stays_inside():
    env = gym.make("games/PointReach-v0", disable_env_checker=True).unwrapped
    obs, _ = env.reset(seed=1)
    assert obs["observation"].tolist() == [0, 0]
    np.testing.assert_allclose(env.step(np.array([0.5, -3.0]))[0]["observation"], [0.025, -0.05])
    for _ in range(48):
        obs, _, terminated, truncated, _ = env.step(np.array([1.0, 1.0]))
        assert not terminated and not truncated
    assert obs["achieved_goal"].tolist() == [1, 1] and env.step(np.zeros(2))[3]


@pytest.mark.parametrize(
    ("env_id", "shape"), [("games/BitFlip15-v0", (40, 300, 3)), ("games/PointReach-v0", (256,) * 2 + (3,))]
)
def test_pictures_show_place_and_goal(env_id, shape):
    env = gym.make(env_id, render_mode="rgb_array")
    env.reset(seed=1)
    before = env.render()
    env.step(best_action(env))
    after = env.render()
    assert before.shape == shape and before.dtype == np.uint8 and (before != after).any()


@pytest.mark.parametrize("kwargs", [{}, {"height": 40, "width": 56, "grey": True}, {"channels_first": True}])
def test_the_dot_moves_as_the_hidden_direction_says(kwargs):
    env = gym.make("games/MovingDot-v0", **kwargs).unwrapped
    before, _ = env.reset(seed=1)
    assert before.shape == env.observation_space.shape

    def red(obs):
        return obs if kwargs.get("grey") else obs[0] if kwargs.get("channels_first") else obs[..., 0]

    for _ in range(30):
        after, *_ = env.step(0)
        move = env.dot * np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])[best_action(env)]
        assert (np.roll(red(before), move, (0, 1)) == red(after)).all()
        before = after


def test_the_pole_moves_by_the_equations_of_cartpole():
    """By Gymnasium's classic task with our force and step, except for the wind on the angular velocity."""
    env, classic = gym.make("games/Pole-v0").unwrapped, gym.make("CartPole-v1").unwrapped
    env.reset(seed=1)
    classic.reset(seed=1)
    classic.tau, gusts = 0.05, []
    for force in np.random.default_rng(0).uniform(-1.5, 1.5, 300):
        classic.state, classic.force_mag = env.state, 10 * np.clip(force, -1, 1)
        classic.steps_beyond_terminated = None
        env.step(np.array([force], np.float32))
        classic.step(1)
        np.testing.assert_allclose(env.state[:3], classic.state[:3], atol=1e-6)
        gusts.append(env.state[3] - classic.state[3])
        if np.abs(env.state).max() > 2:
            env.reset()
    assert np.std(gusts) == pytest.approx(0.1, rel=0.2) and np.mean(gusts) == pytest.approx(0, abs=0.03)


def test_what_is_seen_of_the_pole():
    """Numbers of the state; the two images of a dict are those of two steps and know nothing of the cart's place."""
    envs = {sees: gym.make("games/Pole-v0", sees=sees).unwrapped for sees in ("vector", "positions", "image", "dict")}
    seen = {sees: env.reset(seed=1)[0] for sees, env in envs.items()}
    for _ in range(5):
        before, state = seen, envs["dict"].state.astype(np.float32)
        np.testing.assert_array_equal(seen["vector"], state)
        np.testing.assert_array_equal(seen["positions"], state[[0, 2]])
        np.testing.assert_array_equal(seen["dict"]["cart"], state[:2])
        seen = {sees: env.step(np.ones(1, np.float32))[0] for sees, env in envs.items()}
        np.testing.assert_array_equal(seen["dict"]["image"][..., 0], before["dict"]["image"][..., 1])
    obs = []
    for place, angle in ((0, 0.3), (1, 0.3), (0, -0.3)):
        for env in envs.values():
            env.state = env.before = np.array([place, 2.0, angle, 3.0])
        obs.append([envs["image"]._obs()[..., 0], envs["dict"]._obs()["image"][..., 1]])
    (image, centred), (moved, same), (mirrored, _) = obs
    assert (centred == same).all() and (image == centred).all() and (mirrored[:, ::-1] == image).all()
    middle = [(x.sum(0) @ np.arange(32)) / x.sum() for x in (moved, image)]
    assert middle[0] - middle[1] == pytest.approx(31 / 3, abs=0.1)  # 1 m of the 3 m of the track
    with pytest.raises(ValueError, match="sees must be one of vector, positions, image, dict"):
        gym.make("games/Pole-v0", sees="nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seen", "most"), [((0, 2), 0.45), ((2, 3), 0.75), ((0, 1), 0.3)], ids=["positions", "the pole", "the cart"]
)
def test_what_is_hidden_of_the_pole_is_needed(seen, most):
    """The best of many linear policies of what is seen: without memory, and with one of the two entries of a dict."""
    env, rng, best = gym.make("games/Pole-v0"), np.random.default_rng(0), 0.0
    for _ in range(200):
        gains = np.zeros(4)
        gains[list(seen)] = rng.normal(size=2) * 2 * np.array([0.7, 0.9, 6.4, 1.6])[list(seen)]
        policy = lambda env, info, gains=gains: np.array([gains @ env.unwrapped.state], np.float32).clip(-1, 1)  # noqa: E731
        if play(env, policy, 2) > best:  # worth a longer look
            best = max(best, play(env, policy, 20))
    assert 0.05 < best < most


@pytest.mark.parametrize("env_id", ["games/Cue-v0", "games/KeyAndDoor-v0"])
def test_the_games_in_jax_are_the_same(env_id):
    jax = pytest.importorskip("jax")
    from solorl.envs.open import open_envs

    envs, env = open_envs(env_id, 1), gym.make(env_id)
    state, first = envs.reset(jax.random.PRNGKey(3))
    step, actions = jax.jit(envs.step), np.random.default_rng(1).integers(env.action_space.n, size=400)
    obs, _ = env.reset(seed=1)
    if env_id == "games/Cue-v0":
        env.unwrapped.cue = int(first[0, 1])
        obs = env.unwrapped._obs()
    np.testing.assert_array_equal(first[0], obs)
    ends = 0
    for t, action in enumerate(actions):
        if t % 3 and env_id != "games/Cue-v0":  # so that episodes end at the door, too
            action = best_action(env)
        state, got = step(jax.random.PRNGKey(t), state, np.array([action]))
        obs, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(got.final_obs[0], obs)
        assert (got.reward[0], got.terminated[0], got.truncated[0]) == (reward, terminated, truncated)
        if terminated or truncated:
            ends += 1
            env.reset()
            if env_id == "games/Cue-v0":
                env.unwrapped.cue = int(got.obs[0, 1])
    assert ends > 5
