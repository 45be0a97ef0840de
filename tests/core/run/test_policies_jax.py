"""What a policy in JAX may be: the same as in torch, with the model as its first parameter."""

import inspect

import numpy as np
import pytest
from conftest import own_registry, rows
from kinds import Allowed, Pairs, Parts
from raid import TEAMS, Raid

import solorl
from solorl import envs
from solorl.envs.spaces import batch_of
from solorl.run.evaluation import play_episodes, play_games

jax = pytest.importorskip("jax")
jnp = jax.numpy

SCRIPT = """
from dataclasses import dataclass
from typing import Any, NamedTuple
import gymnasium as gym
import jax
import jax.numpy as jnp
import kinds
import numpy as np
from solorl import RunArgs, Runs, parse

@dataclass
class Args(RunArgs):
    env_id: str = "CartPole-v1"
    num_seeds: int = 1
    total_timesteps: int = 40

class Training(NamedTuple):
    params: Any
    env_state: Any
    obs: Any
    key: Any

def make_env(env_id, **kwargs):
    return EVALUATED

def begin(key):
    state, obs = envs.reset(key)
    return Training({"w": jnp.array([1.0, 0, 0, 0, 0, -1])}, state, obs, key)

def iteration(training):
    key, step_key = jax.random.split(training.key)
    action = jnp.ones((2,) + AGENTS, jnp.int32)
    env_state, step = envs.step(step_key, training.env_state, action)
    return Training(training.params, env_state, step.obs, key), (step.reward, step.terminated | step.truncated)

POLICY

if __name__ == "__main__":
    args = parse(Args)
    run = Runs(args)
    envs = run.open_envs(args.env_id, 2)
    training, start = run.resume(begin, model="params", envs=("env_state", "obs"))
    train = run.compile(iteration, chunk=10)
    for iterations in run.loop(start, args.total_timesteps // 2, 2):
        training, (reward, done) = train(training, iterations)
        run.episodes(iterations.stop * 2, reward, done)
        run.log(iterations.stop * 2, {})
        run.evaluate(iterations.stop * 2, act, make_env)
        run.save(iterations.stop * 2, training)
    run.close(act, make_env, **SAMPLE)
"""


def mine(tmp_path, policy, evaluated, agents="()", sample="{}"):
    """A script of one's own: trained on CartPole, or on a game of `agents`, evaluated on another environment."""
    text = SCRIPT.replace("POLICY", policy).replace("EVALUATED", evaluated)
    (tmp_path / "mine.py").write_text(text.replace("AGENTS", agents).replace("**SAMPLE", f"**{sample}"))
    return tmp_path / "mine.py"


def evaluations(run_dir):
    """(mean return, mean length) of each evaluation."""
    return [(row["eval/episodic_return"], row["eval/episodic_length"]) for row in rows(run_dir, "eval/episodic_return")]


MEMORY = """
def act(params, obs, state, first, action_mask):
    assert obs.shape[1:] == (2, 3) and obs.dtype == jnp.float32 and action_mask.dtype == bool
    state = jnp.zeros(len(obs)) if state is None else jnp.where(first, 0, state + 1)
    seen = obs.reshape(len(obs), -1) @ params["w"]  # 0: what is seen is the same everywhere
    lower, higher = action_mask.argmax(1), 3 - action_mask[:, ::-1].argmax(1)
    return jnp.where((state % 2 == 0) & (seen == 0), higher, lower), state
"""


def test_memory_and_masks_reach_the_policy_of_each_seed(train, tmp_path):
    """Compiled; it takes the higher of the two allowed actions in every second step."""
    path = mine(tmp_path, MEMORY, "kinds.Allowed()")
    v = train(path, "--num-seeds", "2", "--eval-every", "20")
    for run in v["run"].runs:
        found = evaluations(run.dir)
        assert len(found) == 2 and all(total == length > 2 for total, length in found)
    policy = solorl.load(v["run"].runs[0].dir)
    obs, mask = np.zeros((3, 2, 3)), np.array([[0, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 0]], bool)
    action, state = policy(obs, None, np.ones(3, bool), action_mask=mask)
    assert isinstance(action, np.ndarray) and action.tolist() == [3, 3, 1]
    action, state = policy(obs, state, np.array([0, 0, 1], bool), action_mask=mask)
    assert action.tolist() == [1, 0, 1] and np.asarray(state).tolist() == [1, 1, 0]
    assert list(inspect.signature(policy.policy).parameters) == ["obs", "state", "first", "action_mask"]
    assert play_episodes([Allowed()], policy.policy, [5])[0][0] > 1


AGENTS = """
def act(params, obs, action_mask):
    assert obs.shape[1:] == (4, 3) and action_mask.shape[1:] == (4, 3)
    return 2 - action_mask[..., ::-1].argmax(-1)
"""


