"""A run that is resumed with other arguments: they take effect, they are kept, and nothing that was learned is lost."""

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import comparable, environment, rows, script
from safetensors import safe_open
from safetensors.numpy import load_file
from test_actor_critic import SCRIPTS as ACTOR_CRITIC
from test_dqn import SCRIPTS as DQN
from test_resume import finish, start, wait_for_steps
from torch import nn

import solorl
from solorl.run import seeds

PENDULUM = "--env-id Pendulum-v1 --total-timesteps 300 --learning-starts 100 --batch-size 16 --buffer-size 150"
PENDULUM += " --eval-every 100 --eval-episodes 1 --save-every 100"
PPO = "--num-envs 2 --num-steps 32 --total-timesteps 640 --eval-every 320 --eval-episodes 2"


def arguments(run_dir):
    return json.loads((run_dir / "config.json").read_text())["args"]


def test_an_extended_run_is_the_longer_one(train, tmp_path):
    """All rows, the best model and the weights, as if 960 steps had been the total at first; it ended with 640."""
    flags = [*PPO.split(), "--no-anneal-lr", "--log-every", "320"]  # 640 has a row in any case
    whole = train("ppo", *flags, "--total-timesteps", 960)["run"].dir
    run_dir = train("ppo", *flags, runs_dir=tmp_path / "short")["run"].dir
    train("ppo", "--resume", run_dir, "--total-timesteps", 960, "--resume-changed")
    assert comparable(run_dir) == comparable(whole)
    assert [row["global_step"] for row in rows(run_dir, "eval/episodic_return")] == [320, 640, 960]
    for name in ("model.safetensors", "model_last.safetensors"):
        with safe_open(run_dir / name, "np") as mine, safe_open(whole / name, "np") as other:
            assert mine.metadata() == other.metadata()
            assert all(np.array_equal(mine.get_tensor(key), other.get_tensor(key)) for key in other.keys())  # noqa: SIM118


def test_changed_arguments_belong_to_the_run_from_then_on(train):
    run_dir = train("ppo", *PPO.split())["run"].dir
    before = arguments(run_dir)
    train("ppo", "--resume", run_dir, "--total-timesteps", 960, "--gamma", 0.9, "--resume-changed")
    config = json.loads((run_dir / "config.json").read_text())
    assert config["args"] == before | {"total_timesteps": 960, "gamma": 0.9}
    assert config["changes"] == [{"step": 640, "args": {"total_timesteps": [640, 960], "gamma": [0.99, 0.9]}}]
    v = train("ppo", "--resume", run_dir)  # the same command that an interrupted run names
    assert v["args"].gamma == 0.9 and v["args"].total_timesteps == 960 and v["start"] == 15
    assert json.loads((run_dir / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("name", "flags", "changed"),
    [
        ("ppo", PPO, "--num-steps 64"),
        pytest.param(
            "ppo_jax", "--num-envs 2 --num-steps 32 --total-timesteps 128", "--num-steps 16", marks=pytest.mark.slow
        ),
        ("dqn", "--total-timesteps 200 --learning-starts 100 --batch-size 16", "--train-frequency 20"),
    ],
)
def test_the_size_of_an_iteration_cannot_change(name, flags, changed, train):
    """A checkpoint counts iterations: of another size they would be other steps, and the learning rate another one."""
    run = train(name, *flags.split(), "--eval-episodes", 1)["run"]
    run_dir = getattr(run, "runs", [run])[0].dir
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}
    more = ["--total-timesteps", 1280, "--resume-changed", *changed.split()]
    train(name, "--resume", run_dir, *more, code=2)
    assert "an iteration had [" in train.out.splitlines()[-1] and "Traceback" not in train.out
    assert {path: path.read_bytes() for path in before} == before
    train(name, "--resume", run_dir, "--total-timesteps", 1280, "--resume-changed")


