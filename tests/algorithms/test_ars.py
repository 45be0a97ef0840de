"""ARS: its update against a loop, which episode belongs to which policy, its statistics; a policy it must learn."""

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, drop_last_checkpoint, rows

ARS = definitions("ars")
SMALL = "--num-directions 2 --num-top 1 --eval-every 0 --eval-episodes 1".split()
PENDULUM = ("--env-id", "Pendulum-v1", *SMALL)  # episodes of 200 steps


def test_the_update_is_that_of_the_paper():
    """Algorithm 2, lines 6 and 7, as a loop: the b best of N directions, over the deviation of their 2b returns."""
    rng = np.random.default_rng(0)
    returns, noise = rng.normal(size=(5, 2)), rng.normal(size=(5, 3, 4))
    order = sorted(range(5), key=lambda k: -max(returns[k]))[:3]
    used = [returns[k, side] for k in order for side in range(2)]
    mean = sum(used) / 6
    std = (sum((r - mean) ** 2 for r in used) / 6) ** 0.5
    expected = sum((returns[k, 0] - returns[k, 1]) * noise[k] for k in order) / (3 * std)
    np.testing.assert_allclose(ARS["update_direction"](returns, noise, 3), expected, rtol=1e-6)


def test_equal_returns_move_nothing():
    assert not ARS["update_direction"](np.ones((4, 2)), np.ones((4, 1, 1)), 4).any()


def test_each_policy_plays_one_episode_and_its_return_is_credited(train):
    """Before the update that ends the first iteration, and after it, on the same seed."""
    before = train("ars", *PENDULUM, "--total-timesteps", "799")
    assert before["now"].episode == 3 and not before["agent"].weight.any()
    after = train("ars", *PENDULUM, "--total-timesteps", "800")
    played = [row["charts/episodic_return"] for row in rows(after["run"].dir, "charts/episodic_return")]
    returns = np.array(played).reshape(2, 2)  # +noise and -noise of each direction in turn
    np.testing.assert_allclose(after["now"].returns, returns, rtol=1e-5)
    step = 0.02 * ARS["update_direction"](returns, before["now"].noise, 1)
    np.testing.assert_allclose(after["agent"].weight.numpy(), step, rtol=1e-4)
    assert not np.array_equal(before["now"].noise, after["now"].noise) and after["now"].episode == 0


@pytest.mark.parametrize(("steps", "side"), [(150, 1), (350, -1)])
def test_the_two_policies_of_a_direction_lie_on_both_sides(train, steps, side):
    v = train("ars", *PENDULUM, "--total-timesteps", steps, "--noise-std", "0.5")
    np.testing.assert_allclose(v["weight"], side * 0.5 * v["now"].noise[0])


def test_a_shift_is_subtracted_from_every_reward(train):
    plain, shifted = (train("ars", *PENDULUM, "--total-timesteps", "250", "--reward-shift", x) for x in (0, 3))
    np.testing.assert_allclose(shifted["now"].returns[0, 0], plain["now"].returns[0, 0] - 3 * 200)


def test_statistics_of_an_iteration_are_those_before_it(train):
    """Of 800 steps, an iteration, the next one uses the states; those of its own are seen only."""
    agent = train("ars", *PENDULUM, "--total-timesteps", "900")["agent"]
    assert (agent.obs_normalizer.count, agent.seen.count) == (800, 900)
    assert not torch.equal(agent.obs_normalizer.mean, agent.seen.mean)


def test_resumed_equals_uninterrupted(train):
    """In the middle of an iteration and of an episode."""
    whole = train("ars", *PENDULUM, "--total-timesteps", "1300", "--save-every", "450")
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    drop_last_checkpoint(run_dir)
    v = train("ars", "--resume", run_dir)
    assert v["start"] == 900 and comparable(run_dir) == expected
    assert torch.equal(v["agent"].weight, whole["agent"].weight) and v["agent"].weight.any()


def test_learns_a_policy_of_the_observation(train):
    """Without actions the return is -3.3 on average, with the best ones 0."""
    flags = "--total-timesteps 6000 --learning-rate 0.1 --noise-std 0.1 --eval-every 0".split()
    v = train("ars", "--env-id", "probes_offpolicy:Regulator-v0", *flags)
    assert rows(v["run"].dir, "eval/episodic_return")[-1]["eval/episodic_return"] > -0.3


def test_num_top_above_num_directions_is_refused(train):
    train("ars", *PENDULUM, "--num-top", "3", code=2)
    assert "--num-top 3 must be from 1 to --num-directions 2" in train.out
