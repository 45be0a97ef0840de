"""Games of several agents in JAX: they are mpe2's, or those of the papers; many side by side; exact resume."""

import importlib
import itertools
import re

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import comparable, own_registry, rows
from gymnasium.utils.seeding import np_random

import solorl.games.teams
from solorl.checkpoints import checkpoint
from solorl.envs import ids
from solorl.envs.open import open_envs
from solorl.envs.pettingzoo import PettingZooEnvs
from solorl.errors import UsageError
from solorl.games.teams import particles, switch
from solorl.games.teams.game import JaxTeams
from solorl.games.teams.vector import TeamEnvs, open_games
from solorl.run.evaluation import play_episodes
from solorl.scripts import script_paths

PARTICLES = [name for name, (entry, *_) in solorl.games.teams.GAMES.items() if entry.startswith("particles")]
OURS = [name for name in solorl.games.teams.GAMES if name not in PARTICLES]


def both(name, num_envs=4):
    """The same games, in one compiled call and one after the other, after their resets."""
    ours, wanted = TeamEnvs(f"team/{name}", num_envs), PettingZooEnvs([lambda: gym.make(f"team/{name}")] * num_envs)
    wanted.action_space.seed(0)  # contacts amplify the rounding of single precision: not every game stays so near
    seeds = list(range(num_envs))
    return ours, wanted, ours.reset(seed=seeds), wanted.reset(seed=seeds)


def close(ours, wanted):
    """Equal arrays (within single precision), shapes and types; of dicts of them those that `wanted` has."""
    if isinstance(wanted, dict):
        for key in (key for key in wanted if key[0] != "_"):
            close(ours[key], wanted[key])
    elif wanted.dtype.kind == "O":
        for mine, theirs in zip(ours, wanted, strict=True):
            if theirs is not None:
                close(mine, theirs)
    else:
        assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
        np.testing.assert_allclose(ours, wanted, atol=1e-5)


def steps_are_equal(ours, wanted, steps):
    """Whole games with random legal actions."""
    rng, ended = np.random.default_rng(0), 0
    for _ in range(steps):
        mask, action = wanted.action_mask, wanted.action_space.sample()
        if mask is not None:
            action = np.where(mask, rng.random(mask.shape), -1.0).argmax(-1)
        one, two = ours.step(action), wanted.step(action)
        for mine, theirs in zip(one, two, strict=True):
            close(mine, theirs)
        for attribute in ("alive", "state", "action_mask"):
            if (theirs := getattr(wanted, attribute)) is None:
                assert getattr(ours, attribute) is None and attribute not in one[4]
            else:
                close(getattr(ours, attribute), theirs)
                close(one[4][attribute], theirs)
        done = (two[2] | two[3]).all(1)
        assert ("final_obs" in one[4]) == done.any()
        ended += done.sum()
    return ended


def state_of_mpe2(envs):
    """The state in which mpe2's worlds are, as ours."""
    worlds = [env.unwrapped.game.unwrapped.world for env in envs.envs]
    place = np.stack([[entity.state.p_pos for entity in world.entities] for world in worlds])
    speed = np.stack([[agent.state.p_vel for agent in world.agents] for world in worlds])
    said = np.stack([np.resize(world.agents[0].state.c, 3) for world in worlds])
    goals = [getattr(world.agents[0], "_goal_b", None) for world in worlds]
    goal = [world.landmarks.index(goal) if goal else 0 for world, goal in zip(worlds, goals, strict=True)]
    state = particles.Particles(*(jnp.asarray(x, jnp.float32) for x in (place, speed, said)), jnp.array(goal))
    return state, jnp.zeros(len(worlds), jnp.int32)


@pytest.mark.parametrize("name", PARTICLES)
def test_particles_move_and_are_rewarded_as_in_mpe2(name):
    """Step by step from the same start, close together so that they touch; to the time limit, where mpe2's games and
    ours begin the next game each in a place of their own."""
    ours, wanted, *_ = both(name)
    for env in wanted.envs:
        for entity in env.unwrapped.game.unwrapped.world.entities:
            entity.state.p_pos *= 0.5
    ours._games = state_of_mpe2(wanted)
    assert steps_are_equal(ours, wanted, 24) == 0
    action = wanted.action_space.sample()
    if wanted.action_mask is not None:
        action = action.clip(0, 2)
    one, two = ours.step(action), wanted.step(action)
    for mine, theirs in zip(one[1:4], two[1:4], strict=True):
        close(mine, theirs)
    for key in ("final_obs", "final_info"):
        close(one[4][key], two[4][key])
    assert one[3].all() and not one[2].any()
    if "speaker" not in name:
        assert np.ptp(ours._games[0].place[:, 0], axis=0).min() > 0.1  # all games begin elsewhere


