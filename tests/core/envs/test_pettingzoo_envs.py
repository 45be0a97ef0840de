"""Games of several agents: the adapter against a loop over PettingZoo's raw API, returns in teams, exact resume."""

import importlib
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import ale_py
import gymnasium as gym
import mpe2.simple_spread_v3
import numpy as np
import pettingzoo
import pytest
from conftest import ROOT, comparable, own_registry, refused, rows
from duel import Duel
from gymnasium.utils.seeding import np_random
from raid import LIMIT, TEAMS, Raid

from solorl import errors
from solorl.checkpoints import env_state
from solorl.compute.device import CONFIRM, env_seed
from solorl.envs import ids, returns
from solorl.envs.pettingzoo import Game, PettingZooEnvs, register
from solorl.run.evaluation import Evaluator, play_episodes, play_games
from solorl.run.meter import Diverged, Meter
from solorl.run.pictures import film

SPREAD = "mpe/simple_spread_v3"
GAMES = {
    "raid": lambda: Raid(),
    "raid masked": lambda: Raid("masked"),
    "raid told": lambda: Raid("told"),
    "raid without a state": lambda: Raid(own_state=False),
    "spread": lambda: mpe2.simple_spread_v3.parallel_env(max_cycles=7),
}


class Loop:
    """One game played by the raw API, again and again: every array of `PettingZooEnvs` by a plain loop."""

    def __init__(self, game, seed):
        self.game, self.names, self.rng = game, game.possible_agents, np_random(seed)[0]
        self.begin()

    def begin(self):
        seen, infos = self.game.reset(seed=int(self.rng.integers(2**31)))
        self.out, self.cut = set(), set()
        return self.look(seen, infos)

    def look(self, seen, infos):
        """Observations, alive, state and masks as the adapter is to give them."""
        obs, alive, mask = [], [], []
        for name in self.names:
            one, allowed = seen.get(name, np.zeros(self.shape(), np.float32)), infos.get(name, {}).get("action_mask")
            if isinstance(one, dict):
                one, allowed = one["observation"], one["action_mask"]
            obs.append(one)
            alive.append(name not in self.out | self.cut)
            mask.append([True] * 3 if allowed is None else [bool(x) for x in allowed])
        try:
            state = self.game.state()
        except NotImplementedError:
            state = np.concatenate(obs)
        self.now = np.array(obs), np.array(alive), state, np.array(mask)
        return self.now

    def shape(self):
        space = self.game.observation_space(self.names[0])
        return (space["observation"] if isinstance(space, gym.spaces.Dict) else space).shape

    def step(self, action):
        acting = {name: a for name, a in zip(self.names, action, strict=True) if name not in self.out | self.cut}
        seen, rewards, out, cut, infos = self.game.step(acting)
        self.out |= {name for name in out if out[name]}
        self.cut |= {name for name in cut if cut[name] and not out[name]}
        final = self.look(seen, infos)
        if over := len(self.out | self.cut) == len(self.names):
            assert not self.game.agents
        reward, out, cut = (
            [rewards.get(name, 0.0) for name in self.names],
            [name in self.out for name in self.names],
            [name in self.cut for name in self.names],
        )
        if over:
            self.begin()
        return reward, out, cut, over, final


@pytest.mark.parametrize("name", GAMES)
def test_every_array_is_that_of_a_loop_over_the_raw_api(name):
    envs = PettingZooEnvs([lambda: Game(GAMES[name]())] * 3)
    masked, rng, met = name in ("raid masked", "raid told"), np.random.default_rng(0), set()
    obs, infos = envs.reset(seed=[7, 8, 9])
    loops = [Loop(GAMES[name](), seed) for seed in (7, 8, 9)]
    for _ in range(80):
        for i, loop in enumerate(loops):
            got = (obs[i], infos["alive"][i], infos["state"][i], *([infos["action_mask"][i]] if masked else []))
            for x, y in zip(got, loop.now, strict=masked):
                np.testing.assert_array_equal(x, y)
        for attribute in ("alive", "state", *(["action_mask"] if masked else [])):
            np.testing.assert_array_equal(getattr(envs, attribute), infos[attribute])
        action = rng.integers(3, size=(3, envs.num_agents))
        obs, reward, terminated, truncated, infos = envs.step(action)
        for i, loop in enumerate(loops):
            wanted = loop.step(action[i])
            for x, y in zip((reward, terminated, truncated), wanted, strict=False):
                np.testing.assert_array_equal(x[i], y)
            over = wanted[3]
            assert over == bool(infos.get("_final_obs", [False] * 3)[i]) == (terminated[i] | truncated[i]).all()
            if over:
                np.testing.assert_array_equal(infos["final_obs"][i], wanted[4][0])
                np.testing.assert_array_equal(infos["final_info"]["alive"][i], wanted[4][1])
                np.testing.assert_array_equal(infos["final_info"]["state"][i], wanted[4][2])
                if masked:
                    np.testing.assert_array_equal(infos["final_info"]["action_mask"][i], wanted[4][3])
            met |= {("over", over), ("out", terminated[i].any()), ("early", not over and truncated[i].any())}
            met |= {("forbidden at the end", masked and over and not wanted[4][3].all())}
    assert envs.action_mask is None or masked
    assert ("forbidden at the end", masked) in met
    assert met >= ({("over", True), ("out", True), ("early", True)} if "raid" in name else {("over", True)})