def test_a_run_has_the_script_that_trains_it(train, tmp_path):
    """One that has changed since the start is the run's from then on, because its weights are those of a ReLU now; and
    the run can be played after the next edit."""
    mine = tmp_path / "mine.py"
    mine.write_text(script("ppo").read_text())
    flags = "--num-envs 2 --num-steps 32 --total-timesteps 64 --eval-episodes 1".split()
    run_dir = train(mine, *flags)["run"].dir
    config = json.loads((run_dir / "config.json").read_text())
    train(mine, "--resume", run_dir)
    assert json.loads((run_dir / "config.json").read_text()) == config
    mine.write_text(second := mine.read_text().replace("nn.Tanh()", "nn.ReLU()"))
    train(mine, "--resume", run_dir, "--total-timesteps", 128, "--resume-changed")
    assert "mine.py has changed" in train.out
    assert (run_dir / "mine.py").read_text() == second
    mine.write_text("")
    assert "ReLU" in str(solorl.load(run_dir).models["agent"])
    before, now = (hashlib.sha256(text.encode()).hexdigest() for text in (script("ppo").read_text(), second))
    config = json.loads((run_dir / "config.json").read_text())
    change = {"step": 64, "args": {"total_timesteps": [64, 128]}, "script_sha256": [before, now]}
    assert config["script_sha256"] == now and config["changes"] == [change]


def test_arguments_that_json_does_not_know(train, tmp_path):
    """What only the file can set, such as a tuple, a path, a class or a function, is the same when a run is resumed or
    loaded, and not a change."""
    mine, text = tmp_path / "mine.py", script("ppo").read_text()
    fields = """class Args(RunArgs):
    sizes: tuple[tuple[int, ...], ...] = ((64,), (64,))
    data: Path = Path("data")
    layer: type = nn.Tanh
    squash: Any = torch.tanh
"""
    text = text.replace("class Args(RunArgs):\n", fields).replace(
        "import gymnasium", "from pathlib import Path\nfrom typing import Any\nimport gymnasium", 1
    )
    mine.write_text(text)
    flags = "--num-envs 2 --num-steps 32 --total-timesteps 64 --eval-episodes 1".split()
    run = train(mine, *flags)["run"]
    config = (run.dir / "config.json").read_text()
    assert json.loads(config)["args"]["sizes"] == [[64], [64]]
    given = [run.args, train(mine, "--resume", run.dir)["args"], solorl.load(run.dir).args]
    expected = (((64,), (64,)), Path("data"), nn.Tanh, torch.tanh)
    assert [(args.sizes, args.data, args.layer, args.squash) for args in given] == [expected] * 3
    assert (run.dir / "config.json").read_text() == config


def test_the_best_model_is_that_of_the_environment_that_is_trained_on(train):
    """Each score in the second environment is lower than all in the first, whose best model is kept."""
    flags = "--num-envs 2 --num-steps 32 --total-timesteps 128 --eval-every 64 --eval-episodes 2".split()
    run_dir = train("ppo", *flags)["run"].dir
    best = (run_dir / "model.safetensors").read_bytes()
    more = ["--env-id", "probes:ShortCartPole-v0", "--total-timesteps", 256, "--resume-changed"]
    train("ppo", "--resume", run_dir, *more)
    with safe_open(run_dir / "model.safetensors", "np") as file:
        about = file.metadata()
    scores = {row["global_step"]: row["eval/episodic_return"] for row in rows(run_dir, "eval/episodic_return")}
    assert max(scores[192], scores[256]) == scores[int(about["step"])] == float(about["eval/episodic_return"])
    assert (run_dir / "model_before.safetensors").read_bytes() == best


