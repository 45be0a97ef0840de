"""The files for images: they learn the pixel probe, through the wrappers of the Atari files and through EnvPool's."""

import pytest
from conftest import TESTS, rows
from pixel_probe import plays_envpool, use_fake_envpool

PPO = "--num-envs 8 --num-steps 32 --learning-rate 0.001 --no-anneal-lr --gamma 0.9 --eval-every 0 --save-every 0"
DQN = "--num-envs 1 --learning-starts 500 --buffer-size 20000 --train-frequency 4 --learning-rate 0.0005 --gamma 0.9 "
DQN += "--target-network-frequency 200 --exploration-fraction 0.3 --end-e 0.05 --eval-every 0 --save-every 0"
PQN = PPO + " --num-steps 16 --learning-rate 0.0005 --q-lambda 0.95 --exploration-fraction 0.4 --end-e 0.05"
ATOMS = " --v-min -1 --v-max 1"
RAINBOW = "--num-envs 1 --learning-starts 500 --buffer-size 20000 --train-frequency 4 --learning-rate 0.0005 "
RAINBOW += "--gamma 0.9 --target-network-frequency 200 --eval-every 0 --save-every 0"
SAC = "--num-envs 1 --learning-starts 1000 --buffer-size 20000 --batch-size 32 --policy-lr 0.0005 --q-lr 0.0005 "
SAC += "--gamma 0.9 --target-network-frequency 30 --no-autotune --alpha 0.05 --eval-every 0 --save-every 0"
APEX = "--num-actors 2 --num-steps 20 --learning-starts 500 --buffer-size 20000 --train-frequency 4 --batch-size 32 "
APEX += "--learning-rate 0.00025 --gamma 0.9 --target-network-frequency 200 --eval-every 0 --save-every 0"
LEARNS = {  # script -> flags with which it learns Catch in minutes; environment steps
    "ppo_atari": (PPO, 30_000),
    "ppo_atari_envpool": (PPO, 15_000),
    "ppo_atari_envpool_jax": (PPO, 15_000),
    "ppo_atari_lstm": (PPO, 30_000),
    "ppo_atari_multigpu": (PPO, 30_000),
    "dqn_atari": (DQN, 20_000),
    "dqn_atari_jax": (DQN, 20_000),
    "pqn_atari_envpool": (PQN, 30_000),
    "pqn_atari_envpool_lstm": (PQN, 30_000),
    "c51_atari": (DQN + ATOMS, 20_000),
    "c51_atari_jax": (DQN + ATOMS, 20_000),
    "rainbow_atari": (RAINBOW + ATOMS, 12_000),
    "apex_dqn_atari": (APEX, 20_000),
    "sac_atari": (SAC, 15_000),
}


@pytest.fixture
def train_probe(train, monkeypatch):
    """`train_probe(name, steps, ...)` trains a script on Catch with its flags of the table above."""

    def call(name, steps, *flags):
        if plays_envpool(name):
            use_fake_envpool(monkeypatch)
        monkeypatch.setenv("PYTHONPATH", str(TESTS / "doubles"))  # for the processes of Ray
        env_id = "Catch-v5" if plays_envpool(name) else "pixel_probe:Catch-v0"
        words = LEARNS[name][0].split()
        return train(name, "--env-id", env_id, "--total-timesteps", steps, *words, *flags)

    return call


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(LEARNS) - {"ppo_atari_multigpu"}))  # in two processes: test_multigpu.py
def test_learns_catch(name, train_probe):
    flags = "--target-return 0.9 --eval-every 2000 --log-every 500".split()
    run = train_probe(name, LEARNS[name][1], *flags)["run"]
    run = run.runs[0] if name.endswith("_jax") else run
    assert rows(run.dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.9


@pytest.mark.parametrize(
    "name", ["ppo_atari_envpool", *(pytest.param(x, marks=pytest.mark.slow) for x in sorted(LEARNS) if "pqn" in x)]
)
def test_plays_a_game_of_envpool(name, train, monkeypatch):
    """200 steps of Breakout, in training and evaluation cut off after 30 steps of each game."""
    pytest.importorskip("envpool")
    monkeypatch.setattr("solorl.envs.envpool.ATARI_STEPS", 30)
    flags = "--env-id Breakout-v5 --num-envs 2 --num-steps 50 --total-timesteps 200 --num-minibatches 2".split()
    v = train(name, *flags, *"--update-epochs 1 --eval-episodes 2 --eval-every 0".split())
    assert v["obs"].max() > 0 and v["timeout"].any() and (v["final_value"][v["timeout"]] != 0).all()
    lengths = [row["charts/episodic_length"] for row in rows(v["run"].dir, "charts/episodic_length")]
    assert lengths == [30.0] * 6 and rows(v["run"].dir, "eval/episodic_length")[-1]["eval/episodic_length"] == 30