class Four:
    """Environments in JAX with as many agents as `Raid`: the reward of agent k in step t is 10 k + t, for 4 steps."""

    saved, teams, agents = True, {"red": [0, 2], "blue": [1, 3]}, list("abcd")

    def __init__(self, env_id, num_envs):
        self.num_envs = num_envs

    def reset(self, key):
        return jnp.zeros((), jnp.int32), jnp.zeros((self.num_envs, 4, 3))

    def step(self, key, state, action):
        from solorl.envs.interface import Step

        assert action.shape == (self.num_envs, 4)
        reward = jnp.tile(10.0 * jnp.arange(4) + state % 4, (self.num_envs, 1))
        done = jnp.broadcast_to(state % 4 == 3, reward.shape)
        obs = jnp.zeros((self.num_envs, 4, 3))
        return state + 1, Step(obs, reward, done, jnp.zeros_like(done), obs)


def test_agents_have_an_axis_of_their_own(train, tmp_path, monkeypatch):
    own_registry(monkeypatch)
    import gymnasium as gym

    gym.register("raids/four", lambda: None)
    monkeypatch.setitem(envs._openers, "raids/*", envs.Openers(Four, None))
    evaluated = "Game(Raid('masked'), TEAMS)"
    path = mine(tmp_path, AGENTS, evaluated, "(4,)")
    path.write_text("from raid import TEAMS, Raid\nfrom solorl.envs.pettingzoo import Game\n" + path.read_text())
    path.write_text(path.read_text().replace("reward, done)\n", "reward, done, per_agent=True)\n"))
    v = train(path, "--env-id", "raids/four", "--num-seeds", "2", "--eval-episodes", "3")
    for run in v["run"].runs:
        ended = rows(run.dir, "charts/episodic_return")
        assert len(ended) == 10  # 20 steps in each of 2 environments, 4 steps each
        for row in ended:
            assert row["charts/episodic_return_c"] == 4 * 20 + 6 and row["charts/episodic_length"] == 4
            assert row["charts/episodic_return"] == row["charts/episodic_return_red"] == 2 * 6 + 4 * 20
            assert row["charts/episodic_return_blue"] == 2 * 6 + 4 * 40
    from solorl.envs.pettingzoo import Game

    policy = solorl.load(v["run"].runs[0].dir).policy
    games = [Game(Raid("masked"), TEAMS) for _ in range(3)]
    returns, _ = play_games(games, policy, [1, 2, 3])
    wanted, _ = play_games(games, lambda obs, action_mask: 2 - action_mask[..., ::-1].argmax(-1), [1, 2, 3])
    np.testing.assert_array_equal(returns, wanted)


PARTS = """
def act(params, obs):
    number = obs["number"]
    assert obs["bytes"].dtype == jnp.uint8 and number.dtype == jnp.int32
    mean = obs["bytes"].mean((1, 2), dtype=jnp.float32)
    return number, jnp.stack([number.astype(jnp.float32), mean], 1)
"""
PAIRS = """
def act(params, obs):
    return jnp.stack([obs[0], obs[1][:, 0].astype(jnp.int32)], 1)
"""


@pytest.mark.parametrize(("policy", "kind"), [(PARTS, Parts), (PAIRS, Pairs)], ids=["Parts", "Pairs"])
def test_observations_and_actions_may_have_parts(policy, kind, train, tmp_path):
    path = mine(tmp_path, policy, f"kinds.{kind.__name__}()")
    run_dir = train(path, "--eval-episodes", "3")["run"].runs[0].dir
    [(total, length)] = evaluations(run_dir)
    assert total == length > 1
    action = solorl.load(run_dir)(batch_of(kind.observation_space, [kind().reset(seed=1)[0]]))
    parts = action if isinstance(action, tuple) else (action,)
    assert len(parts) == (2 if kind is Parts else 1) and all(isinstance(each, np.ndarray) for each in parts)


FLAT = """
def act(params, obs):
    obs = obs.reshape(len(obs), -1)
    return (obs @ params["w"] > 0).astype(jnp.int32)
"""
DRAWN = """
def drawn(params, obs, key):
    assert obs.shape[1:] == (2, 3)
    return jax.random.randint(key, len(obs), 0, 4)
"""


def test_a_stochastic_policy_gets_new_keys(train, solo, tmp_path):
    path = mine(tmp_path, FLAT + DRAWN, "kinds.Allowed()", sample="dict(sample=drawn)")
    run_dir = train(path)["run"].runs[0].dir
    policy, obs = solorl.load(run_dir), np.zeros((100, 2, 3))
    np.random.seed(1)
    first, second = policy.sample(obs), policy.sample(obs)
    assert set(first) == {0, 1, 2, 3} and first.tolist() != second.tolist()
    np.random.seed(1)
    assert policy.sample(obs).tolist() == first.tolist() and set(policy(obs)) == {0}
    code, out, _ = solo("play", run_dir, "--episodes", "20", "--stochastic")
    assert code == 0 and "over 20 stochastic episodes" in out
    assert out == solo("play", run_dir, "--episodes", "20", "--stochastic")[1]
    assert out != solo("play", run_dir, "--episodes", "20")[1].replace("greedy", "stochastic")


def test_an_error_in_the_policy_itself_is_shown_as_it_is(train, tmp_path):
    path = mine(tmp_path, FLAT.replace('["w"]', '["w"][:5]'), "kinds.Allowed()")
    with pytest.raises(TypeError, match="dot_general"):
        train(path)