@pytest.mark.parametrize(
    ("name", "flags", "optimizers"),
    [
        ("td3_continuous_action", "--learning-rate 1e-5", {"actor_optimizer": [1e-5], "critic_optimizer": [1e-5]}),
        (
            "sac_continuous_action",
            "--policy-lr 1e-6 --q-lr 1e-5",
            {"actor_optimizer": [1e-6], "alpha_optimizer": [1e-5], "critic_optimizer": [1e-5]},
        ),
    ],
)
def test_a_changed_learning_rate_takes_effect(name, flags, optimizers, train):
    run_dir = train(name, *PENDULUM.split(), "--save-replay")["run"].dir
    v = train(name, "--resume", run_dir, *flags.split(), "--total-timesteps", 400, "--resume-changed")
    for optimizer, sizes in optimizers.items():
        assert [group["lr"] for group in v[optimizer].param_groups] == sizes
        state = next(iter(v[optimizer].state.values()))
        assert float(state["step"]) > 200 / 2  # and Adam goes on: it has seen the steps before the change, too


def test_what_does_not_fit_is_one_sentence(train):
    run_dir = train("sac_continuous_action", *PENDULUM.split())["run"].dir
    more = ["--total-timesteps", 400, "--resume-changed"]
    for flags, words in (
        (["--env-id", "MountainCarContinuous-v0"], "the part actor of the checkpoint does not fit: "),
        (["--num-envs", 2], "the part envs of the checkpoint does not fit: there were 1 environments, not 2"),
    ):
        folder = run_dir.with_name("copy")
        shutil.copytree(run_dir, folder)
        train("sac_continuous_action", "--resume", folder, *flags, *more, code=2)
        assert words in train.out and "Traceback" not in train.out
        shutil.rmtree(folder)


def test_a_larger_buffer_holds_no_rows_that_never_were(train):
    """300 steps in a ring of 150, saved every 100, leave 200 rows on the disk; a ring of 1000 begins with them."""

    def rows_of(replay):
        return np.concatenate([array.reshape(len(array), -1) for array in replay.arrays.values()], axis=1)

    v = train("td3_continuous_action", *PENDULUM.split(), "--save-replay")
    last = rows_of(v["replay"])[np.arange(150, 300) % 150]
    more = "--buffer-size 1000 --total-timesteps 400 --resume-changed".split()
    v = train("td3_continuous_action", "--resume", v["run"].dir, *more)
    stored = rows_of(v["replay"])
    assert v["replay"].inserted == 300 and np.array_equal(stored[50:200], last)
    assert np.abs(stored[:300]).sum(1).min() > 0 and not stored[300:].any()
    again = train("td3_continuous_action", "--resume", v["run"].dir)["replay"]
    assert again.inserted == 300 and np.array_equal(rows_of(again), stored)


@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ACTOR_CRITIC), *DQN])
def test_without_its_replay_a_run_learns_once_the_buffer_is_filled_as_at_the_start(name, train):
    env_id = "Pendulum-v1" if "continuous" in name else "CartPole-v1"
    flags = ["--env-id", env_id, *"--total-timesteps 1000 --learning-starts 200 --batch-size 16".split()]
    run_dir = train(name, *flags, "--eval-episodes", 1)["run"].dir
    weights = load_file(run_dir / "model_last.safetensors")
    for total, same in ((1190, True), (1300, False)):
        folder = run_dir.with_name(f"to_{total}")
        shutil.copytree(run_dir, folder)
        v = train(name, "--resume", folder, "--total-timesteps", total, "--resume-changed")
        assert "the part replay was not saved" in train.out and v["replay"].inserted == total - 1000
        now = load_file(folder / "model_last.safetensors")
        assert all(np.array_equal(now[key], weights[key]) for key in weights if "target" not in key) == same


