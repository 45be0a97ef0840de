"""R6, golden start: the first iterations of every script on the CPU are the recorded ones (golden/NAME.json).

A commit that moves them says `[moves results]` and brings a benchmark. To record them again, all or those named:
python tests/test_golden.py [NAME ...]
"""

import importlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, comparable, environment
from pixel_probe import plays_envpool, use_fake_envpool
from plain_expert import expert_folder
from recorded import recorded

from solorl.machine import cpu_model

FOLDER = Path(__file__).with_name("golden")
ROWS = 8  # of each script
PIXELS = "--num-envs 2 --num-steps 64 --num-minibatches 2 --total-timesteps 384 --learning-rate 0.001"
CATCH = "--env-id pixel_probe:Catch-v0 --total-timesteps 120 --learning-starts 60 --batch-size 8"
POOLED = "--env-id Catch-v5 --num-envs 2 --total-timesteps 240 --learning-starts 60 --batch-size 8 --eval-every 60"
FLAGS = {
    "ppo": "--env-id CartPole-v1 --total-timesteps 1536",
    "ppo_masked": "--env-id games/ResourceGrid-v0 --total-timesteps 1536",
    "ppo_multidiscrete": "--env-id games/TwoNumbersMasked-v0 --total-timesteps 1536",
    "ppo_normalized": "--env-id MountainCar-v0 --total-timesteps 1536",
    "ppo_rnd": "--env-id games/KeyAndDoor-v0 --total-timesteps 2048 --warmup-rollouts 1",
    "ppo_rnd_envpool": "--env-id Catch-v5 --num-envs 2 --num-steps 32 --num-minibatches 2 --total-timesteps 256 "
    "--warmup-rollouts 1 --learning-rate 0.001",
    "ppo_continuous_action": "--env-id Pendulum-v1 --num-steps 256 --total-timesteps 768",
    "ppo_continuous_action_batched": "--env-id simulators:SavedAim-v0 --num-envs 16 --total-timesteps 1536",
    "ppo_lagrangian": "--env-id probes_cost:Temptation-v0 --num-steps 256 --total-timesteps 768 --multiplier-init 1",
    "rpo_continuous_action": "--env-id Pendulum-v1 --num-steps 256 --total-timesteps 768",
    "ppo_atari": f"--env-id pixel_probe:Catch-v0 {PIXELS}",
    "ppo_pettingzoo_atari": f"--env-id pixel_duel:atari/signals_v0 {PIXELS}",
    "ppo_image": f"--env-id games/MovingDot-v0 --size 36 --grey {PIXELS}",
    "ppo_image_continuous_action": f"--env-id games/PoleImage-v0 {PIXELS}",
    "ppo_atari_envpool": f"--env-id Catch-v5 {PIXELS}",
    "ppo_procgen": f"--env-id CatchEasy-v0 {PIXELS}",
    "ppg_procgen": f"--env-id CatchEasy-v0 {PIXELS} --policy-iterations 2 --aux-epochs 2 --aux-minibatches 2",
    "ppo_atari_envpool_jax": f"--env-id Catch-v5 {PIXELS}",
    "ppo_atari_lstm": f"--env-id pixel_probe:Catch-v0 {PIXELS}",
    "ppo_lstm": "--num-envs 8 --total-timesteps 4096",
    "ppo_lstm_continuous_action": "--num-envs 8 --num-steps 32 --total-timesteps 1536",
    "ppo_lstm_masked": "--num-envs 8 --total-timesteps 4096",
    "ppo_trxl": "--num-envs 8 --total-timesteps 4096 --memory-length 80",
    "ppo_atari_multigpu": f"--env-id pixel_probe:Catch-v0 {PIXELS}",
    "dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "c51": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "double_dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "dueling_dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "d3qn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "per_dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "twin_dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "twin_d3qn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "ez_greedy_dqn": "--env-id MountainCar-v0 --total-timesteps 3000 --learning-starts 500",
    "dqn_atari": f"{CATCH} --buffer-size 1000",
    "dqn_image": "--size 36 --grey --total-timesteps 400 --learning-starts 200 --buffer-size 1000 --batch-size 8",
    "c51_atari": f"{CATCH} --buffer-size 150 --target-network-frequency 100",
    "qdagger_dqn_atari_impalacnn": f"{CATCH} --learning-starts 20 --buffer-size 150 --target-network-frequency 10 "
    "--teacher TEACHER --teacher-steps 40 --offline-steps 20",
    "rainbow_atari": f"{CATCH} --buffer-size 150 --target-network-frequency 100",
    "apex_dqn": "--env-id CartPole-v1 --synchronous --total-timesteps 2000 --learning-starts 500",
    "apex_dqn_atari": f"{CATCH} --synchronous --num-steps 10 --train-frequency 10 --buffer-size 150 "
    "--target-network-frequency 20",
    "ddpg_continuous_action": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200",
    "td3_continuous_action": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200",
    "sac_continuous_action": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200",
    "sac_discrete": "--env-id CartPole-v1 --total-timesteps 2000 --learning-starts 1000",
    "pqn": "--env-id CartPole-v1 --total-timesteps 1536",
    "stream_q": "--env-id CartPole-v1 --total-timesteps 400",
    "stream_ac": "--env-id CartPole-v1 --total-timesteps 400",
    "stream_ac_continuous": "--env-id Pendulum-v1 --total-timesteps 400",
    "grpo": "--env-id text/sum-1 --width 32 --num-layers 1 --num-prompts 4 --total-timesteps 700",
    "ars": "--env-id Pendulum-v1 --num-directions 1 --num-top 1 --total-timesteps 1700",
    "dagger": "--env-id CartPole-v1 --expert EXPERT --num-steps 20 --total-timesteps 400 --gradient-steps 20",
    "gail": "--env-id CartPole-v1 --dataset DATASET --num-steps 128 --total-timesteps 1536",
    "airl": "--env-id Pendulum-v1 --dataset DATASET --num-steps 128 --total-timesteps 1536",
    "alphazero": "--env-id games/TicTacToe-v0 --num-envs 8 --total-timesteps 400 --batch-size 64 --hidden-dim 32 "
    "--num-simulations 8 --eval-simulations 8 --opponents one-ply --eval-every 200",
    "pqn_atari_envpool": "--env-id Catch-v5 --num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 96",
    "pqn_atari_envpool_lstm": "--env-id Catch-v5 --num-envs 2 --num-steps 16 --num-minibatches 2 --total-timesteps 96",
    "tqc": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 300",
    "redq": "--env-id Pendulum-v1 --total-timesteps 303 --learning-starts 300",
    "droq": "--env-id Pendulum-v1 --total-timesteps 303 --learning-starts 300",
    "crossq": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 300",
    "simba_sac": "--env-id Pendulum-v1 --total-timesteps 400 --learning-starts 300",
    "flash_sac": "--env-id Pendulum-v1 --total-timesteps 340 --learning-starts 300 --batch-size 64",
    "sac_nstep": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 300",
    "mpo_continuous_action": "--env-id Pendulum-v1 --total-timesteps 400 --learning-starts 300 --num-samples 5 "
    "--target-network-frequency 10",
    "inter_sac": "--env-id Pendulum-v1 --total-timesteps 400 --learning-starts 300",
    "mod_sac": "--env-id Pendulum-v1 --total-timesteps 400 --learning-starts 300",
    "basic_ac": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 300",
    "inter_ac": "--env-id Pendulum-v1 --total-timesteps 400 --learning-starts 300",
    "td7": "--env-id Pendulum-v1 --total-timesteps 420 --learning-starts 380",
    "sac_dict": "--total-timesteps 320 --learning-starts 300 --batch-size 32",
    "dqn_her": "--total-timesteps 1500 --learning-starts 580",
    "sac_her": "--total-timesteps 500 --learning-starts 300",
    "drq_v2": "--total-timesteps 400 --learning-starts 200 --batch-size 8 --hidden-dim 32",
    "sac_lstm": "--total-timesteps 800 --learning-starts 400",
    "sac_parallel": "--env-id Pendulum-v1 --synchronous --total-timesteps 500 --learning-starts 200",
    "ippo": "--env-id team/simple_speaker_listener_v4 --num-envs 8 --total-timesteps 1024",
    "mappo": "--env-id team/two_step --num-envs 8 --total-timesteps 1024",
    "mappo_rnn": "--env-id team/two_step --num-envs 8 --total-timesteps 1024 --update-epochs 2",
    "maddpg": "--num-envs 8 --total-timesteps 1000 --learning-starts 200 --batch-size 128 --utd-ratio 0.1",
    "matd3": "--num-envs 8 --total-timesteps 1000 --learning-starts 200 --batch-size 128 --utd-ratio 0.1",
    "qr_dqn": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "a2c": "--env-id CartPole-v1 --total-timesteps 1600",
    "sac_atari": "--env-id pixel_probe:Catch-v0 --total-timesteps 200 --learning-starts 180 --batch-size 4 "
    "--buffer-size 150",
    **dict.fromkeys(
        ("vdn", "qmix", "qtran"),
        "--env-id recall:RecallMaskedRaid-v0 --num-envs 4 --max-steps 6 --total-timesteps 800 --batch-size 8 "
        "--target-network-frequency 10",
    ),
    "coma": "--env-id recall:RecallMaskedRaid-v0 --num-envs 4 --max-steps 6 --total-timesteps 400 --batch-size 4 "
    "--critic-steps 2 --target-network-frequency 10",
    "cql": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 20 --batch-size 32",
    "cal_ql": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 24 --offline-steps 8 --max-episode 8 "
    "--batch-size 16",
    "iql": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 400",
    "iql_discrete": "--env-id CartPole-v1 --dataset DATASET --total-timesteps 400",
    "bc": "--env-id CartPole-v1 --dataset DATASET --total-timesteps 800",
    "td3_bc": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 400",
    "rebrac": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 200 --batch-size 64",
    "fql": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 200 --batch-size 64 --hidden-dim 64",
    "awac": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 300",
    "edac": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 200 --batch-size 64",
    "decision_transformer": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 300 --batch-size 8 --width 32 "
    "--warmup-steps 100 --learning-rate 0.001 --target-return-to-go -500",
    "ppo_hybrid": "--env-id games/Tool-v0 --total-timesteps 1536",
    "ppo_dict": "--env-id games/TwoSenses-v0 --total-timesteps 1536",
    "ppo_dict_continuous_action": f"--env-id games/PoleDict-v0 {PIXELS}",
    "ppo_jax": "--env-id CartPole-v1 --total-timesteps 1536 --eval-every 512",
    "ppo_minatar_jax": "--env-id Breakout-MinAtar --num-envs 8 --num-steps 32 --num-minibatches 4 "
    "--total-timesteps 1024 --eval-every 512",
    "ppo_lstm_jax": "--num-envs 8 --total-timesteps 2048 --eval-every 512",
    "ppo_rnd_jax": "--env-id games/KeyAndDoor-v0 --total-timesteps 2048 --warmup-rollouts 1 --eval-every 512",
    "ppo_continuous_action_jax": "--env-id Pendulum-v1 --num-steps 256 --total-timesteps 768",
    "ddpg_continuous_action_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200",
    "td3_continuous_action_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200",
    "sac_continuous_action_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 200",
    "crossq_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 300",
    "tqc_jax": "--env-id Pendulum-v1 --total-timesteps 500 --learning-starts 300",
    "iql_jax": "--env-id Pendulum-v1 --dataset DATASET --total-timesteps 400 --eval-every 100",
    "c51_jax": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "pqn_jax": "--env-id CartPole-v1 --total-timesteps 1536 --eval-every 512",
    "pqn_vdn_jax": "--num-envs 8 --num-steps 16 --total-timesteps 512 --eval-every 128",
    "mappo_jax": "--num-envs 8 --total-timesteps 512 --eval-every 256",
    "alphazero_jax": "--env-id games/TicTacToe-v0 --num-envs 8 --num-steps 16 --total-timesteps 1024 "
    "--num-minibatches 4 --hidden-dim 32 --num-simulations 8 --eval-simulations 8 --opponents one-ply --eval-every 512",
    "gumbel_muzero_jax": "--env-id CartPole-v1 --num-envs 8 --num-steps 16 --total-timesteps 1024 --num-updates 4 "
    "--batch-size 16 --hidden-dim 32 --num-simulations 8 --eval-simulations 8 --eval-every 512 --learning-rate 0.003 "
    "--value-scale 1 --td-steps 10",
    "dqn_jax": "--env-id CartPole-v1 --total-timesteps 3000 --learning-starts 500",
    "dqn_atari_jax": f"{POOLED} --buffer-size 1000",
    "c51_atari_jax": f"{POOLED} --buffer-size 100 --target-network-frequency 100",
    "qdagger_dqn_atari_impalacnn_jax": f"{POOLED} --learning-starts 20 --buffer-size 150 --target-network-frequency 10 "
    "--teacher TEACHER --teacher-steps 40 --offline-steps 20",
}
FLAGS = {script: f"{flags} --log-every 100 --eval-episodes 2" for script, flags in FLAGS.items()}


