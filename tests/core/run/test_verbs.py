"""Verbs that do not need a run folder: numbers of iterations, kinds of actions, what a step led to."""

from types import SimpleNamespace

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import definitions, script

from solorl.checkpoints import checkpoint
from solorl.envs.guest import hosted
from solorl.envs.vector import VectorEnvs, with_next_obs
from solorl.run.meter import Meter
from solorl.run.verbs import Run


def run_with(**args):
    run = Run.__new__(Run)
    run.args, run.script, run.meter = SimpleNamespace(**args), script("ppo"), Meter()
    return run


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(steps=600), "--total-timesteps 512"),
        (dict(steps=128, minibatches=3), "--num-minibatches 3"),
        (dict(steps=128, minibatches=128), "--num-minibatches 128"),  # of one step each
        (dict(steps=128, batch=101), "--batch-size must be at most 100"),
    ],
)
def test_iterations_end_with_the_flag_that_is_wrong(given, named, capsys):
    with pytest.raises(SystemExit) as end:
        run_with(total_timesteps=512, buffer_size=100).iterations(**given)
    assert end.value.code == 2 and named in capsys.readouterr().err


def test_iterations_are_whole_ones():
    run = run_with(total_timesteps=512, buffer_size=100)
    assert run.iterations(100) == 5 and run.iterations(128, minibatches=4) == 4 and run.iterations(5, batch=100) == 102