@pytest.mark.parametrize("name", OURS)
def test_games_are_the_same_one_after_the_other(name):
    """As `Game`, in which evaluation plays; also where they end, and in the next ones."""
    ours, wanted, (obs, infos), (first, told) = both(name)
    close(obs, first)
    close(infos, told)
    assert steps_are_equal(ours, wanted, 60) > 2


@pytest.mark.parametrize("name", solorl.games.teams.GAMES)
def test_the_interface_is_that_of_games_one_after_the_other(name):
    ours, wanted = TeamEnvs(f"team/{name}", 2), PettingZooEnvs([lambda: gym.make(f"team/{name}")] * 2)
    for what in ("single_observation_space", "single_action_space", "observation_space", "action_space"):
        assert getattr(ours, what) == getattr(wanted, what)
    for what in ("agents", "num_agents", "teams", "agent_obs_dims", "agent_action_dims"):
        assert getattr(ours, what) == getattr(wanted, what)
    assert ours.agent_observation_space == wanted.agent_observation_space
    assert ours.agent_action_space == wanted.agent_action_space
    assert ours.metadata["autoreset_mode"] == wanted.metadata["autoreset_mode"]


def returns_of(name, plans):
    """The return of the team for plans (n, steps, 2): what each agent does in each step."""
    envs = TeamEnvs(f"team/{name}", len(plans))
    envs.reset(seed=1)
    total = 0.0
    for t in range(plans.shape[1]):
        _, reward, terminated, truncated, _ = envs.step(plans[:, t])
        assert (reward[:, 0] == reward[:, 1]).all()
        total = total + reward.sum(1)
    return total, terminated, truncated


PENALTY = [10, 0, -100, 0, 2, 0, -100, 0, 10]
CLIMBING = [11, -30, 0, -30, 7, 6, 0, 0, 5]
QTRAN = [8, -12, -12, -12, 0, 0, -12, 0, 0]


@pytest.mark.parametrize(("name", "times", "payoffs"), [("qtran_matrix", 1, QTRAN), ("climbing", 25, CLIMBING),
                                                        ("penalty", 25, PENALTY)])  # fmt: skip
def test_matrix_games_pay_by_the_tables_of_the_papers(name, times, payoffs):
    plans = np.array(list(itertools.product(range(3), range(3))))[:, None].repeat(times, 1)
    total, terminated, truncated = returns_of(name, plans)
    np.testing.assert_array_equal(total, np.array(payoffs) * times)
    assert terminated.all() == (times == 1) and truncated.all() == (times > 1)  # a time limit is not the end


def test_two_steps_pay_by_the_first_choice_of_agent_0():
    """7 whatever both do in the second state, if agent 0 has chosen the first of the two; else [[0, 1], [1, 8]]."""
    plans = np.array([[[a, b], [c, d]] for a, b, c, d in itertools.product(range(2), repeat=4)])
    total, terminated, _ = returns_of("two_step", plans)
    assert terminated.all()
    wanted = [[[0, 1], [1, 8]][c][d] if a == 1 else 7 for (a, _), (c, d) in plans]
    np.testing.assert_array_equal(total, wanted)


def test_the_payoffs_of_a_penalty_game_are_those_asked_for():
    envs = open_games(lambda env_id: gym.make(env_id, k=-3.0, times=2), "team/penalty", 1)
    envs.reset(seed=1)
    assert envs.step(np.array([[0, 2]]))[1].sum() == -3.0 and envs.step(np.array([[0, 0]]))[3].all()


STAY, UP, DOWN, LEFT, RIGHT = range(5)


