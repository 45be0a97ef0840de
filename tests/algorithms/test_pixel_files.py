"""The files for images refuse vectors, and the files for vectors images: one sentence that names the file to use."""

import numpy as np
import pytest
import torch
from conftest import drop_last_checkpoint, rows
from gymnasium.vector import SyncVectorEnv
from pixel_probe import FakePool, use_fake_envpool

from solorl import Run
from solorl.catalog import header
from solorl.run.saving import Checkpoints
from solorl.scripts import not_for

FILES = {each.name: each for each in header.scripts() if each.framework == "torch"}
PIXELS = [name for name, each in FILES.items() if each.spaces.startswith("image ->")]
IMAGES = [each for each in FILES.values() if each.spaces.startswith("image -> discrete")]
VECTORS = [name for name, each in FILES.items() if each.spaces == "vector -> discrete"]


def refused(train, tmp_path, name, env_id):
    """The sentence with which a file refuses an environment; nothing has been written."""
    train(name, "--env-id", env_id, code=2)
    assert train.out.startswith("error: ") and train.out.count("\n") == 1 and not (tmp_path / "runs").exists()
    return train.out


def test_there_are_both_kinds():
    assert {"ppo_atari", "ppo_atari_envpool", "dqn_atari", "sac_atari"} <= set(PIXELS)
    assert {"ppo", "dqn", "sac_discrete"} <= set(VECTORS)


@pytest.mark.parametrize("name", PIXELS)
def test_pixel_files_refuse_vectors(name, train, tmp_path):
    """They name a file of their family that takes vectors and the same actions."""
    if "envpool" in name:
        pytest.importorskip("envpool")
    env_id = {"discrete": "CartPole-v1", "continuous": "Pendulum-v1"}[FILES[name].actions]
    sentence, use = refused(train, tmp_path, name, env_id), not_for(FILES[name].fields)["vector observations"]
    assert env_id in sentence and f" {use}" in sentence
    other = FILES[use.removesuffix(".py")]
    assert other.spaces == f"vector -> {FILES[name].actions}" and other.family == FILES[name].family


# The sentence is the library's: one file of each kind is enough in the first tier.
FIRST = {"ppo", "ppo_lstm", "ppo_jax", "dqn", "sac_discrete", "pqn"}


@pytest.mark.parametrize("name", [x if x in FIRST else pytest.param(x, marks=pytest.mark.slow) for x in VECTORS])
def test_vector_files_refuse_images(name, train, tmp_path):
    """They name a file that takes images: that of their header, of their own family where it has one."""
    sentence, named = refused(train, tmp_path, name, "ALE/Pong-v5"), not_for(FILES[name].fields).get("Atari games")
    start, use = sentence.removesuffix("\n").split("; use ")
    assert start.endswith(f"has image observations, but {name}.py takes vector observations") and named in (None, use)
    siblings = [each for each in IMAGES if each.family == FILES[name].family]
    assert FILES[use.removesuffix(".py")] in (siblings or IMAGES)


def slow(*names):
    """Files whose tests are in the second tier, because another file has the same lines."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def replay_flags(env_id, steps, *more):
    """A short training of a file with a replay buffer that does not learn."""
    words = f"--env-id pixel_doubles:{env_id} --total-timesteps {steps} --buffer-size 600 --learning-starts 10000"
    return [*words.split(), "--batch-size", 4, "--eval-episodes", 1, "--eval-every", 0, *more]


@pytest.mark.parametrize("name", ["dqn_atari", *slow("c51_atari", "rainbow_atari", "sac_atari")])
def test_no_life_is_lost_where_the_next_game_begins_with_fewer(name, train):
    """A time limit after a bonus life does not end the task, though the next game begins with fewer lives. QDagger and
    Ape-X, which have other flags and buffers, are tested with them."""
    flags = "--env-id pixel_doubles:PixelBonus-v0 --total-timesteps 120 --buffer-size 200 --learning-starts 110".split()
    v = train(name, *flags, "--batch-size", 4, "--eval-episodes", 1, "--eval-every", 0, "--save-every", 0)
    arrays = v["replay"].arrays
    assert np.sum(arrays["back"][:120] == 0) > 3 and not arrays["done"].any()  # 0: the first image of a game


@pytest.mark.parametrize("name", ["ppo_atari_envpool", "pqn_atari_envpool", "pqn_atari_envpool_lstm"])
def test_new_games_of_a_resumed_run_lose_no_life_in_their_first_step(name, train, monkeypatch):
    """EnvPool's games begin again; the lives in the checkpoint are those of games that are gone."""
    use_fake_envpool(monkeypatch)
    flags = "--env-id Catch-v5 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 32"
    run_dir = train(name, *flags.split(), "--eval-episodes", 1, "--eval-every", 0, "--save-every", 16)["run"].dir
    drop_last_checkpoint(run_dir)
    resumed, resume = [], Checkpoints.resume

    def noted(self, *inputs):
        found = resume(self, *inputs)
        self.parts["now"].lives[:] = 9  # a bonus life was saved
        resumed.append(found)
        return found

    monkeypatch.setattr(Checkpoints, "resume", noted)
    v = train(name, "--resume", run_dir)
    assert len(resumed) == 1 and v["start"] == 1 and not v["done"][0].any() and v["done"].any()


