"""What `solo copy --standalone` puts in the place of the library: the same verbs and seeds, no run folder.

The weights that a script learns with it are equal, bit for bit, to those it learns with the library.
"""

import argparse
import inspect
import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np

from solorl.args.command_line import check_ranges, given_arguments
from solorl.envs.vector import VectorEnvs, masks_in


@dataclass
class RunArgs:
    """The arguments that every script shares."""

    seed: int = 1  # seed of Python, NumPy, torch and the environments, from 0 to 2147483647
    device: str = "auto"  # auto (CUDA where there is one, else the CPU) | cpu | cuda | cuda:1 | mps
    threads: int = 1  # CPU threads of torch; 1 is best for small networks or on a busy machine
    compile: bool = False  # compile the marked functions
    eval_episodes: int = 20  # episodes of the evaluation at the end
    save_to: str = ""  # file for the final weights; empty: SCRIPT__ENVIRONMENT__SEED.npz


def parse(args_type):
    """Read the command line; the comments after the fields are their help, and say what a number can be."""
    try:
        args = args_type(**given_arguments(args_type, sys.argv[1:]))
        check_ranges(args)
    except argparse.ArgumentError as error:
        quit_with(error)
    if getattr(args, "env_kind", "") == "atari" and "game" not in gym.spec(args.env_id.split(":")[-1]).kwargs:
        quit_with(f"{args.env_id} is not an Atari game")
    return args


def quit_with(sentence):
    """Print the sentence on standard error and leave with exit code 2."""
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