def test_switch_is_solved_by_waiting():
    """Agent 1 waits until agent 0 has left the corridor; no plan is better (all were looked through)."""
    first = [DOWN, RIGHT, RIGHT, RIGHT, RIGHT, RIGHT, UP] + [STAY] * 5
    second = [STAY] * 5 + [DOWN] + [LEFT] * 5 + [UP]
    envs = TeamEnvs("team/switch", 1)
    envs.reset(seed=1)
    total = np.zeros(2)
    for t, action in enumerate(zip(first, second, strict=True)):
        assert envs.action_mask[0, [0, 1], list(action)].all()
        _, reward, terminated, truncated, _ = envs.step(np.array([action]))
        total += reward[0]
        assert terminated.all() == (t == 11) and not truncated.any()
    np.testing.assert_allclose(total, [5 - 0.6, 5 - 1.1], atol=1e-5)


@pytest.mark.parametrize(
    ("cells", "action", "wanted", "reward"),
    [
        ([[1, 3], [1, 4]], [RIGHT, LEFT], [[1, 3], [1, 4]], [-0.1, -0.1]),  # nobody passes another
        ([[1, 3], [1, 4]], [RIGHT, RIGHT], [[1, 3], [1, 5]], [-0.1, -0.1]),  # agent 0 moves first
        ([[1, 4], [1, 3]], [RIGHT, RIGHT], [[1, 5], [1, 4]], [-0.1, -0.1]),
        ([[1, 3], [2, 6]], [UP, STAY], [[1, 3], [2, 6]], [-0.1, -0.1]),  # a wall
        ([[1, 6], [0, 0]], [UP, RIGHT], [[0, 6], [0, 0]], [5.0, 0.0]),  # who is home stays there
        ([[0, 1], [0, 5]], [UP, UP], [[0, 1], [0, 5]], [-0.1, -0.1]),
    ],
)
def test_switch_moves(cells, action, wanted, reward):
    state, paid, over = switch.step(jnp.array([cells]), jnp.array([action]))
    np.testing.assert_array_equal(state[0], wanted)
    np.testing.assert_allclose(paid[0], reward, atol=1e-6)
    assert bool(over[0]) == (wanted == [[0, 6], [0, 0]])


def test_moves_into_walls_are_masked():
    mask = np.asarray(switch.mask(jnp.array([[[1, 3], [0, 0]], [[0, 1], [2, 5]]])))
    corridor, home = [True, False, False, True, True], [True, False, False, False, False]
    np.testing.assert_array_equal(mask[0], [corridor, home])
    np.testing.assert_array_equal(mask[1], [[True, False, True, True, False], [True, True, False, False, True]])


def test_the_listener_hears_the_speaker_and_rewards_are_equal():
    envs = TeamEnvs("team/simple_speaker_listener_v4", 4)
    obs, _ = envs.reset(seed=1)
    assert not obs[:, 0, 3:].any() and not envs.action_mask[:, 0, 3:].any() and envs.action_mask[:, 1].all()
    obs, reward, *_ = envs.step(np.stack([np.arange(4) % 3, np.zeros(4, int)], 1))
    np.testing.assert_array_equal(obs[:, 1, 8:].argmax(1), np.arange(4) % 3)
    assert len(set(obs[:, 0, :3].argmax(1))) > 1 and (reward[:, 0] == reward[:, 1]).all()


# ---------------------------------------------------------------------- many side by side
def test_a_seed_decides_all_and_games_differ():
    one, two = TeamEnvs("team/simple_spread_v3", 4), TeamEnvs("team/simple_spread_v3", 4)
    first, _ = one.reset(seed=[1, 2, 3, 4])
    assert len(np.unique(first[:, 0, 2])) == 4 and not first[:, :, :2].any()
    np.testing.assert_array_equal(first, two.reset(seed=[1, 2, 3, 4])[0])
    assert (first != two.reset(seed=[1, 2, 3, 5])[0]).any()
    action = np.ones((4, 3), int)
    for _ in range(25):
        obs, *_, infos = one.step(action)
    assert not obs[:, :, :2].any() and infos["final_obs"][:, :, :2].any()  # at rest; after a whole game it is not
    assert (obs[:, 0, 2] != first[:, 0, 2]).all()