@pytest.mark.parametrize("name", ["dqn_atari", *slow("c51_atari", "rainbow_atari", "sac_atari")])
def test_a_life_lost_in_the_step_of_the_time_limit_ends_the_return(name, train):
    """The lives of the game that is over count, not those of the next one, which `infos` has. QDagger and Ape-X are
    tested with their own flags."""
    v = train(name, *replay_flags("PixelLastLife-v0", 120, "--save-every", 0))
    arrays, overs = v["replay"].arrays, len(rows(v["run"].dir, "charts/episodic_return"))
    assert overs > 4 and arrays["done"].sum() == overs


@pytest.mark.parametrize("name", ["ppo_atari", *slow("ppo_atari_lstm", "ppo_atari_multigpu")])
def test_no_value_comes_after_a_life_lost_in_the_step_of_the_time_limit(name, train):
    flags = "--num-envs 2 --num-steps 32 --num-minibatches 1 --update-epochs 1 --total-timesteps 64 --eval-episodes 1"
    v = train(name, "--env-id", "pixel_doubles:PixelLastLife-v0", *flags.split(), "--eval-every", 0)
    assert v["over"].sum() >= 2 and v["done"].sum() == v["over"].sum() and not v["final_value"].any()


@pytest.mark.parametrize("name", ["ppo_atari_envpool", "pqn_atari_envpool", "pqn_atari_envpool_lstm"])
def test_no_value_comes_after_a_life_lost_in_envpools_last_step(name, train, monkeypatch):
    use_fake_envpool(monkeypatch)
    info = FakePool._info

    def with_lives(self, ids, reward, terminated):
        return info(self, ids, reward, terminated) | {"lives": 3 - self.elapsed[ids] // 4}

    monkeypatch.setattr(FakePool, "_info", with_lives)
    monkeypatch.setattr("solorl.envs.envpool.ATARI_STEPS", 4)
    flags = "--env-id Catch-v5 --num-envs 2 --num-steps 8 --num-minibatches 2 --update-epochs 1 --total-timesteps 16"
    v = train(name, *flags.split(), "--eval-episodes", 1, "--eval-every", 0)
    assert v["over"].sum() == 4 and v["done"].sum() == 4 and not v["final_value"].any()


# ---------------------------------------------------------------------- replay buffers of runs that are resumed
def cut(run_dir):
    """Throw the last checkpoint of a run away."""
    drop_last_checkpoint(run_dir)
    return run_dir


def shown(stack):
    """Frame and game of each image of one stack (images, 84, 84)."""
    return tuple((int(image[0, 0]), int(image[-1, -1])) for image in np.asarray(stack))


def sampled(v):
    """The stacks obs and next_obs, as `shown`, of many transitions from the replay buffer of a training."""
    more = (1.0, 1.0) if "PrioritizedReplay" in v else ()
    for _ in range(20):
        batch = v["replay"].sample(32, *more, torch.device("cpu"))
        batch = batch[0] if more else batch
        yield from ((shown(obs), shown(next_obs)) for obs, next_obs in zip(batch.obs, batch.next_obs, strict=True))


@pytest.mark.parametrize("name", ["dqn_atari", "rainbow_atari", *slow("c51_atari", "sac_atari")])
def test_stacks_after_a_resume_without_the_replay_are_those_that_were_played(name, train, monkeypatch):
    """The images of a running game from before the resume are part of the first three stacks."""
    flags = replay_flags("PixelDiary-v0", 160, "--num-envs", 2, "--save-every", 80)
    run_dir = cut(train(name, *flags)["run"].dir)
    played, reset, step = set(), Run.reset, SyncVectorEnv.step

    def noted_reset(self, envs):
        obs = reset(self, envs)
        played.update(map(shown, obs))
        return obs

    def noted_step(self, action):
        result = step(self, action)
        ends = [result[4]["final_obs"][i] for i in np.flatnonzero(result[2] | result[3])]
        played.update(map(shown, [*result[0], *ends]))
        return result

    monkeypatch.setattr(Run, "reset", noted_reset)
    monkeypatch.setattr(SyncVectorEnv, "step", noted_step)
    v = train(name, "--resume", run_dir)
    stacks = {stack for transition in sampled(v) for stack in transition}
    assert v["start"] and not v["run"].restarted and len(stacks) > 60 and stacks <= played


@pytest.mark.parametrize("name", ["dqn_atari", "rainbow_atari", *slow("c51_atari", "sac_atari")])
def test_no_transition_is_of_two_games_where_a_resumed_game_begins_again(name, train):
    """Its replay buffer is there, but the simulator does not come to the state that was saved."""
    flags = replay_flags("PixelFickle-v0", 160, "--num-envs", 2, "--save-every", 80, "--save-replay")
    v = train(name, "--resume", cut(train(name, *flags)["run"].dir))
    assert v["run"].restarted == [0, 1] and "did not replay exactly" in train.out
    games = [{game for stack in transition for _, game in stack} for transition in sampled(v)]
    assert all(len(each) == 1 for each in games) and len(set.union(*games)) > 6
