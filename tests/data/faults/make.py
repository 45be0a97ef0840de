"""Makes the run folders here again: `python tests/data/faults/make.py [NAME ...]`, all of them without names.

Each training runs in a folder of its own, in a temporary folder; kept are the script, config.json without what tells of
the machine, status.json, and metrics.jsonl, compressed. `--table` only writes README.md.
"""

import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
MACHINE = {"system": "Linux", "cpu": "", "cores": 1, "device": "cpu"}

SOLVED = "healthy"
EVERY = "--eval-episodes 10"
PPO = f"--env-id CartPole-v1 --total-timesteps 30000 --log-every 500 --eval-every 3000 {EVERY}"
PPO_2 = PPO.replace("30000", "25000") + " --num-envs 8 --num-steps 64 --learning-rate 1e-3 --seed 2"
PENDULUM_PPO = (
    "--env-id Pendulum-v1 --total-timesteps 50000 --num-envs 4 --num-steps 128 --num-minibatches 8 --gamma 0.9 "
    f"--learning-rate 1e-3 --log-every 500 --eval-every 5000 {EVERY}"
)
CAR = "--env-id MountainCarContinuous-v0 --total-timesteps 10240 --num-steps 256 --num-minibatches 4 "
CAR += "--log-every 250 --eval-every 2000 --eval-episodes 2"
DQN_BASE = "--env-id CartPole-v1 --total-timesteps 25000 --train-frequency 4 --learning-rate 1e-3 "
DQN_BASE += f"--exploration-fraction 0.4 --log-every 200 --eval-every 2500 {EVERY}"
DQN = DQN_BASE + " --learning-starts 1000"
PENDULUM = "--env-id Pendulum-v1 --total-timesteps {} --num-envs 4 --utd-ratio 0.25 --learning-starts 1000 "
PENDULUM += "--batch-size 64 --gamma 0.95 --tau 0.01 --log-every 100 --eval-every 1000 --eval-episodes 5"
SAC, SAC_SHORT = (PENDULUM.format(steps) + " --policy-lr 1e-3" for steps in (10_000, 7_000))