def test_a_compiled_loop_steps_them():
    """The steps of a rollout in one call; a time limit is reached everywhere at once, and play continues."""
    envs = JaxTeams("team/simple_tag_v3", 5)

    @jax.jit
    def rollout(key):
        state, obs = envs.reset(key)
        assert envs.central(state).shape == (5, 62) and envs.action_mask(state) is None and obs.shape == (5, 4, 16)

        def step(state, key):
            state, step = envs.step(key, state, jax.random.randint(key, (5, 4), 0, 5))
            return state, step

        return jax.lax.scan(step, state, jax.random.split(key, 60))[1]

    steps = rollout(jax.random.PRNGKey(1))
    np.testing.assert_array_equal(np.asarray(steps.truncated), np.arange(60)[:, None].repeat(5, 1) % 25 == 24)
    assert not steps.terminated.any() and steps.reward.shape == (60, 5, 4) and steps.action_mask is None
    for now, final in ((steps.obs, steps.final_obs), (steps.central, steps.final_central)):
        differ = (np.asarray(now) != np.asarray(final)).reshape(60, -1).any(1)
        np.testing.assert_array_equal(differ, steps.truncated[:, 0])


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ([[3, 0]] * 4, "[3, 5] actions"),
        ([[0, -1]] * 4, "[3, 5] actions"),
        ([[0, 0]] * 3, "(4, 2), not (3, 2)"),
    ],
)
def test_wrong_actions_are_refused(action, words):
    envs = TeamEnvs("team/simple_speaker_listener_v4", 4)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match=re.escape(words)):
        envs.step(np.array(action))


def test_what_is_returned_may_be_written_into():
    envs = TeamEnvs("team/two_step", 4)
    obs, _ = envs.reset(seed=1)
    obs[:] = 5.0
    obs, reward, terminated, *_ = envs.step(np.zeros((4, 2), int))
    saved = envs.state_dict()["obs"].copy()
    obs[:], reward[:], terminated[:] = 5.0, 5.0, True
    np.testing.assert_array_equal(envs.state_dict()["obs"], saved)


# ---------------------------------------------------------------------- the verb
def test_wrapped_games_are_played_one_after_the_other():
    def wrapped(env_id):
        return gym.wrappers.TransformReward(gym.make(env_id), lambda reward: 2 * reward)

    assert isinstance(open_games(gym.make, "team/two_step", 2), TeamEnvs)
    assert open_games(wrapped, "team/two_step", 2) is None and open_games(gym.make, "mpe/simple_spread_v3", 2) is None


def test_arguments_of_a_game_are_those_that_make_env_gives():
    teams = {"b": ["agent_1"], "a": ["agent_0", "agent_2"]}

    def make(env_id, **kwargs):
        return gym.make(env_id, continuous_actions=True, teams=teams, **kwargs)

    envs = open_games(make, "team/simple_spread_v3", 2)
    wanted = open_games(gym.make, "team/simple_spread_continuous_v3", 2)
    assert envs.action_space == wanted.action_space and envs.teams == {"b": [1], "a": [0, 2]} != wanted.teams
    assert isinstance(make("team/simple_spread_v3").unwrapped.agent_action_space, gym.spaces.Box)
    five = open_games(lambda env_id: gym.make(env_id, N=5), "team/simple_spread_v3", 2)
    assert five.single_observation_space == gym.make("team/simple_spread_v3", N=5).observation_space


def test_arguments_that_only_the_original_has_are_refused(capfd):
    with pytest.raises(SystemExit) as end:
        open_games(lambda env_id: gym.make(env_id, local_ratio=0.1), "team/simple_spread_v3", 2)
    assert end.value.code == 2 and "does not take local_ratio; it takes N, continuous_actions" in capfd.readouterr().err


def test_evaluation_plays_games_without_their_original():
    """The best plan of the two-step game; what an evaluation sees has masks and all agents."""

    def policy(obs, action_mask):
        assert obs.shape == (4, 2, 3) and action_mask is None
        return np.ones((4, 2), int)

    scores, lengths = play_episodes([gym.make("team/two_step") for _ in range(4)], policy, [1, 2, 3, 4])
    np.testing.assert_array_equal(scores, 8.0)
    np.testing.assert_array_equal(lengths, 2)