def test_where_a_game_gives_no_mask_its_agents_may_do_all():
    """As in the step after a reset, where other games, also the first, are in their middle."""
    envs, rng = PettingZooEnvs([lambda: Game(Raid("told late"))] * 3), np.random.default_rng(0)
    envs.reset(seed=[7, 8, 9])
    loops, met = [Loop(Raid("told late"), seed) for seed in (7, 8, 9)], set()
    for _ in range(80):
        wanted = np.stack([loop.now[3] for loop in loops])
        new = [loop.game.time == 0 for loop in loops]
        met.add(tuple(new))
        assert envs.action_mask is None if all(new) else (envs.action_mask == wanted).all()
        action = rng.integers(3, size=(3, 4))
        envs.step(action)
        for loop, one in zip(loops, action, strict=True):
            loop.step(one)
    assert {(True, False, False), (False, True, False)} <= met


def test_spaces_have_an_axis_of_agents():
    envs = PettingZooEnvs([lambda: Game(Raid("masked"), TEAMS)] * 2)
    assert envs.observation_space.shape == (2, 4, 3) and envs.single_observation_space.shape == (4, 3)
    assert envs.single_action_space.nvec.tolist() == [3] * 4 and envs.agent_action_space.n == 3
    assert envs.agent_observation_space.shape == (3,) and envs.num_agents == 4
    assert envs.agents == ["red_0", "blue_0", "red_1", "blue_1"] and envs.teams == {"red": [0, 2], "blue": [1, 3]}
    continuous = PettingZooEnvs([lambda: gym.make(SPREAD, continuous_actions=True)] * 2)
    assert continuous.action_space.shape == (2, 3, 5) and continuous.agent_action_space.shape == (5,)
    continuous.reset(seed=[1, 2])
    assert continuous.step(continuous.action_space.sample())[0].shape == (2, 3, 18)


def test_the_mask_of_a_final_observation_is_that_of_the_game():
    """After a time limit the value of the next observation needs it."""
    envs = PettingZooEnvs([lambda: Game(Raid("masked"))])
    _, infos = envs.reset(seed=[4])
    while "final_obs" not in infos:
        _, _, _, truncated, infos = envs.step(np.full((1, 4), 1))
    left = truncated[0] & (infos["final_obs"][0][:, 1] == LIMIT)  # at the limit, not before
    allowed = infos["final_info"]["action_mask"][0]
    assert left.any() and (infos["final_info"]["state"][0][:4][left] > 2).any()
    np.testing.assert_array_equal(allowed[left, 2], infos["final_info"]["state"][0][:4][left] <= 2)
    assert not np.array_equal(infos["final_info"]["state"][0], infos["state"][0])


def test_observations_are_copies():
    envs = PettingZooEnvs([lambda: Game(Raid())])
    obs, _ = envs.reset(seed=[1])
    before = obs.copy()
    envs.step(np.zeros((1, 4), int))
    np.testing.assert_array_equal(obs, before)


def test_a_limit_by_a_wrapper_cuts_all_who_play():
    envs = PettingZooEnvs([lambda: gym.wrappers.TimeLimit(Game(Raid()), 2)])
    envs.reset(seed=[3])
    assert not (envs.step(np.zeros((1, 4), int))[3]).any()
    _, _, terminated, truncated, infos = envs.step(np.zeros((1, 4), int))
    assert truncated.all() and not terminated.any() and infos["_final_obs"].all() and envs.alive.all()


class Won(gym.Wrapper):
    """Ends the game with its second step."""

    steps = 0

    def step(self, action):
        obs, reward, _, truncated, info = self.env.step(action)
        self.steps += 1
        return obs, reward, self.steps == 2, truncated, info