# name -> (file, flags, edits of a copy, what was done wrong, cause)
TRAININGS = {
    "ppo_healthy": ("ppo", PPO, [], "nothing", SOLVED),
    "ppo_continuous_action_healthy": ("ppo_continuous_action", PENDULUM_PPO, [], "nothing", SOLVED),
    "dqn_healthy": ("dqn", DQN, [], "nothing", SOLVED),
    "sac_healthy": ("sac_continuous_action", SAC, [], "nothing", SOLVED),
    "ppo_healthy_2": ("ppo", PPO_2, [], "nothing", SOLVED),
    "ppo_learning_rate": (
        "ppo",
        PPO.replace("30000", "20000") + " --learning-rate 2.5e-8",
        [],
        "I typed 2.5e-8 for the learning rate, where 2.5e-4 was meant",
        "learning rate too small",
    ),
    "ppo_nan_observation": (
        "ppo",
        "--env-id LunarLander-v3 --total-timesteps 100000 --log-every 500 --eval-every 10000",
        [
            (
                "def make_env(env_id, **kwargs):\n",
                "class Standardise(gym.ObservationWrapper):\n"
                "    def __init__(self, env):\n"
                "        super().__init__(env)\n"
                "        self.seen = []\n\n"
                "    def observation(self, obs):\n"
                "        self.seen.append(obs)\n"
                "        if len(self.seen) < 1000:\n"
                "            return obs\n"
                "        last = np.array(self.seen[-50:])\n"
                "        return ((obs - last.mean(0)) / last.std(0)).astype(np.float32)\n\n\n"
                "def make_env(env_id, **kwargs):\n",
            ),
            ("    env = gym.make(env_id, **kwargs)\n", "    env = Standardise(gym.make(env_id, **kwargs))\n"),
        ],
        "I divide the observations by their standard deviation over the last 50, but a leg in the air gives only zeros",
        "observations NaN, division by zero",
    ),
    "ppo_wrong_sign": (
        "ppo",
        PPO,
        [
            (
                "loss = -(objective - args.vf_coef * value_loss + args.ent_coef * entropy.mean())  # Eq. 9",
                "loss = objective + args.vf_coef * value_loss - args.ent_coef * entropy.mean()",
            )
        ],
        "I wrote Eq. 9 as a loss and forgot the minus in front of the objective",
        "policy loss has the wrong sign",
    ),
    "ppo_ends_ignored": (
        "ppo",
        PPO,
        [
            ("bootstrap = (1 - done[t]) * next_value + final_value[t]", "bootstrap = next_value"),
            ("gamma * lam * (1 - done[t]) * next_advantage", "gamma * lam * next_advantage"),
        ],
        "I simplified GAE and left out the ends of episodes",
        "returns run across episode ends",
    ),
    "ppo_reward_scale": (
        "ppo",
        PPO,
        [
            (
                "    env = gym.make(env_id, **kwargs)\n",
                "    env = gym.make(env_id, **kwargs)\n"
                "    env = gym.wrappers.TransformReward(env, lambda reward: 1e6 * reward)\n",
            )
        ],
        "my reward counts in millionths, so each step gives 1,000,000",
        "rewards far too large",
    ),
    "ppo_reward_log": (
        "ppo",
        PPO,
        [
            (
                "def make_env(env_id, **kwargs):\n",
                "class Centred(gym.Wrapper):\n"
                "    def step(self, action):\n"
                "        obs, _, terminated, truncated, info = self.env.step(action)\n"
                "        return obs, float(np.log(2.4 - abs(obs[0]))), terminated, truncated, info\n\n\n"
                "def make_env(env_id, **kwargs):\n",
            ),
            ("    env = gym.make(env_id, **kwargs)\n", "    env = Centred(gym.make(env_id, **kwargs))\n"),
        ],
        "my reward is the logarithm of the distance to the end of the track, where an episode ends",
        "reward NaN beyond the track",
    ),
    "ppo_entropy": (
        "ppo",
        PPO.replace("30000", "20000") + " --ent-coef 1",
        [],
        "I wanted more exploration and set the entropy coefficient to 1; only the greedy policy is good",
        "entropy bonus too large",
    ),
    "ppo_offset": (
        "ppo",
        PPO,
        [
            (
                "    env = gym.make(env_id, **kwargs)\n",
                "    env = gym.make(env_id, **kwargs)\n"
                "    origin = np.array([1000, 0, 0, 0], np.float32)\n"
                "    env = gym.wrappers.TransformObservation(env, lambda obs: obs + origin, env.observation_space)\n",
            )
        ],
        "my cart gives its position in world coordinates, where the track lies at x = 1000",
        "observations not centred, network saturated",
    ),
    "ppo_continuous_action_eval_raw": (
        "ppo_continuous_action",
        PENDULUM_PPO.replace("50000", "40000"),
        [
            (
                "        obs = self.obs_normalizer(obs.reshape(obs.shape[0], -1))\n"
                "        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device)\n",
                "        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device)\n"
                "        obs = obs.flatten(1)\n",
            )
        ],
        "I copied `act` from ppo.py, so it gives raw observations to the actor",
        "evaluation without observation normalisation",
    ),
    "ppo_continuous_action_std": (
        "ppo_continuous_action",
        CAR + " --std-init 0.01",
        [],
        "I wanted smooth actions and set the initial standard deviation to 0.01",
        "no exploration, goal never found",
    ),
    "ppo_continuous_action_sign_reward": (
        "ppo_continuous_action",
        PENDULUM_PPO.replace("50000", "20000"),
        [
            (
                "    env = gym.make(env_id, **kwargs)\n",
                "    env = gym.make(env_id, **kwargs)\n"
                "    env = gym.wrappers.TransformReward(env, lambda reward: float(np.sign(reward)))\n",
            )
        ],
        "I took the sign of the reward, as one does on Atari",
        "reward constant, no signal",
    ),
    "dqn_learning_rate": (
        "dqn",
        DQN.replace("--learning-rate 1e-3", "--learning-rate 1e-1"),
        [],
        "I typed 1e-1 for the learning rate, where 1e-3 was meant",
        "learning rate too large",
    ),
    "dqn_target_frozen": (
        "dqn",
        DQN,
        [
            (
                "        if global_step % args.target_network_frequency < batch_steps:  # a multiple of it lies in "
                "this iteration\n            soft_update(target_network, q_network, args.tau)\n",
                "",
            )
        ],
        "I cleaned up the loop and lost the lines which copy the target network",
        "target network never updated",
    ),
    "dqn_broadcast": (
        "dqn",
        DQN,
        [
            (
                "    q = q_network(batch.obs).gather(1, batch.action[:, None]).squeeze(1)\n"
                "    assert q.shape == target.shape == batch.reward.shape\n",
                "    q = q_network(batch.obs).gather(1, batch.action[:, None])\n",
            )
        ],
        "I forgot the squeeze after gather, and took out the assert which complained",
        "shapes broadcast in the loss",
    ),
    "dqn_learning_starts": (
        "dqn",
        DQN_BASE + " --learning-starts 100000",
        [],
        "I typed one zero too many for learning_starts, so it lies behind the end",
        "learning never starts",
    ),
    "sac_target_entropy": (
        "sac_continuous_action",
        SAC_SHORT,
        [("run.learned(alpha_step(entropy, -action_dim))", "run.learned(alpha_step(entropy, action_dim))")],
        "I forgot the minus of the target entropy",
        "target entropy unreachable, temperature explodes",
    ),
}


