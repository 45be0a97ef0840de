"""Several processes that train one run (ranks): what they learn, how they end, and what a checkpoint holds of them.

Ranks are forked from the process of the tests, which has torch loaded already; the marked tests start real ones.
"""

import ast
import atexit
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import comparable, definitions, documented_keys, drop_last_checkpoint, environment, refused, rows, script
from test_pixels import LEARNS

NAME = "ppo_atari_multigpu"
MULTI, SINGLE = definitions(NAME), definitions("ppo_atari")
TINY = "--env-id pixel_probe:Catch-v0 --num-envs 4 --num-steps 12 --num-minibatches 2 --update-epochs 2".split()
TINY += "--eval-episodes 1 --eval-every 0 --save-every 0 --log-every 1".split()
ENDLESS = [*TINY, "--num-minibatches", "1", "--update-epochs", "1", "--total-timesteps", "1000000"]
ENDLESS += ["--save-every", "1"]


class Ranks:
    """Forked processes that run a script with the same flags, each with its words and, at its end, its weights."""

    def __init__(self, folder, count, *flags, path=None):
        self.folder, self.began, self.path = Path(folder), time.monotonic(), str(path or script(NAME))
        self.folder.mkdir(exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        words = [str(word) for word in flags]
        words += [] if "--resume" in words else ["--runs-dir", str(self.folder / "runs")]
        self.pids = [self._start(rank, count, words) for rank in range(count)]

    def _start(self, rank, count, words):
        if pid := os.fork():
            return pid
        code = 1
        try:
            atexit._clear()  # what pytest wants at its end
            out = os.open(self.folder / f"words{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            sys.argv = [self.path, *words]
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "WORLD_SIZE": str(count)}
            os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            variables = runpy.run_path(self.path, run_name="__main__")
            np.save(self.folder / f"weights{rank}.npy", weights(variables["agent"]))
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    def codes(self, timeout=60):
        """The exit codes of all ranks, which must have ended in so many seconds."""
        deadline, codes = time.monotonic() + timeout, {}
        while len(codes) < len(self.pids):
            for pid in set(self.pids) - set(codes):
                if (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = os.waitstatus_to_exitcode(found[1])
            if time.monotonic() > deadline:
                for pid in set(self.pids) - set(codes):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                pytest.fail(f"ranks still run after {timeout} s: {[self.words(r) for r in range(len(self.pids))]}")
            time.sleep(0.02)
        return [codes[pid] for pid in self.pids]

    def words(self, rank):
        """What a rank has said so far."""
        path = self.folder / f"words{rank}"
        return path.read_text() if path.exists() else ""

    def weights(self, rank):
        """The weights that it has learned."""
        return np.load(self.folder / f"weights{rank}.npy")

    def wait_for(self, pattern, seconds=60):
        """Wait until a file of the run folder is there."""
        deadline = time.monotonic() + seconds
        while not list(self.folder.glob(f"runs/*/{pattern}")):
            assert time.monotonic() < deadline, (pattern, self.words(0), self.words(1))
            time.sleep(0.02)

    @property
    def run_dir(self):
        """The only run folder."""
        [found] = (self.folder / "runs").iterdir()
        return found


def weights(agent):
    """All parameters in one vector."""
    return torch.nn.utils.parameters_to_vector(agent.parameters()).detach().numpy()


# ---------------------------------------------------------------------- what they learn
def test_two_ranks_learn_what_one_learns(train, tmp_path):
    """And one rank, bit for bit, what `ppo_atari.py` does. The games, so the rows of episodes, are those of one rank;
    both ranks end with the same weights to the last bit."""
    flags = [*TINY, "--total-timesteps", "96"]
    parent, one = (train(name, *flags, runs_dir=tmp_path / name) for name in ("ppo_atari", NAME))
    assert np.array_equal(weights(one["agent"]), weights(parent["agent"]))
    assert comparable(one["run"].dir) == comparable(parent["run"].dir)
    two = Ranks(tmp_path / "two", 2, *flags)
    assert two.codes() == [0, 0], two.words(0) + two.words(1)
    assert np.array_equal(two.weights(0), two.weights(1)) and two.words(1) == ""
    np.testing.assert_allclose(two.weights(0), weights(one["agent"]), rtol=0, atol=1e-5)
    torch.manual_seed(1)
    assert np.abs(two.weights(0) - weights(MULTI["Agent"](3))).max() > 1e-4  # learning has moved them
    expected, got = comparable(one["run"].dir), comparable(two.run_dir)
    assert [row.keys() for row in got] == [row.keys() for row in expected]
    assert [r for r in got if "losses/entropy" not in r] == [r for r in expected if "losses/entropy" not in r]
    assert len(rows(two.run_dir, "charts/episodic_return")) > 4  # more than one in each environment
    for row, other in zip(got, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--no-fast", "--target-kl 1e-7 --update-epochs 4", "--no-norm-adv", "--num-minibatches 6 --seed 2"]
)
def test_two_ranks_learn_what_one_learns_with_other_flags(flags, train, tmp_path):
    flags = [*TINY, "--total-timesteps", "240", *flags.split()]
    one, two = train(NAME, *flags), Ranks(tmp_path / "two", 2, *flags)
    assert two.codes() == [0, 0], two.words(0) + two.words(1)
    np.testing.assert_allclose(two.weights(0), weights(one["agent"]), rtol=0, atol=1e-5)
    if "--target-kl" in flags:
        assert one["epoch"] < 3


@pytest.mark.parametrize("clip_vloss", [True, False])
def test_the_loss_of_a_share_is_that_of_the_parent_without_normalising(clip_vloss):
    agent = MULTI["Agent"](3)
    args = MULTI["Args"](norm_adv=False, clip_vloss=clip_vloss, clip_coef=0.01)
    obs, action = torch.randint(256, (6, 4, 84, 84), dtype=torch.uint8), torch.randint(3, (6,))
    batch = MULTI["Batch"](obs, action, torch.full((6,), -1.2), *torch.randn(3, 6))
    (loss, metrics), (expected, others) = (
        MULTI["ppo_loss_of_share"](agent, batch, args),
        SINGLE["ppo_loss"](agent, batch, args),
    )
    assert torch.equal(loss, expected) and metrics.keys() == others.keys()
    assert all(torch.equal(metrics[key], others[key]) for key in metrics) and metrics["losses/clipfrac"] > 0


def test_the_agent_is_that_of_the_parent():
    """Its greedy policy is tested there."""
    agents = [
        next(node for node in ast.parse(script(name).read_text()).body if getattr(node, "name", "") == "Agent")
        for name in (NAME, "ppo_atari")
    ]
    assert ast.dump(agents[0]) == ast.dump(agents[1])


def test_logged_keys_are_documented(train):
    v = train(NAME, *TINY, "--total-timesteps", "48")
    logged = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert logged <= documented_keys(NAME) and "losses/approx_kl" in logged


# ---------------------------------------------------------------------- resuming
def test_two_ranks_resume_exactly_and_no_other_number_does(train, tmp_path):
    """The last checkpoint thrown away, the run goes on from the one before; games of both ranks are under way there."""
    whole = Ranks(tmp_path / "two", 2, *TINY, "--total-timesteps", "144", "--save-every", "48")
    assert whole.codes() == [0, 0], whole.words(0) + whole.words(1)
    expected, run_dir, learned = comparable(whole.run_dir), whole.run_dir, whole.weights(0)
    drop_last_checkpoint(run_dir)
    train(NAME, "--resume", run_dir, code=2)
    assert "was trained by 2 ranks, not 1: resume it with --nproc 2" in train.out and train.out.count("\n") == 1
    again = Ranks(tmp_path / "two", 2, "--resume", run_dir)
    assert again.codes() == [0, 0], again.words(0) + again.words(1)
    assert "resumed at step 96" in again.words(0) and again.words(1) == ""
    assert comparable(run_dir) == expected and len(rows(run_dir, "charts/episodic_return")) > 4
    assert np.array_equal(again.weights(0), learned) and np.array_equal(again.weights(1), learned)


@pytest.mark.slow
def test_a_run_of_one_rank_is_not_resumed_by_two(train, tmp_path):
    v = train(NAME, *TINY, "--total-timesteps", "48")
    two = Ranks(tmp_path / "two", 2, "--resume", v["run"].dir)
    assert two.codes() == [2, 2], two.words(0) + two.words(1)
    assert "was trained by 1 ranks, not 2: resume it without --nproc" in two.words(0)
    assert two.words(0).count("\n") == 1


# ---------------------------------------------------------------------- how they end
@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_at_once(killed, tmp_path):
    """Rank 1 waits some seconds before it speaks: what has started the ranks ends it meanwhile."""
    ranks = Ranks(tmp_path / "two", 2, *ENDLESS)
    ranks.wait_for("checkpoint/step_*")
    os.kill(ranks.pids[killed], signal.SIGKILL)
    codes, other = ranks.codes(timeout=30), 1 - killed
    assert codes[killed] == -signal.SIGKILL and codes[other] == 1
    said = ranks.words(other).splitlines()[-1]
    assert said.startswith("error: the 2 ranks have lost each other, as where one ends (")
    assert said.endswith("; --resume continues from the last checkpoint") and "Traceback" not in ranks.words(other)
    if killed == 1:
        assert '"failed"' in (ranks.run_dir / "status.json").read_text()


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("stop", marks=pytest.mark.slow)])
def test_all_end_after_the_same_iteration(how, tmp_path):
    """A signal to rank 1 alone, or a file named stop, which rank 0 alone sees."""
    ranks = Ranks(tmp_path / "two", 2, *ENDLESS)
    ranks.wait_for("checkpoint/step_*")
    if how == "stop":
        (ranks.run_dir / "stop").touch()
    else:
        os.kill(ranks.pids[1], signal.SIGTERM)
    assert ranks.codes(timeout=20) == [0, 0], ranks.words(0) + ranks.words(1)
    assert np.array_equal(ranks.weights(0), ranks.weights(1)) and ranks.words(1) == ""
    assert '"stopped"' in (ranks.run_dir / "status.json").read_text()
    newest = sorted((ranks.run_dir / "checkpoint").iterdir())[-1]
    assert rows(ranks.run_dir)[-1]["global_step"] == int(newest.name[5:])
    if how == "SIGTERM":
        assert re.search(r"SIGTERM: saved at step [\d,]+; continue with: .* --nproc 2\n", ranks.words(0))