def flags_of(script):
    """The words of FLAGS, with the run folder of a teacher or expert, or with a data set of the environment."""
    words = FLAGS[script].split()
    if "TEACHER" in words:
        teacher = importlib.import_module("catch_teacher_jax" if script.endswith("_jax") else "catch_teacher")
        words[words.index("TEACHER")] = str(teacher.teacher_folder())
    if "EXPERT" in words:
        words[words.index("EXPERT")] = str(expert_folder(*words[:2]))
    if "DATASET" in words:
        words[words.index("DATASET")] = str(recorded(words[words.index("--env-id") + 1]))
    return words


def circumstances(script):
    """What the last bits of a script's numbers depend on."""
    library = "jax" if script.endswith("_jax") else "torch"
    return {"library": f"{library} {version(library).partition('+')[0]}", "cpu": cpu_model()}


def first_rows(script, folder):
    """The rows of metrics.jsonl, without what depends on the clock, of a short run in a process of its own."""
    program = "pixel_probe" if plays_envpool(script) else "solorl.cli"
    words = [sys.executable, "-m", program, "train", script, *flags_of(script), "--runs-dir", str(folder)]
    subprocess.run(words, env=environment(), check=True, capture_output=True)
    return chosen(comparable(next(Path(folder).iterdir())))


