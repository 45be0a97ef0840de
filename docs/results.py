"""Makes the tables and curves of results on all pages, and the report, from the data in benchmark/results.

python docs/results.py
"""

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PPO, DQN, ACTOR_CRITIC = (f"algorithms/{family}/README.md" for family in ("ppo", "dqn", "actor_critic"))
CLASSIC, CONTINUOUS, OFF_POLICY_RUNS, JAX = (
    f"benchmark/results/{name}" for name in ("classic", "ppo_continuous", "actor_critic", "jax")
)
PENDULUM = "--env-ids Pendulum-v1 --methods"
PPO_CONTINUOUS = (
    "ppo_continuous_action 'ppo_continuous_action tuned' rpo_continuous_action"
    " ppo_continuous_action_jax 'ppo_continuous_action_jax tuned'"
)
LANDER = "ppo_jax 'ppo_jax unclipped' ppo sb3_ppo"
OTHER = "BipedalWalker-v3 Hopper-v5 InvertedPendulum-v5 Walker2d-v5"
LONG = "BipedalWalker-v3 HalfCheetah-v5 Hopper-v5 LunarLanderContinuous-v3"
OFF_POLICY = "ddpg_continuous_action td3_continuous_action sac_continuous_action"
OFF_POLICY_JAX = OFF_POLICY.replace("action", "action_jax")

# page, its markers, words of `solo report`, picture in docs/curves ("" for none; of more than 4 methods also X_2, X_3)
TABLES = [
    ("README.md", "results", CLASSIC, ""),
    ("README.md", "jax-results", f"{JAX} --baseline ppo_jax", ""),
    (PPO, "results", f"{CLASSIC} {JAX} --methods ppo ppo_jax sb3_ppo", "ppo"),
    (PPO, "mountaincar", "benchmark/results/mountaincar", "ppo_mountaincar"),
    (PPO, "lunarlander", f"{JAX} {CLASSIC} --env-ids LunarLander-v3 --methods {LANDER}", "ppo_lunarlander"),
    (
        PPO,
        "pendulum",
        f"{CONTINUOUS} {JAX} {PENDULUM} ppo_continuous_action rpo_continuous_action ppo_continuous_action_jax",
        "ppo_pendulum",
    ),
    (PPO, "halfcheetah", f"{CONTINUOUS} {JAX} --env-ids HalfCheetah-v5 --methods {PPO_CONTINUOUS}", "ppo_halfcheetah"),
    (PPO, "minatar", "benchmark/results/minatar", "ppo_minatar"),
    (PPO, "other", f"{CONTINUOUS} --env-ids {OTHER}", "ppo_other"),
    (
        DQN,
        "results",
        f"benchmark/results/dqn {JAX} --methods dqn dqn_jax c51 c51_jax double_dqn dueling_dqn d3qn ez_greedy_dqn",
        "dqn",
    ),
    (
        ACTOR_CRITIC,
        "results",
        f"{OFF_POLICY_RUNS} {JAX} {PENDULUM} {OFF_POLICY} {OFF_POLICY_JAX}",
        "actor_critic_pendulum",
    ),
    (
        ACTOR_CRITIC,
        "long",
        f"{OFF_POLICY_RUNS} {JAX} --env-ids {LONG} --methods {OFF_POLICY} {OFF_POLICY_JAX}",
        "actor_critic_long",
    ),
    (ACTOR_CRITIC, "discrete", f"{OFF_POLICY_RUNS} --methods sac_discrete", "actor_critic_discrete"),
]

REPORT = ["report", CLASSIC, "--out", "benchmark/reports/classic", "--title", "PPO, here and in Stable-Baselines3"]


def words(page, marker, report, picture):
    """The command line of one of TABLES, after `solo`."""
    curves = ["--curves", f"docs/curves/{picture}.png"] if picture else []
    return ["report", *shlex.split(report), "--markdown", page, "--marker", marker, *curves]


if __name__ == "__main__":
    commands = [*(words(*entry) for entry in TABLES), REPORT]
    codes = [
        subprocess.run([sys.executable, "-m", "solorl.cli", *command], cwd=ROOT).returncode for command in commands
    ]
    sys.exit(max(codes))
