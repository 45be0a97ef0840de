"""Writes the files of others that are measured next to ours into a folder, from clones of their repositories, changed
so that they run with current packages and say when which step was reached.

    git clone --bare https://github.com/meta-pytorch/LeanRL ... (and the others, below)
    python benchmark/gpu/peers.py --leanrl DIR --cleanrl DIR --purejaxrl DIR --purejaxql DIR    # git directories

The folder, .peers, is never committed. CHANGES says what is replaced by what; each must be found.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITES = {
    "leanrl": "https://github.com/meta-pytorch/LeanRL",
    "cleanrl": "https://github.com/vwxyzjn/cleanrl",
    "purejaxrl": "https://github.com/luchris429/purejaxrl",
    "purejaxql": "https://github.com/mttga/purejaxql",
}
LOGGING = {"import wandb\n": "import stand_ins as wandb\n"}  # the clock of stand_ins.py
TENSORBOARD = {"from torch.utils.tensorboard import SummaryWriter": "from stand_ins import SummaryWriter"}
SAME_STEP = ", autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)"  # as Gymnasium before 1.0 began episodes again
ENDS = {  # how Gymnasium since 1.0 tells of ends of episodes
    'if "final_info" in infos:': 'if "episode" in infos.get("final_info", {}):',
    'for info in infos["final_info"]:': "for info in __import__('stand_ins').first_episode(infos):",
}
FINAL_OBS = {'"final_observation"': '"final_obs"'}
ONE_ENV = "gym.vector.SyncVectorEnv([make_env(args.env_id, args.seed, 0, args.capture_video, run_name)]"
OFF_POLICY = LOGGING | ENDS | FINAL_OBS | {f"{ONE_ENV})": f"{ONE_ENV}{SAME_STEP}"}
NORMALIZED = {  # arguments that wrappers need since Gymnasium 1.0
    "lambda obs: np.clip(obs, -10, 10))": "lambda obs: np.clip(obs, -10, 10), env.observation_space)",
}
DETACHED = {  # with current tensordict the parameters of the copy that acts need gradients again
    "from_module(actor).data.to_module(actor_detach)\n": "from_module(actor).data.to_module(actor_detach)\n"
    "    actor_detach.requires_grad_(False)\n",
}
ACTION = {  # a module of tensordict may no longer have more results than keys
    'TensorDictModule(actor_detach.get_action, in_keys=["observation"], out_keys=["action"])': (
        "lambda obs: actor_detach.get_action(obs)[0]"
    ),
}
INFERENCE = {
    "agent_inference_p.to_module(agent_inference)\n": "agent_inference_p.to_module(agent_inference)\n"
    "    agent_inference.requires_grad_(False)\n",
}
PPO_ENVS = "[make_env(args.env_id, i, args.capture_video, run_name, args.gamma) for i in range(args.num_envs)]"
PPO = ENDS | NORMALIZED | {PPO_ENVS: f"{PPO_ENVS}{SAME_STEP[:-1]}"}
SEVERAL = "[make_env(args.env_id, args.seed + i, i, args.capture_video, run_name) for i in range(args.num_envs)]"
CLEAN = TENSORBOARD | ENDS | FINAL_OBS | {SEVERAL: f"{SEVERAL}{SAME_STEP[:-1]}"}

# repository -> file -> (name here, replacements)
CHANGES = {
    "leanrl": {
        "leanrl/sac_continuous_action_torchcompile.py": ("leanrl_sac.py", OFF_POLICY | DETACHED | ACTION),
        "leanrl/td3_continuous_action_torchcompile.py": ("leanrl_td3.py", OFF_POLICY | DETACHED),
        "leanrl/ppo_continuous_action_torchcompile.py": (
            "leanrl_ppo.py",
            # a point each iteration, not each tenth: one of 2,048 steps
            LOGGING | PPO | INFERENCE | {"iteration % 10 == 0": "iteration % 1 == 0"},
        ),
    },
    "cleanrl": {
        "cleanrl/sac_continuous_action.py": ("cleanrl_sac.py", CLEAN),
        "cleanrl/td3_continuous_action.py": ("cleanrl_td3.py", CLEAN),
        "cleanrl/ppo_continuous_action.py": ("cleanrl_ppo.py", TENSORBOARD | PPO),
        "cleanrl_utils/buffers.py": ("cleanrl_utils/buffers.py", {}),
    },
    "purejaxrl": {
        "purejaxrl/ppo.py": (
            "purejaxrl_ppo.py",
            {
                "import distrax": "import stand_ins as distrax",
                "from wrappers import": "from gymnax.wrappers.purerl import",  # the same two wrappers
                # gymnax since 1.0 tells terminations and truncations apart
                "obsv, env_state, reward, done, info = jax.vmap": "obsv, env_state, reward, end, cut, info = jax.vmap",
                ")(rng_step, env_state, action, env_params)\n": ")(rng_step, env_state, action, env_params)\n"
                "                done = end | cut\n",
            },
        ),
    },
    "purejaxql": {
        "purejaxql/pqn_minatar.py": (
            "purejaxql_pqn.py",
            LOGGING
            | {
                "import hydra\n": "import stand_ins as hydra\n",
                "from omegaconf import OmegaConf\n": "",
                "reward, new_done, info = vmap": "reward, end, cut, info = vmap",
                ")(rng_s, env_state, new_action)\n": ")(rng_s, env_state, new_action)\n"
                "                new_done = end | cut\n",
            },
        ),
    },
}


def write(git_dirs, folder):
    """Write the changed files into the folder, and COMMITS with the commit of each repository."""
    commits = []
    for name, git_dir in git_dirs.items():
        git = ["git", f"--git-dir={git_dir}"]
        commits.append(f"{SITES[name]} {subprocess.check_output([*git, 'rev-parse', 'HEAD'], text=True).strip()}")
        for path, (target, changes) in CHANGES[name].items():
            text = subprocess.check_output([*git, "show", f"HEAD:{path}"], text=True)
            for old, new in changes.items():
                if old not in text:
                    sys.exit(f"{SITES[name]}, {path}: {old!r} is not there; CHANGES must follow the file")
                text = text.replace(old, new)
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_text(text)
    (folder / "COMMITS").write_text("\n".join(commits) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".peers")
    for name, site in SITES.items():
        parser.add_argument(f"--{name}", required=True, metavar="DIR", help=f"git directory of {site}")
    args = vars(parser.parse_args())
    write({name: args[name] for name in SITES}, args["out"])
