"""What every file in JAX shares with its torch twin, and that a training of any of them goes on exactly."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import comparable, definitions, environment, rows, script
from recorded import recorded
from safetensors.numpy import load_file

from solorl.catalog import header as catalog
from solorl.machine import own_cores

TWINS = {Path(each.twin).stem: each.name for each in catalog.scripts() if each.twin}  # torch -> JAX
# The torch files that begin with an environment of MuJoCo: in JAX that would need EnvPool, which is an extra.
BODIES = {f"{name}_continuous_action" for name in ("ppo", "ddpg", "td3", "sac")} | {"crossq", "tqc"}
OFF_POLICY = "--total-timesteps 1200 --learning-starts 100 --batch-size 16 --buffer-size 500 --num-envs 2"
PPO = "--total-timesteps 1280 --num-envs 2 --num-steps 16 --num-minibatches 2"
EVERY = "--eval-episodes 1 --eval-every 400 --save-every 400"
ON_POLICY = {name for name in TWINS if name.startswith(("ppo", "pqn", "mappo"))}  # without replay
ROLLOUTS = {  # where the twin has a replay buffer: the fields that differ
    "alphazero": "buffer_size replay_ratio batch_size num_envs num_steps update_epochs num_minibatches "
    "search max_considered"
}
GAMES = {name for name in TWINS if "atari" in name}  # of EnvPool, which cannot be saved
OFFLINE = {"iql"}  # from a data set
ROOTS = ("ppo", "dqn")  # the others are in `make test-all`
ALONE = {"ppo_minatar_jax", "pqn_vdn_jax", "gumbel_muzero_jax"}  # games or a search in JAX: in torch they would be slow


def short(name):
    """The flags of a short training."""
    if name in ROLLOUTS:
        words = "--env-id games/TicTacToe-v0 --opponents random --num-envs 8 --num-steps 8 --num-minibatches 2"
        return [
            *words.split(),
            *"--num-simulations 2 --eval-simulations 2 --hidden-dim 16 --total-timesteps 1280".split(),
        ]
    if name in OFFLINE:
        words = "--env-id Pendulum-v1 --total-timesteps 1600 --batch-size 16 --log-every 100 --dataset"
        return [*words.split(), recorded("Pendulum-v1")]
    return (PPO if name in ON_POLICY else OFF_POLICY).split()


def test_there_are_twins():
    """Every file in JAX names one, except those that exist in JAX only."""
    assert set(TWINS.values()) == {each.name for each in catalog.scripts() if each.framework == "jax"} - ALONE
    assert {"ppo", "dqn", "c51"} | BODIES <= set(TWINS)


@pytest.mark.parametrize("name", TWINS)
def test_arguments_are_those_of_the_torch_twin(name):
    """Names, types and defaults."""
    fields = [dataclasses.fields(definitions(file)["Args"]) for file in (TWINS[name], name)]
    mine, torch = ([(f.name, f.type, f.default) for f in each if f.name != "num_seeds"] for each in fields)
    if name in BODIES | GAMES:
        assert ("env_id", str, "Pendulum-v1" if name in BODIES else "Pong-v5") in mine
        mine, torch = ([field for field in each if field[0] != "env_id"] for each in (mine, torch))
    own = ROLLOUTS.get(name, "").split()
    mine, torch = ([field for field in each if field[0] not in own] for each in (mine, torch))
    assert sorted(mine, key=repr) == sorted(torch, key=repr) and len(mine) > 10


def training(run):
    """All that the last checkpoint holds of a training, but the random numbers that JAX does not use."""
    tensors = load_file(max((Path(run) / "checkpoint").iterdir()) / "tensors.safetensors")
    return {name: array for name, array in tensors.items() if not name.startswith("/random")}


@pytest.mark.parametrize(
    "name",
    [name if name in ROOTS else pytest.param(name, marks=pytest.mark.slow) for name in TWINS if name not in GAMES],
)
@pytest.mark.slow
def test_a_stopped_training_goes_on_exactly(name, train, tmp_path):
    """Two seeds ended after a chunk, the second resumed alone: all that a checkpoint holds is equal to the bit."""
    flags = [TWINS[name], *short(name), *EVERY.split(), "--num-seeds", 2]
    train(*flags)
    train(*flags, "--target-return", -10_000, runs_dir=tmp_path / "cut")
    whole, cut = (next((tmp_path / folder).glob("*__2__*")) for folder in ("runs", "cut"))
    stopped_at, before = rows(cut)[-1]["global_step"], training(cut)
    train(TWINS[name], "--resume", cut, "--target-return", "None")
    last_steps = [rows(run)[-1]["global_step"] for run in (whole, cut)]
    assert 0 < stopped_at < 1000 and last_steps[0] == last_steps[1] >= 1200
    a, b = training(whole), training(cut)
    assert a.keys() == b.keys() == before.keys() and all(np.array_equal(a[key], b[key]) for key in a)
    assert ("/parts/training/replay.obs" in a) == (name not in ON_POLICY | OFFLINE | {*ROLLOUTS})
    learned = [key for key in a if any(part in key for part in ("params", "actor", "critic", "optimizer"))]
    learned = [key for key in learned if not key.endswith((".mean", ".std"))]  # of a data set
    assert learned and all(not np.array_equal(before[key], b[key]) for key in learned)
    evaluations = "eval/episodic_return"  # the target has more of them confirm it, and they see other first states
    logged = [[row for row in comparable(run) if evaluations not in row] for run in (whole, cut)]
    assert logged[0] == logged[1] and len(logged[0]) > 5


@pytest.mark.parametrize(
    "name", ["ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in sorted(ON_POLICY - GAMES - {"ppo"}))]
)
def test_the_learning_rate_falls_linearly_also_after_a_longer_resume(name, train):
    """0.01 * (1 - i / num_iterations) in iteration i of 32 steps, of 16 and then of 32 iterations; with --target-kl,
    which ends every iteration after one epoch, too."""
    flags = "--num-envs 2 --num-steps 16 --num-minibatches 2 --learning-rate 0.01 --eval-episodes 1 --log-every 64"
    stop = ["--target-kl", 0.0] if name.startswith(("ppo", "mappo")) else []
    stop += ["--warmup-rollouts", 0] if name == "ppo_rnd" else []
    every = ["--eval-every", 64, "--save-every", 512]
    run = train(TWINS[name], *flags.split(), *every, *stop, "--total-timesteps", 512)["run"].runs[0]
    first = rows(run.dir, "charts/learning_rate")
    train(TWINS[name], "--resume", run.dir, "--total-timesteps", 1024, "--resume-changed")
    both = rows(run.dir, "charts/learning_rate")
    assert len(first) >= 8 and both[: len(first)] == first and both[-1]["global_step"] == 1024
    for k, row in enumerate(both):
        i, num_iterations = row["global_step"] // 32 - 1, 16 if k < len(first) else 32
        assert row["charts/learning_rate"] == pytest.approx(0.01 * (1 - i / num_iterations), rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(len(own_cores()) < 2, reason="needs two cores")
@pytest.mark.parametrize("name", ["ppo", "sac_continuous_action", "iql"])
def test_a_seed_of_two_is_that_trained_alone_with_as_many_threads(name, tmp_path):
    """In processes of their own, whose XLA has two threads each: as users have it, not as these tests."""
    clean = {key: value for key, value in environment(XDG_CACHE_HOME=str(tmp_path)).items() if key != "NPROC"}
    flags = [*short(name), *EVERY.split(), "--runs-dir"]
    for more in (["together", "--num-seeds", 2], ["alone", "--seed", 2, "--threads", 2]):
        words = [sys.executable, script(TWINS[name]), *flags, tmp_path / more[0], *more[1:]]
        done = subprocess.run([str(word) for word in words], env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    one, other = (next((tmp_path / folder).glob("*__2__*")) for folder in ("together", "alone"))
    assert comparable(one) == comparable(other) and len(rows(one)) > 5
    a, b = training(one), training(other)
    assert a.keys() == b.keys() and all(np.array_equal(a[key], b[key]) for key in a)