def test_episodes_that_begin_anew_begin_with_nothing(train, monkeypatch):
    """Where the simulator cannot be replayed: discounted rewards so far, random actions that last."""
    fickle = "--env-id probes:Fickle-v0 --total-timesteps 128 --num-envs 2 --eval-episodes 1 --save-every 64".split()
    for name, what, more in (
        ("ppo_normalized", "so_far", "--num-steps 32"),
        ("ez_greedy_dqn", "left", "--start-e 1 --end-e 1"),
    ):
        folder = train(name, *fickle, *more.split())["run"].dir
        shutil.rmtree(max((folder / "checkpoint").iterdir()))
        seen = {}

        class Watched(sys.modules["solorl"].Run):
            def reset(self, envs, seen=seen, what=what):
                seen["now"] = self.checkpoints.parts["now"]
                assert self.restarted == [0, 1] and not getattr(seen["now"], what).any()
                return super().reset(envs)

        with monkeypatch.context() as patch:
            patch.setattr("solorl.Run", Watched)
            train(name, "--resume", folder)
        assert "restart" in train.out and getattr(seen["now"], what).any()  # the part itself, in use again by now


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ddpg_continuous_action_jax", "td3_continuous_action_jax", "sac_continuous_action_jax"]
)
def test_a_training_in_jax_can_be_extended(name, train, tmp_path):
    """Equal to the longer one, its replay included: the ring had not begun to overwrite its rows."""
    flags = "--env-id Pendulum-v1 --learning-starts 100 --batch-size 16 --eval-episodes 1 --eval-every 0".split()
    run_dir = train(name, *flags, "--total-timesteps", 300)["run"].runs[0].dir
    train(name, "--resume", run_dir, "--total-timesteps", 500, "--resume-changed")
    whole = train(name, *flags, "--total-timesteps", 500, runs_dir=tmp_path / "whole")["run"].runs[0].dir
    one, other = (
        load_file(max((folder / "checkpoint").iterdir()) / "tensors.safetensors") for folder in (run_dir, whole)
    )
    parts = [array.reshape(500, -1) for key, array in one.items() if key.startswith("/parts/training/replay.")]
    assert [part.shape[1] for part in parts].count(3) == 2 and np.concatenate(parts, axis=1).any(1).all()
    assert sum(part.shape[1] for part in parts) == 9 and parts[0].any()
    for key in other:
        assert key.startswith("/random") or np.array_equal(one[key], other[key]), key