def test_what_diverges_ends_all_with_the_same_code(tmp_path):
    ranks = Ranks(tmp_path / "two", 2, *TINY, "--learning-rate", "1e30", "--total-timesteps", "1000")
    assert ranks.codes(timeout=30) == [3, 3], ranks.words(0) + ranks.words(1)
    assert "a snapshot is in" in ranks.words(0) and ranks.words(1) == "" and "rank" not in ranks.words(0)
    assert (ranks.run_dir / "crash").is_dir()


def test_ranks_that_do_not_divide_the_environments_are_refused_in_one_sentence(tmp_path):
    ranks = Ranks(tmp_path / "three", 3, *TINY, "--total-timesteps", "48")
    assert os.waitstatus_to_exitcode(os.waitpid(ranks.pids[0], 0)[1]) == 2
    for pid in ranks.pids[1:]:  # as what has started them does
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ranks.words(0) == "error: --num-envs and minibatches (24 steps) must divide by 3 ranks\n"
    others = ranks.words(1) + ranks.words(2)  # torch may say that the first one is gone before they are killed
    assert not re.search("^(error:|Traceback)", others, flags=re.MULTILINE) and not (ranks.folder / "runs").exists()


# ---------------------------------------------------------------------- solo train --nproc, torchrun
@pytest.mark.parametrize("count", ["two", "0", "-1", "1.5", "5000", ""])
def test_nproc_is_a_number_of_processes(count, solo):
    refused(
        solo("train", NAME, "--nproc", count), f"--nproc must be a number of processes from 1 to 1024, not '{count}'"
    )


