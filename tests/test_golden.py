"""R6, golden start: the first iterations of every script on the CPU are the recorded ones.

A commit that moves them says `[moves results]` and brings a benchmark. To record again, all or those that are named:
python tests/test_golden.py [NAME ...]
"""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, comparable, environment

from solorl.machine import cpu_model

FILE = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(FILE.read_text())
FLAGS = {
    "ppo": "--env-id CartPole-v1 --total-timesteps 1536 --eval-episodes 2",
    "ppo_normalized": "--env-id MountainCar-v0 --total-timesteps 1536 --eval-episodes 2",
    "ppo_continuous_action": "--env-id Pendulum-v1 --num-steps 256 --total-timesteps 768 --eval-episodes 2",
    "rpo_continuous_action": "--env-id Pendulum-v1 --num-steps 256 --total-timesteps 768 --eval-episodes 2",
    "dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
    "c51": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
    "double_dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
    "dueling_dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
    "d3qn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
    "ez_greedy_dqn": "--env-id MountainCar-v0 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
    "ddpg_continuous_action": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200 --eval-episodes 2",
    "td3_continuous_action": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200 --eval-episodes 2",
    "sac_continuous_action": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200 --eval-episodes 2",
    "sac_discrete": "--env-id CartPole-v1 --total-timesteps 2000 --learning-starts 1000 --eval-episodes 2",
    "ppo_jax": "--env-id CartPole-v1 --total-timesteps 1536 --eval-every 512 --eval-episodes 2",
    "ppo_continuous_action_jax": "--num-steps 256 --total-timesteps 768 --eval-episodes 2",
    "ddpg_continuous_action_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200 --eval-episodes 2",
    "td3_continuous_action_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200 --eval-episodes 2",
    "sac_continuous_action_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200 --eval-episodes 2",
    "c51_jax": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
    "dqn_jax": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500 --eval-episodes 2",
}


def circumstances(script):
    """What the last bits of a script's numbers depend on."""
    library = "jax" if script.endswith("_jax") else "torch"
    return {"library": f"{library} {version(library).partition('+')[0]}", "cpu": cpu_model()}


def first_rows(script, folder):
    """The rows of metrics.jsonl, without what depends on the clock, of a short run in a process of its own."""
    words = [sys.executable, "-m", "solorl.cli", "train", script, *FLAGS[script].split(), "--runs-dir", str(folder)]
    subprocess.run(words, env=environment(), check=True, capture_output=True)
    return comparable(next(Path(folder).iterdir()))


@pytest.mark.parametrize("script", list(FLAGS))
def test_the_first_iterations_are_the_recorded_ones(script, train):
    """All rows on the recorded kind of processor and version of the library; elsewhere, where a last bit may differ and
    trajectories part, the first iteration to 1 %."""
    run = train(script, *FLAGS[script].split())["run"]
    got, want = comparable(run.runs[0].dir if script.endswith("_jax") else run.dir), GOLDEN[script]["rows"]
    if circumstances(script).items() <= GOLDEN[script].items():
        assert [set(row) for row in got] == [set(row) for row in want]
        for row, expected in zip(got, want, strict=True):
            for key, value in expected.items():
                assert row[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (key, row["global_step"])
    first, expected = (next(row for row in rows if any("losses/" in key for key in row)) for rows in (got, want))
    for key, value in expected.items():
        np.testing.assert_allclose(first[key], value, rtol=0.01, atol=1e-3, err_msg=key)


def test_every_script_has_a_golden_start():
    assert set(GOLDEN) == set(FLAGS) == {path.stem for path in (ROOT / "algorithms").glob("*/*.py")}


def record(names):
    """Write the present behaviour of these scripts into golden.json."""
    import tempfile

    golden = {name: entry for name, entry in GOLDEN.items() if name in FLAGS}
    for script in names:
        with tempfile.TemporaryDirectory() as folder:
            golden[script] = {
                "flags": FLAGS[script],
                **circumstances(script),
                "rows": first_rows(script, folder),
            }
    FILE.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:] or FLAGS)