@pytest.mark.slow
def test_a_ring_that_has_wrapped_is_not_lengthened(train):
    flags = "--env-id Pendulum-v1 --learning-starts 100 --batch-size 16 --eval-episodes 1 --total-timesteps 300".split()
    run_dir = train("ddpg_continuous_action_jax", *flags, "--buffer-size", 200)["run"].runs[0].dir
    more = "--buffer-size 400 --total-timesteps 500 --resume-changed".split()
    train("ddpg_continuous_action_jax", "--resume", run_dir, *more, code=2)
    assert "replay.obs is missing or has another shape than (400, 3)" in train.out


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files")
@pytest.mark.slow
def test_a_disk_that_is_really_full_keeps_the_last_checkpoint(tmp_path):
    """No file may be larger than 300,000 bytes: the third checkpoint with its networks would be."""
    flags = [*PENDULUM.split(), "--save-every", "50", "--runs-dir", str(tmp_path), "--no-save-model"]
    words = [sys.executable, str(script("td3_continuous_action")), *flags]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))  # noqa: E731
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), preexec_fn=limit, timeout=300)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "the checkpoint of step 50 could not be written (File too large)\n" in done.stderr
    assert "checkpoint (File too large)" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert list(next(tmp_path.glob("Pendulum*/checkpoint")).iterdir()) == []  # nothing half written stays


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files")
@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_stops_nothing(tmp_path):
    """No file may grow while it is full. TensorBoard is off from then on, with one sentence; all rows and a checkpoint
    are written once there is room."""
    words = [sys.executable, str(script("ppo")), *PPO.split(), "--total-timesteps", "10000000", "--eval-every", "0"]
    words += ["--log-every", "64", "--save-every", "640", "--runs-dir", str(tmp_path)]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dir = wait_for_steps(tmp_path, 1280, process)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    said = [process.stderr.readline() for _ in range(3)]  # of metrics, TensorBoard and a checkpoint
    full = max(row["global_step"] for row in rows(run_dir))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_for_steps(tmp_path, full + 1280, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in "".join(said) + err
    assert sum("TensorBoard is off, the training continues" in line for line in [*said, *err.splitlines()]) == 1
    steps = [row["global_step"] for row in rows(run_dir, "losses/value_loss")]
    assert steps == list(range(64, steps[-1] + 64, 64))
    assert f"step_{steps[-1]:012d}" in [path.name for path in (run_dir / "checkpoint").iterdir()]


def test_a_checkpoint_that_fails_takes_nothing_from_the_one_before(train, tmp_path, monkeypatch):
    """The replay buffer of the last good checkpoint stays on the disk although the ring goes on."""
    from solorl.checkpoints import checkpoint as state

    real = state.write_state

    def first_two(folder, tree):
        if tree["run"]["step"] > 100:
            raise OSError(28, "No space left on device")
        real(folder, tree)

    monkeypatch.setattr(state, "write_state", first_two)
    flags = [*PENDULUM.split(), "--buffer-size", "80", "--save-every", "50", "--save-replay"]
    train("td3_continuous_action", *flags, code=4)
    (run_dir,) = (tmp_path / "runs").iterdir()
    monkeypatch.setattr(state, "write_state", real)
    v = train("td3_continuous_action", "--resume", run_dir)
    assert "resumed at step 100" in train.out and "starts empty" not in train.out
    assert v["replay"].inserted == 300


@pytest.mark.slow
# ---------------------------------------------------------------------- what may happen to a run folder
def test_a_run_that_is_in_use_is_refused(tmp_path):
    """A second process is refused while the first trains, whatever it would do; afterwards the run can be resumed."""
    flags = ["--total-timesteps", "400000", "--eval-every", "0", "--save-every", "2000", "--num-envs", "2"]
    words = [sys.executable, str(script("ppo"))]
    first = start([*words, *flags, "--runs-dir", str(tmp_path)])
    run_dir = wait_for_steps(tmp_path, 4000, first)
    second = subprocess.run([*words, "--resume", str(run_dir)], capture_output=True, text=True, env=environment())
    assert second.returncode == 2 and first.poll() is None
    assert second.stderr == f"error: another process is training in {run_dir}; it must end first\n"
    first.send_signal(signal.SIGTERM)
    first.wait()
    assert len(rows(run_dir)) > 10  # all lines are whole
    more = ["--resume", str(run_dir), "--total-timesteps", str(rows(run_dir)[-1]["global_step"]), "--resume-changed"]
    finish([*words, *more])


def test_nothing_is_written_before_everything_fits(train):
    run_dir = train("ppo", *PPO.split())["run"].dir
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    train("ppo", "--resume", run_dir, "--env-id", "Acrobot-v1", "--resume-changed", code=2)
    assert "the part agent of the checkpoint does not fit: " in train.out and "Traceback" not in train.out
    for tensors in run_dir.glob("checkpoint/*/tensors.safetensors"):
        tensors.write_bytes(before[tensors][:100])
    train("ppo", "--resume", run_dir, code=2)
    assert "no checkpoint in" in train.out and "the run is left as it is" in train.out
    for tensors in run_dir.glob("checkpoint/*/tensors.safetensors"):
        tensors.write_bytes(before[tensors])
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", ["cut", "gone", "garbage"])
def test_lost_metrics_do_not_end_a_training(damage, train):
    run_dir = train("ppo", *PPO.split())["run"].dir
    file = run_dir / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text[:-20] if damage == "cut" else text.replace(text.splitlines()[3], "{garbage", 1))
    if damage == "gone":
        file.unlink()
    train("ppo", "--resume", run_dir, "--total-timesteps", 960, "--resume-changed")
    lines = file.read_text().splitlines()
    assert json.loads(lines[-1])["global_step"] == 960 and (run_dir / "learning_curve.png").exists()
    if damage == "cut":
        whole = text.splitlines()[:-1]
        assert lines[: len(whole)] == whole
        assert f"rows of {file} are missing" in train.out
    assert "Traceback" not in train.out


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_a_training(tmp_path):
    words = [sys.executable, str(script("ppo")), *PPO.split(), "--eval-every", "64", "--runs-dir", str(tmp_path)]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0 and process.stderr.read() == ""
    run_dir = next(tmp_path.iterdir())
    assert json.loads((run_dir / "status.json").read_text())["status"] == "finished"
    assert (run_dir / "model_last.safetensors").exists()