def test_an_end_by_a_wrapper_is_that_of_all_who_play():
    """In training, as in an evaluation."""
    envs = PettingZooEnvs([lambda: Won(Game(Raid()))])
    envs.reset(seed=[3])
    assert not (envs.step(np.zeros((1, 4), int))[2]).any()
    _, _, terminated, truncated, infos = envs.step(np.zeros((1, 4), int))
    assert terminated.all() and not truncated.any() and infos["_final_obs"].all() and envs.alive.all()
    _, lengths = play_episodes([Won(Game(Raid()))], lambda obs: np.zeros((1, 4), int), [3])
    assert lengths.tolist() == [2]


def test_actions_of_another_shape_are_refused():
    game = Game(Raid())
    game.reset(seed=1)
    with pytest.raises(ValueError, match=re.escape("actions of raid_v0 are (4,), not (4, 1)")):
        game.step(np.zeros((4, 1), int))


def test_the_example_of_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/multi_agent.md").read_text(), flags=re.S)
    names = {}
    exec(next(block for block in blocks if "PettingZooEnvs" in block), names)
    assert names["obs"].shape == (4, 3, 18) and names["reward"].shape == names["truncated"].shape == (4, 3)


# ---------------------------------------------------------------------- padding
OWN = {  # MADDPG's own games: numbers of observations and actions of each agent
    "mpe/simple_tag_v3": ([16, 16, 16, 14], [5, 5, 5, 5]),
    "mpe/simple_adversary_v3": ([8, 10, 10], [5, 5, 5]),
    "mpe/simple_speaker_listener_v4": ([3, 11], [3, 5]),
}


@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("env_id", OWN)
def test_padded_games_are_the_raw_ones(env_id, continuous):
    obs_dims, action_dims = OWN[env_id]
    envs = PettingZooEnvs([lambda: gym.make(env_id, pad=True, continuous_actions=continuous)] * 2)
    raw = importlib.import_module(f"mpe2.{env_id[4:]}").parallel_env(continuous_actions=continuous)
    obs, _ = envs.reset(seed=[1, 2])
    seen, _ = raw.reset(seed=int(np_random(2)[0].integers(2**31)))
    assert (envs.agent_obs_dims, envs.agent_action_dims) == (obs_dims, action_dims)
    assert envs.agent_observation_space.shape == (max(obs_dims),)
    for _ in range(5):
        for k, (name, dim) in enumerate(zip(envs.agents, obs_dims, strict=True)):
            np.testing.assert_array_equal(obs[1, k, :dim], seen[name])
            assert not obs[:, k, dim:].any()
        action = envs.action_space.sample()
        if continuous:
            assert action.shape == (2, len(obs_dims), max(action_dims)) and envs.action_mask is None
            acting = {name: action[1, k, : action_dims[k]] for k, name in enumerate(envs.agents)}
        else:
            assert (action < action_dims).all() and envs.agent_action_space.n == max(action_dims)
            acting = dict(zip(envs.agents, action[1], strict=True))
        obs, reward, *_ = envs.step(action)
        seen, rewards, *_ = raw.step(acting)
        np.testing.assert_array_equal(reward[1], [rewards[name] for name in envs.agents])
    if len(set(action_dims)) > 1 and not continuous:
        np.testing.assert_array_equal(envs.action_mask, [[[1, 1, 1, 0, 0], [1] * 5]] * 2)
        with pytest.raises(ValueError, match=r"speaker_0 of .* has 3 actions: 3 is padding"):
            envs.step(np.full((2, 2), 3))


def test_masks_of_a_game_and_of_padding_are_one():
    game = Game(Duel(masked=True, sizes=(3, 2)), pad=True)
    game.reset(seed=1)
    for card in game.game.cards[:-1]:
        allowed = np.arange(3) != (card + 1) % 3
        np.testing.assert_array_equal(game.info["action_mask"], [allowed, allowed & [True, True, False]])
        game.step(game.info["action_mask"].argmax(-1))


def test_unequal_games_of_several_teams_have_teams():
    game = gym.make("mpe/simple_tag_v3", pad=True, teams="each").unwrapped
    assert list(game.teams) == ["adversary_0", "adversary_1", "adversary_2", "agent_0"]


