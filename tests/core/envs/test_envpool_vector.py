"""EnvPoolVectorEnv against EnvPool itself: lives, ends of games, time limits, seeds."""

from functools import cache

import numpy as np
import pytest

from solorl.envs.envpool import ATARI_STEPS, EnvPoolVectorEnv

envpool = pytest.importorskip("envpool")
GAME, SEEDS = "Breakout-v5", [11, 12]
NOOP, FIRE = 0, 1


def raw(limit, seeds=SEEDS):
    """EnvPool's own environments with the seeds of ours; it resets them one step late."""
    seeds = [int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1 for seed in seeds]
    return envpool.make_gymnasium(GAME, num_envs=len(seeds), env_seed=seeds, max_episode_steps=limit, num_threads=1)


def play(actions, max_steps=None, seeds=SEEDS):
    """Ours, closed loop with given actions (num_steps, num_envs): the first observations, and the results of all steps;
    an array that is returned again must not change what an earlier step returned."""
    envs = EnvPoolVectorEnv(GAME, len(seeds), num_threads=1, max_steps=max_steps)
    first, info = envs.reset(seed=list(seeds))
    assert info["lives"].tolist() == [5] * len(seeds)
    steps = [envs.step(action) for action in actions]
    envs.close()
    return first, steps


@cache
def until_over():
    """Steps of the game of seed 11 in which only NOOP is chosen."""
    _, steps = play(np.full((200, 1), NOOP), seeds=[11])
    return 1 + next(t for t, step in enumerate(steps) if step[2][0])


def test_steps_are_those_of_envpool_with_fire_after_a_lost_life_and_no_dummies():
    """Two games side by side over several ends. By hand, each in a pool of its own: FIRE once after a lost life, and
    the step that EnvPool takes to reset an environment is left out."""
    actions = np.random.default_rng(0).integers(4, size=(300, 2))
    first, steps = play(actions)
    for n in range(2):
        pool = raw(100_000, [SEEDS[n]])
        obs, info = pool.reset()
        lives, fire, ends, losses = int(info["lives"][0]), False, 0, 0
        np.testing.assert_array_equal(first[n], obs[0])
        for t, (got, reward, terminated, truncated, infos) in enumerate(steps):
            obs, want_reward, over, _, info = pool.step(np.array([FIRE if fire else actions[t, n]]))
            assert (reward[n], terminated[n], truncated[n]) == (want_reward[0], over[0], False)
            assert infos["lives"][n] == (5 if over[0] else info["lives"][0])  # in the game that is shown
            fire = info["lives"][0] < lives and not over[0]
            losses, lives = losses + fire, int(info["lives"][0])
            if over[0]:  # the dummy transition: an ignored action, the first image of the next game
                np.testing.assert_array_equal(infos["final_obs"][n], obs[0])
                obs, dummy_reward, *_, info = pool.step(np.array([3]))
                assert dummy_reward[0] == 0
                lives, ends = int(info["lives"][0]), ends + 1
            np.testing.assert_array_equal(got[n], obs[0])
        assert ends >= 1 and losses >= 5


def test_the_game_goes_on_after_a_lost_life():
    """Who never presses FIRE loses all five lives; in EnvPool alone the game would stand still after the first."""
    _, steps = play(np.full((until_over(), 1), NOOP), seeds=[11])
    lives = [int(step[4]["lives"][0]) for step in steps[:-1]]
    assert set(lives) == {5, 4, 3, 2, 1} and lives == sorted(lives, reverse=True)
    assert not any(step[2][0] or step[3][0] for step in steps[:-1]) and steps[-1][2][0]
    pool = raw(100_000, [11])
    pool.reset()
    assert {int(pool.step(np.array([NOOP]))[4]["lives"][0]) for _ in steps} == {5, 4}


def test_fire_takes_the_place_of_one_action():
    """After a lost life LEFT and NOOP give the same, for FIRE is pressed; one step later they do not."""
    _, steps = play(np.full((100, 1), NOOP), seeds=[11])
    lost = next(t for t, step in enumerate(steps) if step[4]["lives"][0] == 4)
    images = {}
    for name, place in (("none", None), ("next", lost + 1), ("after", lost + 2)):
        actions = np.full((lost + 12, 1), NOOP)
        if place is not None:
            actions[place] = 3
        images[name] = np.stack([step[0][0, -1] for step in play(actions, seeds=[11])[1]])
    assert np.array_equal(images["none"], images["next"]) and not np.array_equal(images["none"], images["after"])


