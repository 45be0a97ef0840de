"""Groups of seeds in JAX that continue after kills and the end of some of their seeds."""

import json
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import script
from test_ppo_jax import folders, same

from solorl.checkpoints import checkpoint as state
from solorl.errors import UsageError
from solorl.run import seeds
from solorl.run.seeds import choose_checkpoints

FLAGS = (
    "--num-seeds 2 --num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 256 --save-every 64 "
    "--log-every 1 --eval-every 0 --eval-episodes 1"
).split()


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """Two seeds that save 4 times, never interrupted, in `runs`; `killed_N` is what a kill after N of their 8 saves
    leaves, seed after seed."""
    folder = tmp_path_factory.mktemp("group")
    write, words = state.save_checkpoint, [str(script("ppo_jax")), *FLAGS, "--runs-dir", str(folder / "runs")]

    def counting(*args):
        written = write(*args)
        shutil.copytree(folder / "runs", folder / f"killed_{len(list(folder.glob('killed_*'))) + 1}" / "runs")
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "save_checkpoint", counting)
        patch.setattr(sys, "argv", words)
        runpy.run_path(words[0], run_name="__main__")
    return folder


def steps_of(run):
    return [state.step_of(path) for path in state.steps_in(run / "checkpoint")]


def go_on(train, group, folder):
    """Resume the group in `folder`; its seeds end as those that were never interrupted."""
    train("ppo_jax", "--resume", folders(folder)[0], "--num-seeds", 2)
    for whole, resumed in zip(folders(group), folders(folder), strict=True):
        same(whole, resumed)


@pytest.mark.parametrize(
    ("saves", "found", "said"),
    [
        pytest.param(
            *(1, [[64], []], "not all seeds have a checkpoint yet: starting from the beginning"), marks=pytest.mark.slow
        ),
        (3, [[64, 128], [64]], "resumed at step 64 (iteration 2)"),
        pytest.param(*(7, [[192, 256], [128, 192]], "resumed at step 192 (iteration 6)"), marks=pytest.mark.slow),
    ],
)
def test_a_group_killed_between_the_saves_of_two_seeds_goes_on_exactly(train, tmp_path, group, saves, found, said):
    shutil.copytree(group / f"killed_{saves}", tmp_path, dirs_exist_ok=True)
    assert [steps_of(run) for run in folders(tmp_path)] == found
    go_on(train, group, tmp_path)
    assert said in train.out and [steps_of(run) for run in folders(tmp_path)] == [[192, 256]] * 2


def test_a_damaged_checkpoint_of_one_seed_asks_to_resume_each_alone(train, tmp_path, group):
    """That one continues from the checkpoint before it."""
    shutil.copytree(group / "killed_6", tmp_path, dirs_exist_ok=True)
    first, second = folders(tmp_path)
    (second / "checkpoint/step_000000000192/tensors.safetensors").write_bytes(b"nothing")
    train("ppo_jax", "--resume", first, "--num-seeds", 2, code=2)
    assert "stand at different iterations ([6, 4]); resume each alone" in train.out
    assert [steps_of(run) for run in (first, second)] == [[128, 192]] * 2
    alone = shutil.copytree(second, tmp_path / "alone" / second.name)  # this process has locked the other one
    train("ppo_jax", "--resume", alone)
    assert "resumed at step 128" in train.out
    same(folders(group)[1], alone)


@pytest.mark.slow
def test_a_seed_that_had_finished_before_the_others_is_left_as_it_is(train, tmp_path, group):
    shutil.copytree(group / "killed_6", tmp_path, dirs_exist_ok=True)
    first, second = folders(tmp_path)
    shutil.rmtree(first / "checkpoint/step_000000000192")
    (first / "status.json").write_text(json.dumps({"status": "finished"}))
    files = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    train("ppo_jax", "--resume", first, "--num-seeds", 2)
    assert "seed 1 stays as it is: finished, last saved at step 128" in train.out and "step 192" in train.out
    assert files == {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    same(folders(group)[1], second)


RUNNING, STOPPED, FINISHED, DIVERGED = "running", "stopped", "finished", "diverged: losses/entropy is nan"


@pytest.mark.parametrize(
    ("statuses", "saved", "want"),
    [
        ([RUNNING, RUNNING], [[2, 3], [1, 2]], (2, [0, 1])),
        ([FINISHED, RUNNING], [[2, 3], [2, 3]], (3, [0, 1])),  # killed while they were closed
        ([FINISHED, RUNNING], [[1, 2], [2, 3]], (3, [1])),  # seed 1 had reached its target, seed 2 is not set back
        ([RUNNING, DIVERGED], [[2, 3], [1]], (3, [0])),
        ([RUNNING, DIVERGED], [[1], [1]], (1, [0, 1])),
        ([STOPPED, STOPPED], [[2, 3], [1, 2]], (2, [0, 1])),  # seed 2 could not save
        ([STOPPED, FINISHED], [[3, 4], [1, 2]], (4, [0])),
        ([RUNNING, RUNNING], [[], []], (None, [0, 1])),
        ([RUNNING, RUNNING], [[], [1]], (None, [0, 1])),
        ([RUNNING, RUNNING], [[], [1, 2]], "no checkpoint of one step (their newest are of the steps [0, 2]"),
        ([RUNNING, RUNNING], [[1, 2], [3, 4]], "no checkpoint of one step (their newest are of the steps [2, 4]"),
        ([STOPPED, RUNNING], [[1, 2], [3, 4]], "no checkpoint of one step"),  # by a file named `stop`
        ([FINISHED, FINISHED], [[1, 2], [2, 3]], "stand at different steps ([2, 3]); resume each alone"),
    ],
)
def test_which_seeds_go_on_from_which_step(tmp_path, statuses, saved, want):
    runs = []
    for i, (status, steps) in enumerate(zip(statuses, saved, strict=True)):
        for step in steps:
            state.save_checkpoint(tmp_path / str(i) / "checkpoint", step, {})
        (tmp_path / str(i)).mkdir(exist_ok=True)
        (tmp_path / str(i) / "status.json").write_text(json.dumps({"status": status}))
        run = SimpleNamespace(
            dir=tmp_path / str(i), args=SimpleNamespace(seed=i), checkpoints=SimpleNamespace(until=None)
        )
        runs.append(run)
    if isinstance(want, str):
        with pytest.raises(UsageError, match=re.escape(want)):
            choose_checkpoints(runs, print)
        return
    assert choose_checkpoints(runs, print) == want[1]
    chosen = {run.checkpoints.until for run in runs} - {None}
    assert chosen == ({want[0] or 0} if any(saved) else set())  # without a checkpoint there is nothing to choose


def test_a_command_quotes_a_folder_with_a_space():
    runs, said = object.__new__(seeds.Runs), []
    runs.runs = [SimpleNamespace(dir=Path(f"my runs/{i}"), ending=SimpleNamespace(why="")) for i in range(2)]
    runs.num_seeds, runs.say = 2, said.append
    runs._say_where()
    assert said[0].endswith("solo play 'my runs/0'")