# ---------------------------------------------------------------------- returns
def test_returns_are_those_of_teams_and_agents():
    """Against a loop over steps, games and agents; in pieces as all at once."""
    rng, teams, agents = np.random.default_rng(0), {"a": [0, 2], "b": [1]}, ("x", "y", "z")
    reward, done = rng.normal(size=(60, 2, 3)), rng.random((60, 2, 3)) < 0.6
    expected, total, length = [], np.zeros((2, 3)), [0, 0]
    for t in range(60):
        for n in range(2):
            total[n], length[n] = total[n] + reward[t, n], length[n] + 1
            if done[t, n].all():
                a, b = total[n, 0] + total[n, 2], total[n, 1]
                expected.append({"r": a, "r_a": a, "r_b": b, "r_x": total[n, 0], "r_y": b, "r_z": total[n, 2],
                                 "t": t, "length": length[n]})  # fmt: skip
                total[n], length[n] = 0, 0
    for pieces in ([slice(0, 60)], [slice(0, 20), slice(20, 60)], [slice(t, t + 1) for t in range(60)], range(60)):
        running, lengths, got = np.zeros((2, 3)), np.zeros(2, np.int64), []
        for piece in pieces:
            first = piece if isinstance(piece, int) else piece.start
            part = returns.rollout(reward[piece], done[piece], teams)
            for t, value, steps in returns.ended(running, lengths, *part):
                got.append(returns.named("r", value, teams, agents) | {"t": first + t, "length": steps})
        assert len(got) == len(expected) > 15 and got[0].keys() == expected[0].keys()
        for x, y in zip(got, expected, strict=True):
            assert x == pytest.approx(y)
        np.testing.assert_allclose(running, total)


def test_one_team_has_one_return():
    assert returns.named("r", np.array([1.0, 2.0]), {"all": [0, 1]}) == {"r": 3.0}
    assert returns.named("r", np.array(5.0), None) == {"r": 5.0}


@pytest.mark.parametrize("shape", [(5, 2), (5, 2, 4), (5, 2, 3, 1), (3,)])
def test_rewards_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=re.escape("reward and done must be (steps, num_envs, 3)")):
        returns.rollout(np.zeros(shape), np.zeros(shape), {"a": [0, 2], "b": [1]})


def test_the_row_of_a_rollout_has_the_means_of_teams():
    meter, ends = Meter(), np.ones((2, 3), bool)
    meter.teams = {"a": [0, 2], "b": [1]}
    meter.episodes(2, np.array([[1.0, 2.0, 3.0], [0.0, 5.0, 0.0]]), ends)
    values = meter.report(2, {})
    assert values["charts/episodic_return"] == values["charts/episodic_return_a"] == 2.0
    assert values["charts/episodic_return_b"] == 3.5 and values["charts/episodic_length"] == 1.0
    meter.take_rows()
    meter.episodes(4, np.array([[1.0, math.nan, 3.0], [0.0, 5.0, 0.0]]), ends)
    with pytest.raises(Diverged, match="charts/episodic_return_b is nan"):
        meter.report(4, {})


# ---------------------------------------------------------------------- evaluation
def total_of(game, seed, act):
    """The agents' returns and the length of one game by the raw API; `act(observations of all agents)`."""
    loop, total, steps, over = Loop(game, seed), 0.0, 0, False
    while not over:
        reward, _, _, over, _ = loop.step(act(loop.now))
        total, steps = total + np.array(reward), steps + 1
    return total, steps


@pytest.mark.parametrize("name", ["raid", "spread"])
def test_evaluation_plays_every_game_once(name):
    def policy(obs):
        return (obs[..., 0] > 0).astype(int)

    wanted = [total_of(GAMES[name](), seed, lambda now: policy(now[0])) for seed in (1, 2, 3)]
    got, lengths = play_games([Game(GAMES[name]()) for _ in range(3)], policy, [1, 2, 3])
    np.testing.assert_allclose(got, [total for total, _ in wanted])
    assert lengths.tolist() == [steps for _, steps in wanted]
    teams = TEAMS if name == "raid" else None
    ours = got[:, [0, 2]] if name == "raid" else got
    team, _ = play_episodes([Game(GAMES[name](), teams) for _ in range(3)], policy, [1, 2, 3])
    np.testing.assert_allclose(team, ours.sum(1))


def test_a_target_is_for_the_first_team():
    def policy(obs):
        return np.ones(obs.shape[:2], int)

    def make_env(env_id):
        return Game(Raid(), TEAMS)

    evaluator = Evaluator(
        SimpleNamespace(env_id="Raid-v0", seed=1, eval_episodes=2, eval_more=False, target_return=-math.inf)
    )
    row = evaluator.evaluate(0, policy, make_env)
    assert evaluator.last[1] == row["eval/episodic_return"] == row["eval/episodic_return_red"]
    wanted, _ = play_episodes([make_env("") for _ in range(2)], policy, [env_seed(1, CONFIRM, i) for i in range(2)])
    assert evaluator.confirm(policy, make_env) == pytest.approx(wanted.mean())