def chosen(rows):
    """Those that are recorded: the first rows with losses, and the evaluations."""
    learning = [row for row in rows if any("losses/" in key for key in row)]
    return [*learning[:ROWS], *(row for row in rows if any("eval/" in key for key in row))]


# Variants that share most with a file that is not slow. In JAX: 5 to 30 seconds each, most of it compiling.
SLOW = (
    "qdagger_dqn_atari_impalacnn_jax", "c51_atari_jax", "c51_jax", "ppo_minatar_jax", "ppo_continuous_action_jax",
    "ppo_atari_envpool_jax", "ddpg_continuous_action_jax", "td3_continuous_action_jax",
    "sac_continuous_action_jax", "dqn_atari_jax", "pqn_jax",
    # in torch, variants of which another file and tests of their own have nearly all lines
    "double_dqn", "dueling_dqn", "ez_greedy_dqn", "ppo_lstm_masked", "rpo_continuous_action", "redq", "droq",
    "simba_sac", "flash_sac", "sac_nstep", "ppg_procgen", "qdagger_dqn_atari_impalacnn", "apex_dqn_atari", "mod_sac",
    "basic_ac", "ppo_atari_multigpu", "sac_atari", "twin_d3qn", "ppo_lstm_jax", "ppo_rnd_jax", "crossq_jax", "tqc_jax",
    "pqn_vdn_jax", "mappo_jax", "iql_jax", "crossq", "tqc", "ppo_pettingzoo_atari", "iql_discrete", "rebrac", "edac",
    "awac", "cal_ql", "td3_bc", "decision_transformer", "sac_lstm", "ppo_procgen", "ppo_trxl", "matd3", "sac_dict",
    "sac_her", "gumbel_muzero_jax",
)  # fmt: skip