class Run:
    """Seeds, device, progress, and an evaluation at the end."""

    def __init__(self, args, parallel=False):
        self.args, self.parts, self.returns, self.ended, self.printed, self.last = args, {}, None, [], 0.0, {}
        self.device, self.restarted, self.rank, self.world_size = args.device, [], 0, 1
        random.seed(args.seed)
        np.random.seed(args.seed)
        if torch := sys.modules.get("torch"):
            best = "cuda" if torch.cuda.is_available() else "cpu"
            self.device = torch.device(best if args.device == "auto" else args.device)
            torch.manual_seed(args.seed)
            torch.set_num_threads(args.threads)
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)

    def env_seed(self, stream, index):
        """The seed of an environment; stream 0 trains, 1 evaluates."""
        return (self.args.seed * 4 + stream) * 2**30 + index

    def require(self, condition, sentence):
        """End with a sentence unless the condition holds."""
        if not condition:
            quit_with(sentence)

    def require_spaces(self, envs, obs, action):
        """End with a sentence unless the actions are "discrete", "continuous" or "bounded" as named, the observations
        arrays."""
        names = {"discrete": "Discrete", "continuous": "Box", "bounded": "Box"}
        known = obs in ("vector", "image") and action in names
        self.require(known, f"a standalone copy cannot have observations of the kind {obs} and actions of {action}")
        space, name = envs.single_action_space, names[action]
        fits = type(space).__name__ == name and np.issubdtype(space.dtype, np.floating) == (name == "Box")
        fits = fits and envs.single_observation_space.shape and (action != "bounded" or space.is_bounded())
        self.require(fits, f"the observations must be of the kind {obs} and the actions {action}")

    def iterations(self, steps, minibatches=None, batch=None):
        """How many iterations of `steps` environment steps there are; ends with a sentence where nothing is learned."""
        total = self.args.total_timesteps
        self.require(total >= steps, f"--total-timesteps {total} is less than one iteration of {steps} steps")
        parts = not minibatches or (steps % minibatches == 0 and steps > minibatches)
        self.require(parts, f"--num-minibatches {minibatches} must divide {steps} steps into parts of 2 or more")
        self.require(not batch or batch <= min(total, self.args.buffer_size), f"--batch-size {batch} is too large")
        return total // steps

    def resume(self, **parts):
        """Take what `close` is to save; a training always starts at iteration 0."""
        self.parts = parts
        return 0

    def reset(self, envs):
        """The first observations, with a seed of its own for each environment."""
        seeds = [self.env_seed(0, i) for i in range(envs.num_envs)]
        envs.action_space.seed(seeds[0])
        envs.single_action_space.seed(seeds[0])
        return envs.reset(seed=seeds)[0]

    def loop(self, start, num_iterations, last=True):
        """Count the iterations of one of the loops in a row."""
        yield from range(start, num_iterations)

    def episodes(self, global_step, reward, done, per_agent=False):
        """Sum the rewards of each episode."""
        for rewards, ends in zip(np.atleast_2d(reward), np.atleast_2d(done).astype(bool), strict=True):
            self.returns = rewards + (0.0 if self.returns is None else self.returns)
            self.ended += self.returns[ends].tolist()
            self.returns[ends] = 0.0

    def episode(self, global_step, episodic_return, length):
        """Keep the return of a whole episode."""
        self.ended.append(episodic_return)

    def gather(self, tensors, dim):
        """Those of all ranks, of which there is one."""
        return tensors

    def learned(self, metrics):
        """Keep the metrics of the last gradient step for `log`."""
        self.last |= metrics

    def log(self, global_step, metrics):
        """Print a line every second."""
        self.last |= metrics
        if time.time() - self.printed > 1:
            self.printed = time.time()
            mean = f"charts/episodic_return {np.mean(self.ended[-100:]):.1f}" if self.ended else ""
            numbers = [f"{name} {float(x):.4g}" for name, x in self.last.items()]
            print(f"step {global_step:,}", mean, *numbers, sep="  ")

    def evaluate(self, global_step, policy, make_env, also=None, played=None):
        """Nothing: `close` evaluates."""

    def save(self, global_step):
        """Nothing: `close` saves."""

    def vector_env(self, make_env, env_id, num_envs):
        """Environments side by side, which reset in the same step."""
        return VectorEnvs([lambda: make_env(env_id)] * num_envs)

    def close(self, policy, make_env, sample=None, tell=None):
        """Evaluate the policy and save the weights."""
        known, returns = inspect.signature(policy).parameters, []
        together = "num_envs" in inspect.signature(make_env).parameters
        envs = (make_env if together else partial(self.vector_env, make_env))(self.args.env_id, 1)
        for i in range(self.args.eval_episodes):
            obs, infos = envs.reset(seed=[self.env_seed(1, i)])
            over, total, state = False, 0.0, None
            while not over:
                memory = (state, np.array([state is None])) if "state" in known else ()
                action = policy(obs, *memory, **({"action_mask": masks_in(infos)} if "action_mask" in known else {}))
                action, state = action if memory else (action, None)
                obs, reward, terminated, truncated, infos = envs.step(np.asarray(action))
                over, total = terminated[0] or truncated[0], total + float(reward[0])
            returns.append(total)
        print(f"evaluation {np.mean(returns):.1f} ± {np.std(returns):.1f} over {len(returns)} greedy episodes")
        modules = {name: part for name, part in self.parts.items() if hasattr(part, "named_parameters")}
        weights = {f"{name}.{key}": x.cpu().numpy() for name, m in modules.items() for key, x in m.state_dict().items()}
        name = f"{Path(sys.argv[0]).stem}__{self.args.env_id.replace('/', '_')}__{self.args.seed}.npz"
        path = Path(self.args.save_to or name)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **weights)
        print(f"weights {path}")

    def compile(self, function):
        """The compiled function with --compile, else the function itself."""
        return sys.modules["torch"].compile(function, dynamic=False) if self.args.compile else function

    def fast(self, module):
        """A module as a function from a NumPy batch to a NumPy batch."""
        torch = sys.modules["torch"]

        def forward(x):
            y = module(torch.as_tensor(x, dtype=torch.float32, device=self.device))
            return tuple(one.cpu().numpy() for one in y) if isinstance(y, tuple) else y.cpu().numpy()

        return torch.no_grad()(forward)

    def gradient_step(self, loss_of, module, optimizer, max_grad_norm=float("inf")):
        """A function that takes one step of the optimizer down the gradient of the loss and returns its metrics, and
        the extra where the loss gives (loss, metrics, extra)."""
        torch, own = sys.modules["torch"], set(map(id, module.parameters()))
        foreign = [x for group in optimizer.param_groups for x in group["params"] if id(x) not in own]
        self.require(not foreign, f"an optimizer has parameters that {type(module).__name__} does not have")

        def gradients_of(parameters, *inputs):
            loss, *rest = loss_of(module, *inputs)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            return gradients, *torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, rest)

        def step(*inputs):
            parameters = [x for group in optimizer.param_groups for x in group["params"] if x.requires_grad]
            gradients, metrics, *extra = compiled(parameters, *inputs)
            optimizer.zero_grad()
            for x, gradient in zip(parameters, gradients, strict=True):
                x.grad = None if gradient is None else gradient.clone()
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            optimizer.step()
            return (metrics, *extra) if extra else metrics

        compiled = self.compile(gradients_of)
        return step