def test_a_policy_with_memory_and_masks_gets_both():
    """It takes the highest allowed action in every second step."""
    calls = []

    def policy(obs, state, first, action_mask):
        assert obs.shape == (3, 4, 3) and first.shape == (3,) and action_mask.shape == (3, 4, 3)
        state = np.zeros((3, 4), int) if state is None else state + 1
        calls.append(first.all())
        return np.where(state % 2 == 0, 2 - action_mask[..., ::-1].argmax(-1), 0), state

    def by_hand():
        step = -1

        def act(now):
            nonlocal step
            step += 1
            return [max(a for a in range(3) if mask[a]) if step % 2 == 0 else 0 for mask in now[3]]

        return act

    got, _ = play_games([Game(Raid("masked")) for _ in range(3)], policy, [4, 5, 6])
    np.testing.assert_allclose(got, [total_of(Raid("masked"), seed, by_hand())[0] for seed in (4, 5, 6)])
    assert calls == [True] + [False] * (len(calls) - 1) and len(calls) > 3

    def without(obs, action_mask):
        assert action_mask is None
        return np.zeros(obs.shape[:2], int)

    play_games([Game(Raid())], without, [4])


def test_a_film_of_a_real_game(tmp_path):
    env = gym.make(SPREAD, render_mode="rgb_array", max_cycles=3)

    def policy(obs):
        return np.ones(obs.shape[:2], int)

    wanted, _ = play_episodes([gym.make(SPREAD, max_cycles=3)], policy, [5])
    assert film(env, policy, 5, tmp_path / "film.mp4") == pytest.approx(wanted[0])
    assert (tmp_path / "film.mp4").stat().st_size > 1000
    env.close()