class Counting(gym.Env):
    """Observations count up from 0; an episode ends after `length` steps."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, length, space):
        self.length, self.observation_space = length, space

    def seen(self):
        part = np.full(2, self.count, np.float32)
        kinds = {gym.spaces.Dict: {"a": part, "b": part + 1}, gym.spaces.Tuple: (part, part + 1)}
        return kinds.get(type(self.observation_space), part)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.seen(), {}

    def step(self, action):
        self.count += 1
        return self.seen(), 0.0, False, self.count == self.length, {}


BOX = gym.spaces.Box(-9, 9, (2,))


@pytest.mark.parametrize("space", [BOX, gym.spaces.Dict(a=BOX, b=BOX), gym.spaces.Tuple((BOX, BOX))])
def test_next_obs_is_what_the_step_led_to(space):
    envs = VectorEnvs([lambda: Counting(2, space), lambda: Counting(3, space)])
    envs.reset(seed=0)
    for step in range(1, 7):
        obs, _, _, truncated, infos = envs.step(np.zeros(2, int))
        at = [(step - 1) % 2 + 1, (step - 1) % 3 + 1]
        assert list(truncated) == [at[0] == 2, at[1] == 3]
        parts = {"Dict": lambda x: [x["a"], x["b"] - 1], "Tuple": lambda x: [x[0], x[1] - 1]}
        for part in parts.get(type(space).__name__, lambda x: [x])(infos["next_obs"]):
            assert part[:, 0].tolist() == at
        for part in parts.get(type(space).__name__, lambda x: [x])(obs):  # begins the next episode
            assert part[:, 0].tolist() == [0 if at[0] == 2 else at[0], 0 if at[1] == 3 else at[1]]


def test_next_obs_of_a_step_without_an_end_are_the_observations():
    obs = np.ones((2, 3))
    assert with_next_obs(obs, {})["next_obs"] is obs


def test_what_a_step_led_to_is_handed_out_for_lives_states_and_masks():
    """Where an episode ended it stands in final_info, elsewhere in the infos."""
    final = {"lives": np.array([0, 2]), "state": np.array([[0.0], [7.0]])}
    infos = {"lives": np.array([1, 3]), "state": np.array([[5.0], [6.0]]), "final_obs": [None, np.array([9.0])]}
    infos |= {"_final_obs": np.array([False, True]), "final_info": final}
    found = with_next_obs(np.array([[1.0], [2.0]]), infos, ["lives", "state", "action_mask"])
    assert found["next_obs"].tolist() == [[1], [9]] and found["lives"].tolist() == [1, 3]
    assert found["next_lives"].tolist() == [1, 2] and found["next_state"].tolist() == [[5], [7]]
    assert "next_action_mask" not in found and "next_lives" not in infos


class Reused(gym.Env):
    """Writes all its observations into one array; three steps an episode."""

    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

    def __init__(self):
        self.obs = np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.obs[:] = 0
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 1.0, bool(self.obs[0] == 3), False, {}


@pytest.mark.parametrize("made", [lambda make: make, lambda make: hosted(make, "Reused-v0")], ids=["plain", "hosted"])
def test_environments_sent_to_another_process_are_made_again_there(made):
    """With the ids that are registered here; a reset changes no last observation."""
    gym.register("Reused-v0", Reused)
    envs = VectorEnvs([made(lambda *_: gym.make("Reused-v0").unwrapped)] * 2)
    envs.reset(seed=0)
    sent = cloudpickle.dumps(envs)
    del gym.registry["Reused-v0"]
    again = cloudpickle.loads(sent)
    assert type(again) is VectorEnvs and not {*map(id, again.envs)} & {*map(id, envs.envs)}
    again.reset()
    found = [again.step(np.zeros(2, int))[4]["next_obs"][:, 0].tolist() for _ in range(4)]
    assert found == [[1, 1], [2, 2], [3, 3], [1, 1]]
    del gym.registry["Reused-v0"]


def test_a_namespace_is_a_part_of_a_checkpoint(tmp_path):
    now = SimpleNamespace(steps=3, best=0.5, first=np.array([True, False]), state=torch.ones(2, 3), note=None)
    checkpoint.write_state(tmp_path / "it", checkpoint.capture(now))
    other = SimpleNamespace(steps=0, best=0.0, first=np.zeros(2, bool), state=torch.zeros(2, 3), note="x")
    checkpoint.restore(other, checkpoint.read_state(tmp_path / "it"))
    assert other.steps == 3 and other.best == 0.5 and other.note is None
    assert other.first.tolist() == [True, False] and torch.equal(other.state, torch.ones(2, 3))
    parts = [SimpleNamespace(rows={"x": np.zeros(size)}) for size in (2, 3)]
    with pytest.raises(ValueError, match="shape"):
        checkpoint.restore(parts[0], checkpoint.capture(parts[1]))
    with pytest.raises(ValueError, match="shape"):
        checkpoint.restore(SimpleNamespace(**vars(other) | {"first": np.zeros(5, bool)}), checkpoint.capture(now))
    with pytest.raises(ValueError, match="steps"):
        checkpoint.restore(SimpleNamespace(steps=1), checkpoint.capture(now))


@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.5])
def test_due_updates_add_up(ratio):
    """After each iteration int(utd_ratio * steps since learning_starts) updates have been made, each number once."""
    due_updates = definitions("sac_continuous_action")["due_updates"]
    args = SimpleNamespace(utd_ratio=ratio, num_envs=3, learning_starts=7)
    made = []
    for step in range(3, 90, 3):
        made += due_updates(args, step, enough=True)
        assert made == list(range(int(ratio * max(0, step - 7))))


def test_updates_that_were_not_possible_are_not_made_up_for():
    due_updates = definitions("sac_continuous_action")["due_updates"]
    args = SimpleNamespace(utd_ratio=1.0, num_envs=2, learning_starts=0)
    assert list(due_updates(args, 10, enough=False)) == [] and list(due_updates(args, 12, enough=True)) == [10, 11]


@pytest.mark.parametrize("ratio", [0.25, 0.3, 1, 3])
def test_updates_between_steps_are_those_of_the_iterations_between(ratio):
    """Of any pieces of a training, as long as nothing is left out; the same body as in sac_parallel.py."""
    args = SimpleNamespace(utd_ratio=ratio, num_envs=2, learning_starts=7)
    due_updates = definitions("sac_continuous_action")["due_updates"]
    updates_between = definitions("td7")["updates_between"]
    one_by_one = [update for step in range(2, 41, 2) for update in due_updates(args, step, enough=True)]
    pieces = [update for ends in ((0, 6), (6, 18), (18, 40)) for update in updates_between(args, *ends, enough=True)]
    assert pieces == one_by_one and list(updates_between(args, 6, 18, enough=False)) == []


def test_a_whole_episode_is_counted_as_one_that_was_stepped():
    meters = [Meter(), Meter()]
    meters[0].episodes(20, np.array([1.5, 0.5]), np.array([False, False]))
    meters[0].episodes(22, np.array([2.0, 0.5]), np.array([True, False]))
    meters[1].episode(22, 3.5, 2)
    rows, others = ([{k: v for k, v in row.items() if k != "wall_time"} for row in m.take_rows()] for m in meters)
    assert rows == others == [{"global_step": 22, "charts/episodic_return": 3.5, "charts/episodic_length": 2}]
    assert meters[0].recent_return == meters[1].recent_return == 3.5