def test_nproc_is_not_for_processes_of_torchrun(solo, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(solo("train", NAME, "--nproc", "2"), "--nproc starts the processes itself; leave it out below torchrun")


def started(words, folder, *flags):
    """A command in a process of its own, which trains until it is stopped."""
    words = [sys.executable, "-m", *words, *ENDLESS, *flags, "--runs-dir", folder / "runs"]
    words = [str(word) for word in words]
    return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path, pattern, process):
    """Wait until a file is there."""
    deadline = time.monotonic() + 120
    while not list(path.glob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)


def children(pid):
    """The processes that a process has started, the first one first."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("killed", "flags"), [(1, []), (0, []), (1, ["--eval-every", "1", "--eval-episodes", "3000"])]
)  # while both learn; or while rank 1 waits for rank 0, which evaluates
def test_solo_train_ends_where_a_rank_is_killed(killed, flags, tmp_path):
    """Rank 0 says it if it is there and meets rank 1 within seconds; the command does, too, if rank 0 has not ended."""
    process = started(["solorl.cli", "train", NAME, "--nproc", "2"], tmp_path, *flags)
    wait_for(tmp_path, "runs/*/metrics.jsonl" if flags else "runs/*/checkpoint/step_*", process)
    time.sleep(1 if flags else 0)
    os.kill(children(process.pid)[killed], signal.SIGKILL)
    _, err = process.communicate(timeout=10)
    assert process.returncode in (1, 128 + signal.SIGKILL) and err.count("\n") in (1, 2), err
    for line in err.splitlines():
        assert line.startswith("error: ") and line.endswith("--resume continues from the last checkpoint")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process that its parent was killed")
def test_the_ranks_save_and_end_where_solo_train_is_killed(tmp_path):
    process = started(["solorl.cli", "train", NAME, "--nproc", "2"], tmp_path)
    wait_for(tmp_path, "runs/*/checkpoint/step_*", process)
    process.kill()
    process.communicate(timeout=60)  # until the last one has closed its output
    assert ['"stopped"' in path.read_text() for path in tmp_path.glob("runs/*/status.json")] == [True]


@pytest.mark.slow
def test_ctrl_c_reaches_all_ranks_once(tmp_path):
    process = started(["solorl.cli", "train", NAME, "--nproc", "2"], tmp_path)
    wait_for(tmp_path, "runs/*/checkpoint/step_*", process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == "" and out.count("SIGINT: saved at step") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["ppo", "--nproc", "2"], "ppo.py trains in one process, but WORLD_SIZE is 2; start it without torchrun"),
        ([NAME, "--nproc=3", "--num-envs", "4"], "must divide by 3 ranks"),
        ([NAME, "--nproc=2", "--numenvs", "4"], "unknown option --numenvs"),
    ],
)
def test_bad_input_is_said_once(flags, sentence, tmp_path):
    words = [sys.executable, "-m", "solorl.cli", "train", *flags, "--runs-dir", str(tmp_path)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
    refused((done.returncode, done.stdout, done.stderr), sentence)


@pytest.mark.slow
def test_torchrun_starts_it(tmp_path):
    start = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", script(NAME)]
    words = [sys.executable, "-m", *start, *TINY, "--total-timesteps", "96", "--runs-dir", tmp_path / "runs"]
    words = [str(word) for word in words]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.count("run folder") == 1, done.stdout + done.stderr
    assert '"finished"' in next((tmp_path / "runs").glob("*/status.json")).read_text()


@pytest.mark.slow
def test_two_ranks_learn_catch(tmp_path):
    flags, steps = LEARNS[NAME]
    flags = [*flags.split(), *"--target-return 0.9 --eval-every 2000 --log-every 500".split()]
    ranks = Ranks(tmp_path / "two", 2, "--env-id", "pixel_probe:Catch-v0", "--total-timesteps", steps, *flags)
    assert ranks.codes(timeout=900) == [0, 0]
    assert rows(ranks.run_dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.9