# ---------------------------------------------------------------------- resume
@pytest.mark.parametrize("name", GAMES)
def test_games_go_on_exactly(name):
    rng = np.random.default_rng(1)
    whole, cut = (PettingZooEnvs([lambda: Game(GAMES[name]())] * 2) for _ in range(2))
    for envs in (whole, cut):
        env_state.record(envs)
        envs.reset(seed=[1, 2])
    for _ in range(25):
        whole.step(rng.integers(3, size=(2, whole.num_agents)))
    assert not whole.alive.all() or "raid" not in name  # in the middle of a game that somebody has left
    assert env_state.restore(cut, env_state.capture(whole)) == []
    np.testing.assert_array_equal(env_state.observations(cut), np.stack(whole._env_obs))
    for attribute in ("alive", "state", "action_mask"):
        np.testing.assert_array_equal(getattr(cut, attribute), getattr(whole, attribute))
    for _ in range(30):
        action = rng.integers(3, size=(2, whole.num_agents))
        for x, y in zip(whole.step(action)[:4], cut.step(action)[:4], strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_game_that_does_not_replay_starts_again_and_says_so():
    whole, cut = (PettingZooEnvs([lambda: Game(Raid(exact=False))] * 2) for _ in range(2))
    for envs in (whole, cut):
        env_state.record(envs)
        envs.reset(seed=[1, 2])
    whole.step(np.zeros((2, 4), int))
    notes = env_state.restore(cut, env_state.capture(whole))
    assert len(notes) == 1 and "environments [0, 1] restart" in notes[0]
    assert cut.alive.all() and env_state.restarted(cut) == [0, 1]


SCRIPT = """
from dataclasses import dataclass
import gymnasium as gym
import numpy as np
import torch
from solorl import PettingZooEnvs, Run, RunArgs, parse

@dataclass
class Args(RunArgs):
    env_id: str = "{env_id}"
    total_timesteps: int = 120
    num_envs: int = 2

def make_env(env_id, **kwargs):
    return gym.make(env_id, **kwargs)

if __name__ == "__main__":
    args = parse(Args)
    run = Run(args)
    envs = PettingZooEnvs([lambda: make_env(args.env_id) for _ in range(args.num_envs)])
    run.require_spaces(envs, obs="vector", action="discrete")
    agent = torch.nn.Linear(envs.agent_observation_space.shape[0], int(envs.agent_action_space.n))

    def act(obs):
        with torch.no_grad():
            return agent(torch.as_tensor(obs)).argmax(-1).numpy()

    start = run.resume(agent=agent, envs=envs)
    obs = run.reset(envs)
    for iteration in run.loop(start, args.total_timesteps // 20):
        for step in range(10):
            action = np.where(np.random.random((2, envs.num_agents)) < 0.5, act(obs), 0)
            obs, reward, terminated, truncated, _ = envs.step(action)
            global_step = iteration * 20 + 2 * (step + 1)
            run.episodes(global_step, reward, terminated | truncated, per_agent=True)
        run.log(global_step, {{}})
        run.evaluate(global_step, act, make_env)
        run.save(global_step)
    run.close(act, make_env)
"""


@pytest.fixture
def raid_id(monkeypatch):
    own_registry(monkeypatch)
    register("Raid-v0", Raid, teams=TEAMS)
    return "Raid-v0"


@pytest.mark.parametrize("env_id", ["Raid-v0", SPREAD])
def test_a_training_goes_on_exactly(train, raid_id, tmp_path, env_id):
    path = tmp_path / "agents.py"
    path.write_text(SCRIPT.format(env_id=env_id))
    flags = ["--eval-episodes", "2", "--eval-every", "60"]
    whole = train(str(path), *flags, runs_dir=tmp_path / "whole")["run"].dir
    cut = train(str(path), *flags, "--total-timesteps", "60", runs_dir=tmp_path / "cut")["run"].dir
    resumed = train(str(path), "--resume", cut, "--total-timesteps", "120", "--resume-changed")
    assert resumed["start"] == 3 and resumed["run"].restarted == [] and comparable(cut) == comparable(whole)
    ended, evaluations = rows(whole, "charts/episodic_return"), rows(whole, "eval/episodic_return")
    assert len(ended) >= 4 and len(evaluations) == 2
    if env_id == SPREAD:
        names = [f"charts/episodic_return_agent_{k}" for k in range(3)]
        assert {row["charts/episodic_length"] for row in ended} == {25}
        assert all(row["charts/episodic_return"] == pytest.approx(sum(row[n] for n in names)) for row in ended)
    else:
        for row in ended:
            for team, names in TEAMS.items():
                total = sum(row[f"charts/episodic_return_{name}"] for name in names)
                assert row[f"charts/episodic_return_{team}"] == pytest.approx(total)
            assert row["charts/episodic_return"] == row["charts/episodic_return_red"]
            assert row["charts/episodic_length"] <= LIMIT
        assert all(row["eval/episodic_return"] == row["eval/episodic_return_red"] for row in evaluations)
        assert evaluations[0]["eval/episodic_return_blue"] != evaluations[0]["eval/episodic_return_red"]


# ---------------------------------------------------------------------- refusals
def sentence(capfd, call):
    """What `call` says before it ends with exit code 2."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        call()
    words = capfd.readouterr().err
    assert end.value.code == 2 and len(words.splitlines()) == 1
    return words


class Odd(Raid):
    """A raid with spaces of its own."""

    def __init__(self, obs=None, action=None):
        super().__init__()
        self.obs, self.action = obs or {}, action or {}

    def observation_space(self, agent):
        return self.obs.get(agent, self.obs.get("all", super().observation_space(agent)))

    def action_space(self, agent):
        return self.action.get(agent, self.action.get("all", super().action_space(agent)))


BOX = gym.spaces.Box(0, 1, (2,), np.float32)
IMAGE = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


@pytest.mark.parametrize(
    ("spaces", "words"),
    [
        ({"obs": {"red_1": IMAGE}}, "red_0 has observations Box(-50.0, 50.0, (3,), float32), red_1 has Box(0, 255"),
        ({"action": {"blue_0": gym.spaces.Discrete(3, start=1)}}, "has actions Discrete(3), blue_0 has Discrete(3, st"),
        ({"action": {"blue_0": BOX}}, "red_0 has actions Discrete(3), blue_0 has Box(0.0, 1.0, (2,), float32); all"),
        ({"obs": {"all": gym.spaces.Discrete(4)}}, "raid_v0 has observations Discrete(4); allowed are Box, and Dict"),
        ({"obs": {"all": gym.spaces.Dict({"observation": BOX, "map": BOX})}}, "raid_v0 has observations Dict("),
        ({"action": {"all": gym.spaces.MultiBinary(2)}}, "has actions MultiBinary(2); allowed are Discrete and Box"),
    ],
)
@pytest.mark.parametrize("pad", [False, True])
def test_spaces_that_do_not_fit_are_refused(capfd, spaces, words, pad):
    assert words in (said := sentence(capfd, lambda: Game(Odd(**spaces), pad=pad)))
    assert "pad=True" not in said


@pytest.mark.parametrize(
    ("spaces", "words"),
    [
        ({"obs": {"red_1": BOX}}, "red_0 has observations Box(-50.0, 50.0, (3,), float32), red_1 has Box(0.0"),
        ({"action": {"blue_0": gym.spaces.Discrete(4)}}, "red_0 has actions Discrete(3), blue_0 has Discrete(4); all"),
    ],
)
def test_a_refusal_names_the_padding_that_helps(capfd, spaces, words):
    said = sentence(capfd, lambda: Game(Odd(**spaces)))
    assert words in said and said.endswith("numbers of actions are padded by gym.make(env_id, pad=True)\n")
    Game(Odd(**spaces), pad=True)


FLOATS = np.array([0.5, 1.0, 1.5])


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (lambda obs, *told: (obs | {"red_1": FLOATS[:1]}, *told), "observation of red_1 must be int8 of shape (3,)"),
        (lambda obs, *told: (obs | {"red_1": np.int8(1)}, *told), "observation of red_1 must be int8 of shape (3,)"),
        (lambda obs, *told: (obs | {"red_1": FLOATS}, *told), "observation of red_1 must be int8"),
        (lambda obs, *told: ({**obs, "red_1": None}, *told), "observation of red_1 must be"),
        (lambda obs, *told: ({"red_0": obs["red_0"]}, *told), "observation of blue_0 must be"),
        (lambda *told: (*told[:4], {"red_1": {"action_mask": [1, 1]}}), "action_mask of red_1 must be"),
        (lambda *told: told[:4], "must return 5 dicts"),
        (lambda obs, *told: (list(obs.values()), *told), "must return 5 dicts"),
        (lambda *told: None, "must return 5 dicts"),
    ],
)
def test_what_a_game_says_wrong_is_one_sentence(monkeypatch, say, words):
    """Whatever NumPy would broadcast or round, too."""
    box = gym.spaces.Box(-50, 50, (3,), np.int8)
    game = Game(Odd({"all": box}))
    monkeypatch.setattr(game.game, "seen", lambda names: {name: np.arange(3, dtype=np.int8) for name in names})
    game.reset(seed=1)
    obs, *_ = game.step(np.zeros(4, int))
    assert (obs == range(3)).all() and game.alive.all()
    step = game.game.step
    monkeypatch.setattr(game.game, "step", lambda actions: say(*step(actions)))
    with pytest.raises(errors.UsageError, match=f"raid_v0: .*{re.escape(words)}"):
        game.step(np.zeros(4, int))


def test_a_reset_of_another_kind_is_one_sentence(monkeypatch):
    """As those of older games, which return observations only, and of PettingZoo's other API, which return nothing."""
    for given in (None, {"red_0": np.zeros(3)}):
        game = Game(Raid())
        monkeypatch.setattr(game.game, "reset", lambda given=given, **_: given)
        with pytest.raises(errors.UsageError, match="must return 2 dicts"):
            game.reset(seed=1)


def test_a_game_that_nobody_plays_is_one_sentence(monkeypatch):
    """As where only the first reset fills `agents`."""
    game = Game(Raid())
    reset = game.game.reset
    monkeypatch.setattr(game.game, "reset", lambda **named: (reset(**named), game.game.agents.clear())[0])
    with pytest.raises(errors.UsageError, match="nobody plays"):
        game.reset(seed=1)


@pytest.mark.parametrize("state", [None, {"x": 1.0}, np.zeros(2)])
def test_a_state_that_is_not_always_of_one_shape_is_one_sentence(monkeypatch, state):
    """As that of the agents that are left, concatenated."""
    game = Game(Raid())
    game.reset(seed=1)
    monkeypatch.setattr(game.game, "state", lambda: state)
    with pytest.raises(errors.UsageError, match=r"raid_v0: its state\(\) must be float64 of shape \(5,\)"):
        game.step(np.zeros(4, int))


ALL = [name for names in TEAMS.values() for name in names]


@pytest.mark.parametrize("teams", [{"a": ["red_0"]}, {"a": ["red_0", *ALL]}, "both", {"a": []}, {"a": ALL, "b": []}])
def test_teams_that_do_not_hold_each_agent_once_are_refused(capfd, teams):
    assert "must hold each of red_0, blue_0, red_1, blue_1 once" in sentence(capfd, lambda: Game(Raid(), teams))


def test_each_agent_may_be_a_team():
    assert Game(Raid(), "each").teams == {"red_0": [0], "blue_0": [1], "red_1": [2], "blue_1": [3]}


def test_an_environment_of_one_agent_is_refused(capfd):
    words = sentence(capfd, lambda: PettingZooEnvs([lambda: gym.make("CartPole-v1")]))
    assert "CartPole-v1 has one agent; games of several are those of PettingZoo, such as mpe/simple_spread_v3" in words


@pytest.mark.parametrize("name", ["ppo", "dqn", "ppo_continuous_action", "sac_continuous_action"])
def test_a_script_for_one_agent_refuses_a_game(solo, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    refused(solo("train", name, "--env-id", SPREAD, "--num-envs", "2"), SPREAD)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        (SPREAD, ""),
        ("simple_spread_v3", "; did you mean mpe/simple_spread_v3"),
        ("mpe/simple_spread_v2", "; did you mean mpe/simple_spread_v3"),
        ("sisl/multiwalker", "; did you mean sisl/multiwalker_v9"),
    ],
)
def test_ids_are_checked(monkeypatch, env_id, words):
    others = {name: spec for name, spec in gym.registry.items() if "envs.pettingzoo" not in str(spec.entry_point)}
    monkeypatch.setattr(gym.envs.registration, "registry", others)  # nothing of PettingZoo's is known before the check
    monkeypatch.setattr(gym, "registry", others)
    monkeypatch.delitem(sys.modules, "solorl.envs.pettingzoo")
    if not words:
        ids.check_env_id(env_id)
        return
    with pytest.raises(errors.UsageError, match=re.escape(f"there is no environment {env_id}{words}")):
        ids.check_env_id(env_id)