def command_of(name):
    """The command line as its author typed it."""
    file, flags, edits, *_ = TRAININGS[name]
    return f"python my_{file.split('_')[0]}.py {flags}" if edits else f"solo train {file} {flags}"


def edited(text, edits):
    """The text of a script after the edits; each must fit exactly once."""
    for old, new in edits:
        assert text.count(old) == 1, f"{text.count(old)} times in the file: {old}"
        text = text.replace(old, new)
    return text


def make(name):
    """Train, and keep what is wanted of the run folder."""
    file, flags, edits, *_ = TRAININGS[name]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = [sys.executable, "-m", "solorl.cli", "train", file]
        if edits:
            script = folder / f"my_{file.split('_')[0]}.py"
            copy = [sys.executable, "-m", "solorl.cli", "copy", file, script.name]
            subprocess.run(copy, cwd=folder, check=True)
            script.write_text(edited(script.read_text(), edits))
            start = [sys.executable, script.name]
        code = subprocess.run([*start, *flags.split()], cwd=folder, env=environ).returncode
        (run,) = (folder / "runs").iterdir()
        keep(run, HERE / name, f"{script.name if edits else f'algorithms/{file}.py'}")
    print(f"{name}: exit code {code}, evaluations {evaluations(HERE / name)}", flush=True)


def keep(run, to, script_path):
    """The script, status, rows and configuration of a run folder, without what tells of the machine."""
    to.mkdir(exist_ok=True)
    for old in to.iterdir():
        old.unlink()
    config = json.loads((run / "config.json").read_text())
    config |= {"script_path": script_path, "git": None, "machine": MACHINE}
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    status = json.loads((run / "status.json").read_text())
    (to / "status.json").write_text(json.dumps(status | {"pid": 1}) + "\n")
    rows = gzip.compress((run / "metrics.jsonl").read_bytes(), 9, mtime=0)
    (to / "metrics.jsonl.gz").write_bytes(rows)
    (to / config["script"]).write_bytes((run / config["script"]).read_bytes())


def rows_of(folder):
    """The rows of metrics."""
    return [json.loads(line) for line in gzip.decompress((folder / "metrics.jsonl.gz").read_bytes()).splitlines()]


def evaluations(folder):
    """Mean returns of the evaluations, rounded."""
    values = [row["eval/episodic_return"] for row in rows_of(folder) if "eval/episodic_return" in row]
    return [round(value) for value in values]


HEAD = """# Trainings that failed, and five that did not

Made by `python tests/data/faults/make.py`; one seed each, on one CPU core. Each folder holds what stands in a run
folder: the script as it ran, `config.json` (without the machine), `status.json`, and the rows of metrics, compressed
(`metrics.jsonl.gz`; two that met a NaN end early). The scripts are wrong on purpose: nothing imports, lints
or counts them. `solo copy FILE my_FILE.py` made the copies; `make.py` holds the edits.

| name | what was done wrong | cause | evaluations: first, best, last | command |
|---|---|---|---|---|
"""


def table():
    """README.md, from the list above and the folders."""
    lines = []
    for name, (*_, mistake, cause) in TRAININGS.items():
        if not (HERE / name).is_dir():
            lines.append(f"| {name} | {mistake} | {cause} | not made yet | `{command_of(name)}` |\n")
            continue
        values = evaluations(HERE / name)
        score = f"{values[0]:,}, {max(values):,}, {values[-1]:,}" if values else "none"
        status = json.loads((HERE / name / "status.json").read_text())["status"]
        score += f" ({status})" * (status != "finished")
        lines.append(f"| {name} | {mistake} | {cause} | {score} | `{command_of(name)}` |\n")
    (HERE / "README.md").write_text(HEAD + "".join(lines))


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--table"]
    for name in names or ([] if "--table" in sys.argv else TRAININGS):
        make(name)
    table()