def test_a_game_over_is_reset_in_the_same_step():
    length, rng = until_over(), np.random.default_rng(0)
    _, steps = play(rng.integers(4, size=(length + 1, 2)) * [0, 1], seeds=[11, 12])
    obs, _, terminated, truncated, infos = steps[length - 1]
    assert terminated.tolist() == [True, False] and not truncated.any()
    assert infos["_final_obs"].tolist() == [True, False] and infos["final_obs"][1] is None
    assert infos["final_obs"][0].shape == (4, 84, 84)
    np.testing.assert_array_equal(infos["final_obs"][0][:3], steps[length - 2][0][0][1:])  # of the old game
    assert not np.array_equal(obs[0], infos["final_obs"][0])
    np.testing.assert_array_equal(steps[length][0][0][:3], obs[0][1:])  # the next step goes on from the new game
    assert infos["lives"][0] == steps[length][4]["lives"][0] == 5 and "final_obs" not in steps[length][4]


def test_a_time_limit_ends_the_game_in_its_last_step():
    """Again and again, in each environment; the game that comes is a new one, with all lives."""
    _, steps = play(np.full((65, 2), NOOP), max_steps=20)
    whole = play(np.full((20, 2), NOOP))[1]
    for t, (obs, _, terminated, truncated, infos) in enumerate(steps):
        assert not terminated.any() and truncated.tolist() == [(t + 1) % 20 == 0] * 2
        if truncated.any():
            assert all(final.shape == (4, 84, 84) for final in infos["final_obs"])
            assert steps[t + 1][4]["lives"].tolist() == [5, 5] and "final_obs" not in steps[t + 1][4]
            np.testing.assert_array_equal(steps[t + 1][0][:, :3], obs[:, 1:])
    for n in range(2):
        np.testing.assert_array_equal(steps[19][4]["final_obs"][n], whole[19][0][n])


def test_an_end_of_the_game_on_the_last_step_allowed_is_one():
    length = until_over()
    for limit, ends in ((length, (True, False)), (length - 1, (False, True)), (length + 1, (True, False))):
        _, steps = play(np.full((length, 1), NOOP), max_steps=limit, seeds=[11])
        t = min(limit, length) - 1
        assert tuple(bool(flag[0]) for flag in steps[t][2:4]) == ends
        assert not any(step[2][0] or step[3][0] for step in steps[:t])


def test_the_limit_of_a_game_is_that_of_gymnasium_files():
    assert EnvPoolVectorEnv(GAME, 1).max_steps == ATARI_STEPS == 27_000


def test_same_seeds_same_games_and_other_seeds_others():
    actions = np.random.default_rng(1).integers(4, size=(150, 2))
    (first, a), (again, b), (_, c) = play(actions), play(actions), play(actions, seeds=[11, 13])
    np.testing.assert_array_equal(first, again)
    for x, y in zip(a, b, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(x[:4], y[:4], strict=True))
    assert all(np.array_equal(x[0][0], z[0][0]) for x, z in zip(a, c, strict=True))  # seed 11 in both
    assert not all(np.array_equal(x[0][1], z[0][1]) for x, z in zip(a, c, strict=True))


def test_what_was_returned_stays_as_it_was():
    """A rollout keeps observations of earlier steps."""
    envs = EnvPoolVectorEnv(GAME, 2, num_threads=1, max_steps=5)
    kept = [envs.reset(seed=SEEDS)[0]]
    copies = [kept[0].copy()]
    for _ in range(12):
        obs, *_, infos = envs.step(np.full(2, 2))
        kept += [obs, *infos.get("final_obs", ()), infos["lives"]]
        copies += [np.array(x) for x in kept[len(copies) :]]
    assert all(np.array_equal(x, y) for x, y in zip(kept, copies, strict=True))


def test_environments_without_lives():
    """CartPole falls: reset in the same step, nothing is said of lives."""
    envs = EnvPoolVectorEnv("CartPole-v1", 2, num_threads=1)
    obs, infos = envs.reset(seed=[1, 2])
    assert infos == {} and obs.shape == (2, 4) and envs.max_steps == 500
    ends = 0
    for _ in range(40):
        obs, reward, terminated, truncated, infos = envs.step(np.ones(2, np.int32))
        assert (reward == 1).all() and not truncated.any() and "lives" not in infos
        for n in np.flatnonzero(terminated):
            assert (np.abs(obs[n]) <= 0.05).all() and np.abs(infos["final_obs"][n]).max() > 0.2
        ends += terminated.sum()
    assert ends >= 6