@pytest.mark.parametrize("hidden", ["mpe2", "pettingzoo"])
def test_a_missing_package_names_the_extra(monkeypatch, hidden):
    real = importlib.util.find_spec
    monkeypatch.setattr(ids.importlib.util, "find_spec", lambda name: None if name == hidden else real(name))
    with pytest.raises(
        errors.UsageError, match=re.escape(f"{SPREAD} needs an extra: pip install 'solorl[pettingzoo]'")
    ):
        ids.check_env_id(SPREAD)


@pytest.mark.parametrize(
    ("env_id", "package", "extra"),
    [
        ("butterfly/pistonball_v6", "pymunk", "pettingzoo[butterfly]"),
        ("atari/pong_v3", "multi_agent_ale_py", "solorl[pettingzoo]"),
        ("atari/pong_v3", "ale_py", "solorl[pettingzoo]"),
    ],
)
def test_what_one_game_needs_is_named(capfd, monkeypatch, env_id, package, extra):
    for name in [name for name in sys.modules if name.startswith("pettingzoo.atari")]:  # which have imported it
        monkeypatch.delitem(sys.modules, name)
    pettingzoo.env_registry.spec._load_env_creator.cache_clear()  # which holds what was made from them
    monkeypatch.setitem(sys.modules, package, None)
    words = sentence(capfd, lambda: gym.make(env_id))
    assert f"{env_id} needs {package}, which is not installed: pip install '{extra}'" in words