@pytest.mark.parametrize(
    ("name", "kind", "env_id", "words"),
    [
        ("dqn", "agents", "CartPole-v1", "CartPole-v1 has one agent, but dqn.py takes several"),
        ("dqn", "agents-jax", "CartPole-v1", "CartPole-v1 has one agent, but dqn.py takes several"),
        ("dqn", "agents-jax", "mpe/simple_spread_v3", "is not a game of several agents written in JAX, as team/simple"),
        ("ppo_jax", "jax", "team/two_step", "team/two_step has several agents, but ppo_jax.py takes one"),
        ("ppo_jax", "jax", "mpe/simple_spread_v3", "several agents, but ppo_jax.py takes one"),
        ("ppo_atari", "atari", "team/two_step", "team/two_step is not an Atari game"),
        ("ppo_pettingzoo_atari", "pettingzoo-atari", "team/two_step", "team/two_step is not an Atari game"),
        ("dqn", "agents", "team/two_stp", "there is no environment team/two_stp; did you mean team/two_step"),
    ],
)
def test_ids_of_the_other_kind_are_refused(name, kind, env_id, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        ids.check_env_id_of(script_paths()[name], env_id, kind)
    for one, good in (("agents", "mpe/simple_spread_v3"), ("agents", "team/two_step"), ("agents-jax", "team/two_step")):
        ids.check_env_id_of(script_paths()["dqn"], good, one)


def test_a_script_for_one_agent_refuses_a_game_of_a_team(train):
    train("dqn", "--env-id", "team/two_step", code=2)
    assert "error: team/two_step has several agents, but dqn.py takes one" in train.out


@pytest.mark.parametrize(
    ("hidden", "env_id", "extra"),
    [
        ("jax", "team/two_step", "jax"),
        ("mpe2", "team/simple_tag_v3", "pettingzoo"),
        ("lbforaging", "lbf/Foraging-8x8-2p-3f-v3", "lbf"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, hidden, env_id, extra):
    real = ids.importlib.util.find_spec
    monkeypatch.setattr(ids.importlib.util, "find_spec", lambda name: None if name == hidden else real(name))
    with pytest.raises(UsageError, match=re.escape(f"{env_id} needs an extra: pip install 'solorl[{extra}]'")):
        ids.check_env_id(env_id)


def test_a_file_in_jax_opens_them():
    envs = open_envs("team/two_step", 3)
    assert isinstance(envs, JaxTeams) and envs.num_envs == 3 and envs.teams == {"all": [0, 1]}


# ---------------------------------------------------------------------- resume
@pytest.mark.parametrize("name", ["simple_spread_v3", "simple_speaker_listener_v4", "two_step", "switch"])
def test_games_continue_exactly(name, tmp_path):
    """After a checkpoint on the disk, with the same random actions."""
    whole, cut = (TeamEnvs(f"team/{name}", 4) for _ in range(2))
    whole.reset(seed=[1, 2, 3, 4])
    whole.action_space.seed(1)
    for _ in range(30):
        whole.step(whole.action_space.sample())
    checkpoint.write_state(tmp_path / "saved", checkpoint.capture(whole))
    assert checkpoint.restore(cut, checkpoint.read_state(tmp_path / "saved")) == []
    for attribute in ("obs", "alive", "state", "action_mask"):
        np.testing.assert_array_equal(getattr(cut, attribute), getattr(whole, attribute))
    for _ in range(30):
        one, two = (envs.step(envs.action_space.sample()) for envs in (whole, cut))
        for x, y in zip(one[:4], two[:4], strict=True):
            np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(whole.state, cut.state)


def test_a_state_of_other_games_is_refused():
    saved = TeamEnvs("team/two_step", 4)
    saved.reset(seed=1)
    for other in (TeamEnvs("team/two_step", 2), TeamEnvs("team/climbing", 4), TeamEnvs("team/switch", 4)):
        with pytest.raises(ValueError, match=r"it is not of . games of this kind"):
            other.load_state_dict(saved.state_dict())


SCRIPT = """
from dataclasses import dataclass
import gymnasium as gym
import numpy as np
import torch
from solorl import Run, RunArgs, parse

@dataclass
class Args(RunArgs):
    env_kind = "agents"
    env_id: str = "{env_id}"
    total_timesteps: int = 240
    num_envs: int = 2

if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    envs = run.multi_agent_env(gym.make, args.env_id, args.num_envs)
    run.require_spaces(envs, obs="vector", action="discrete")
    agent = torch.nn.Linear(envs.agent_observation_space.shape[0], int(envs.agent_action_space.n))

    def act(obs, action_mask):
        with torch.no_grad():
            logits = agent(torch.as_tensor(obs))
        if action_mask is not None:
            logits[~torch.as_tensor(action_mask)] = -torch.inf
        return logits.argmax(-1).numpy()

    start = run.resume(agent=agent, envs=envs)
    obs = run.reset(envs)
    for iteration in run.loop(start, args.total_timesteps // 20):
        for step in range(10):
            chosen, drawn = act(obs, envs.action_mask), envs.action_space.sample()
            action = np.where(np.random.random((2, envs.num_agents)) < 0.5, chosen, drawn)
            obs, reward, terminated, truncated, _ = envs.step(action)
            global_step = iteration * 20 + 2 * (step + 1)
            run.episodes(global_step, reward, terminated | truncated, per_agent=True)
        run.log(global_step, {{}})
        run.evaluate(global_step, act, gym.make)
        run.save(global_step)
    run.close(act, gym.make)
"""


@pytest.mark.parametrize("env_id", ["team/simple_tag_v3", "team/two_step"])
def test_a_training_continues_exactly(train, monkeypatch, tmp_path, env_id):
    own_registry(monkeypatch)
    path = tmp_path / "agents.py"
    path.write_text(SCRIPT.format(env_id=env_id))
    flags = ["--eval-episodes", "2", "--eval-every", "120"]
    whole = train(str(path), *flags, runs_dir=tmp_path / "whole")["run"].dir
    cut = train(str(path), *flags, "--total-timesteps", "120", runs_dir=tmp_path / "cut")["run"].dir
    resumed = train(str(path), "--resume", cut, "--total-timesteps", "240", "--resume-changed")
    assert resumed["start"] == 6 and resumed["run"].restarted == [] and comparable(cut) == comparable(whole)
    assert isinstance(resumed["envs"], TeamEnvs)
    ended, evaluations = rows(whole, "charts/episodic_return"), rows(whole, "eval/episodic_return")
    assert len(ended) >= 4 and len(evaluations) == 2
    if "tag" in env_id:
        assert all(row["charts/episodic_return"] == row["charts/episodic_return_predators"] for row in ended)
        assert "eval/episodic_return_prey" in evaluations[0]


# ---------------------------------------------------------------------- foraging
def test_tuples_of_agents_are_a_game():
    """Against a loop over the package's own interface; its time limit is truncated."""
    env_id = "lbf/Foraging-8x8-2p-3f-v3"
    pytest.importorskip("lbforaging")
    importlib.import_module("solorl.envs.tuple_games")
    envs = PettingZooEnvs([lambda: gym.make(env_id)])
    raw = gym.make(env_id.partition("/")[2], disable_env_checker=True).unwrapped
    obs, _ = envs.reset(seed=[3])
    seen, _ = raw.reset(seed=int(np_random(3)[0].integers(2**31)))
    rng, over = np.random.default_rng(0), False
    while not over:
        np.testing.assert_array_equal(obs[0], seen)
        np.testing.assert_array_equal(envs.state[0], np.concatenate(seen))
        mask = [[action.value for action in raw._valid_actions[player]] for player in raw.players]
        assert [np.flatnonzero(row).tolist() for row in envs.action_mask[0]] == mask
        action = rng.integers(envs.agent_action_space.n, size=2)
        seen, rewards, over, *_ = raw.step(list(action))
        obs, reward, terminated, truncated, infos = envs.step(action[None])
        np.testing.assert_allclose(reward[0], rewards)
        assert truncated.all() == over and not terminated.any()
    np.testing.assert_array_equal(infos["final_obs"][0], seen)


def test_a_game_of_foraging_terminates_where_all_food_is_eaten():
    pytest.importorskip("lbforaging")
    importlib.import_module("solorl.envs.tuple_games")
    game = gym.make("lbf/Foraging-8x8-2p-3f-v3").unwrapped
    game.reset(seed=1)
    game.game.env.field[:] = 0
    *_, terminated, truncated, _ = game.step(np.zeros(2, int))
    assert terminated and not truncated