@pytest.mark.parametrize("script", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in FLAGS])
def test_the_first_iterations_are_the_recorded_ones(script, train, monkeypatch):
    """All rows on the recorded kind of processor and version of the library; elsewhere, where a last bit may differ and
    trajectories part, the first iteration to 1 %."""
    golden = json.loads((FOLDER / f"{script}.json").read_text())
    assert golden["flags"] == FLAGS[script]
    if plays_envpool(script):
        use_fake_envpool(monkeypatch)
    run = train(script, *flags_of(script))["run"]
    got, want = chosen(comparable(run.runs[0].dir if script.endswith("_jax") else run.dir)), golden["rows"]
    if circumstances(script).items() <= golden.items():
        assert [set(row) for row in got] == [set(row) for row in want]
        for row, expected in zip(got, want, strict=True):
            for key, value in expected.items():
                assert row[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (key, row["global_step"])
    first, expected = (next(row for row in rows if any("losses/" in key for key in row)) for rows in (got, want))
    for key, value in expected.items():
        np.testing.assert_allclose(first[key], value, rtol=0.01, atol=1e-3, err_msg=key)


def test_every_script_has_a_golden_start():
    recorded = {path.stem for path in FOLDER.glob("*.json")}
    assert recorded == set(FLAGS) == {path.stem for path in (ROOT / "algorithms").glob("*/*.py")}


def record(names):
    """Write the present behaviour of these scripts into golden/NAME.json, a row a line."""
    import tempfile

    for script in names:
        with tempfile.TemporaryDirectory() as folder:
            rows = first_rows(script, folder)
        about = json.dumps({"flags": FLAGS[script], **circumstances(script)})
        lines = ",\n".join(json.dumps(row) for row in rows)
        (FOLDER / f"{script}.json").write_text(f'{about[:-1]}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    record(sys.argv[1:] or FLAGS)