def test_games_of_atari_are_those_of_pettingzoo_without_conversions():
    """The same frames, rewards and ends as through the conversions; the files of the games are found."""
    game = gym.make("atari/pong_v3", obs_type="grayscale_image", max_cycles=150, teams="each").unwrapped
    path = str(Path(ale_py.__file__).parent / "roms")
    flags = {"obs_type": "grayscale_image", "max_cycles": 150, "auto_rom_install_path": path}
    raw, rng = pettingzoo.make("parallel", "atari/pong-v3", **flags), np.random.default_rng(0)
    assert type(game.game).__name__ == "ParallelAtariEnv" != type(raw).__name__
    obs, _ = game.reset(seed=1)
    seen, _ = raw.reset(seed=1)
    points, over = [], False
    while not over:
        np.testing.assert_array_equal(obs, [seen[name] for name in game.agents])
        action = rng.integers(6, size=2)
        obs, reward, terminated, over, _ = game.step(action)
        seen, rewards, _, cut, _ = raw.step(dict(zip(game.agents, action, strict=True)))
        assert reward.tolist() == [rewards[name] for name in game.agents] and not terminated
        assert over == all(cut.values())
        points.append(abs(reward).max())
    assert len(points) == 150 and sum(points) and obs.std() > 1


def test_games_come_from_the_registry_of_pettingzoo(monkeypatch):
    """Importing the modules of its games is deprecated."""
    ours = {name for name, spec in gym.registry.items() if "envs.pettingzoo" in str(spec.entry_point)}
    parallel = {name.replace("-v", "_v") for name in pettingzoo.parallel_registry}
    assert {name for name in ours if not name.startswith("mpe/")} == parallel - {"classic/rps_v2"}  # without arrays
    monkeypatch.delitem(sys.modules, "pettingzoo.sisl.multiwalker_v9", raising=False)
    game = gym.make("sisl/multiwalker_v9", max_cycles=3, n_walkers=2).unwrapped
    assert "pettingzoo.sisl.multiwalker_v9" not in sys.modules
    assert game.agents == ["walker_0", "walker_1"] and not game.own_state