@pytest.mark.slow
def test_a_log_on_a_full_disk_does_not_end_a_training(tmp_path):
    words = [
        sys.executable,
        str(script("ppo_jax")),
        "--total-timesteps",
        "512",
        "--compile",
    ]  # which gives a warning
    words += ["--eval-episodes", "1", "--runs-dir", str(tmp_path)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(words, env=environment(), stdout=full, stderr=full).returncode == 0
    assert json.loads((next(tmp_path.iterdir()) / "status.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_closed_terminal_saves_unless_nohup_says_otherwise(tmp_path):
    words = [sys.executable, str(script("ppo")), "--total-timesteps", "200000", "--eval-every", "0"]
    process = start([*words, "--runs-dir", str(tmp_path / "a")])
    run_dir = wait_for_steps(tmp_path / "a", 2000, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0 and "--resume" in process.stdout.read()
    assert json.loads((run_dir / "status.json").read_text())["status"] == "stopped" and any(
        (run_dir / "checkpoint").iterdir()
    )
    process = start(["nohup", *words[:-4], "--total-timesteps", "20480", "--runs-dir", str(tmp_path / "b")])
    run_dir = wait_for_steps(tmp_path / "b", 2000, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0
    assert json.loads((run_dir / "status.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_a_group_of_seeds_says_how_to_go_on_and_what_is_missing(tmp_path, train):
    flags = "--num-seeds 2 --total-timesteps 2000000 --eval-every 0 --save-every 0".split()
    process = start([sys.executable, str(script("ppo_jax")), *flags, "--runs-dir", str(tmp_path)])
    run_dir = wait_for_steps(tmp_path, 8000, process)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    text = process.stdout.read()
    last = text.splitlines()[-1]
    assert "\ndevice cpu, " in text and " steps/s, 2 seeds together" in text
    first, second = sorted(tmp_path.iterdir(), key=lambda path: path.name.split("__")[2])
    assert "saved at step" in last and last.endswith(f" train ppo_jax --resume {first} --num-seeds 2")
    assert run_dir in (first, second)
    shutil.rmtree(second)
    train("ppo_jax", "--resume", first, "--num-seeds", 2, code=2)
    assert f"there is no run folder {second}; continue one seed by its own folder" in train.out


def states(folder):
    return [json.loads(file.read_text())["status"] for file in sorted(folder.glob("*/status.json"))]


DQN_JAX = "--num-seeds 2 --learning-starts 100 --eval-every 1000 --eval-episodes 1 --save-every 1000".split()


@pytest.mark.slow
def test_seeds_that_do_not_fit_together_are_left_as_they_are(train, tmp_path):
    train("dqn_jax", *DQN_JAX, "--total-timesteps", 2000)
    first, second = sorted(tmp_path.glob("runs/*"))
    assert states(first.parent) == ["finished", "finished"]
    before = [comparable(run) for run in (first, second)]
    train("dqn_jax", "--resume", second, "--total-timesteps", 3000, "--learning-rate", 1e-3, "--resume-changed")
    files = {path: path.read_bytes() for run in (first, second) for path in run.iterdir() if path.is_file()}
    train("dqn_jax", "--resume", first, "--num-seeds", 2, code=2)
    assert "the run was started with other arguments" in train.out and "--learning-rate 0.001 -> 0.00025" in train.out
    train("dqn_jax", "--resume", first, "--num-seeds", 2, "--resume-changed", code=2)
    assert "the seeds stand at different steps ([2000, 3000]); resume each alone" in train.out
    assert states(first.parent) == ["finished", "finished"] and comparable(first) == before[0]
    assert all(path.read_bytes() == content for path, content in files.items())
    # the one that went on alone is no longer counted as one of two trained at once
    assert (first / "together.json").exists() and not (second / "together.json").exists()


def test_the_line_of_all_seeds_leaves_out_one_that_has_diverged():
    runs, said = object.__new__(seeds.Runs), []
    runs.num_seeds, runs.say = 3, said.append
    ends = [
        ("finished", (8, 100.0, 0.0)),
        ("diverged: losses/loss is nan", (4, 1.0, 0.0)),
        ("finished", (8, 120.0, 0.0)),
    ]
    runs.runs = [
        SimpleNamespace(folder=SimpleNamespace(status=status), evaluator=SimpleNamespace(last=last))
        for status, last in ends
    ]
    runs._say_evaluations("in the end:")
    assert said == ["in the end:  evaluation 110.0, from 100.0 to 120.0, 2 seeds"]


@pytest.mark.parametrize(
    ("endings", "want"),
    [
        (["signal", "signal"], ["saved at step 7; how to go on 0 --num-seeds 2"]),
        (["target", "signal"], ["saved at step 7; how to go on 1"]),
        (["signal", "target"], ["saved at step 7; how to go on 0"]),
        (["target", "target"], ["curves and models in run0 to run1; play one: solo play run0"]),
    ],
)
def test_where_some_seeds_have_ended_the_others_say_how_each_goes_on(monkeypatch, endings, want):
    """The seeds stand at different iterations then, so that no command goes on with all."""
    runs, said = object.__new__(seeds.Runs), []
    runs.num_seeds = 2
    runs.runs = [
        SimpleNamespace(dir=Path(f"run{i}"), step=7, ending=SimpleNamespace(why=ending), script=Path("ppo.py"))
        for i, ending in enumerate(endings)
    ]
    monkeypatch.setattr(seeds, "how_to_go_on", lambda script, folder: f"how to go on {folder.name[3:]}")
    runs.say = said.append
    runs._say_where()
    assert said == want


def test_the_last_of_two_resumes_counts(train, tmp_path):
    one, other = (train("ppo", *PPO.split(), "--gamma", g, runs_dir=tmp_path / g)["run"].dir for g in ("0.9", "0.8"))
    v = train("ppo", "--resume", one, "--resume", other)
    assert v["args"].gamma == 0.8 and v["run"].dir == other


@pytest.mark.slow
def test_characters_that_cannot_be_shown_do_not_end_a_training(tmp_path):
    words = [sys.executable, str(script("ppo")), *PPO.split(), "--runs-dir", str(tmp_path)]
    done = subprocess.run(words, env=environment(PYTHONIOENCODING="ascii"), capture_output=True, text=True)
    assert done.returncode == 0 and " ? " in done.stdout, done.stderr
    assert states(tmp_path) == ["finished"]


@pytest.mark.slow
def test_ctrl_c_while_jax_compiles_ends_cleanly(tmp_path):
    flags = ["--total-timesteps", "400000", "--num-steps", "33", "--num-minibatches", "3", "--eval-episodes", "1"]
    cache = environment(XDG_CACHE_HOME=str(tmp_path / "cache"), PYTHONUNBUFFERED="1")
    words = [sys.executable, str(script("ppo_jax")), *flags, "--runs-dir", str(tmp_path / "runs")]
    process = subprocess.Popen(words, env=cache, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert "run folder" in process.stdout.readline()  # compilation begins after it
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out = process.stdout.read()
    assert process.wait() == 130 and "saved at step" in out and "Traceback" not in out, out


@pytest.mark.slow
def test_observations_of_other_libraries_can_be_saved(train):
    """Gymnasium's environments in JAX: they draw from a generator of their own, so the run says that they restart."""
    flags = ["--env-id", "phys2d/CartPole-v1", *PPO.split(), "--save-every", "320"]
    run_dir = train("ppo", *flags)["run"].dir
    shutil.rmtree(max((run_dir / "checkpoint").iterdir()))
    train("ppo", "--resume", run_dir)
    assert "[0, 1] restart" in train.out
