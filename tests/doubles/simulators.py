"""Simulators that step batches of tensors: `simulators:TensorAim-v0` and its like, as ids of environments."""

import gymnasium as gym
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

LIMIT = 5  # steps of an episode


class Aim(gym.vector.VectorEnv):
    """Each step shows a target between -0.8 and 0.8, the reward is 1 minus the distance of the action from it. An
    action above 0.9 ends the episode, else the time limit does. Observations: 3 times the target plus 5, the steps so
    far."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, num_envs, device):
        self.num_envs, self.device = num_envs, torch.device(device)
        self.single_observation_space = gym.spaces.Box(-10.0, 10.0, (2,))
        self.single_action_space = gym.spaces.Box(-1.0, 1.0, (1,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.generator = torch.Generator()

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.generator.manual_seed(seed if isinstance(seed, int) else seed[0])
        self.steps = torch.zeros(self.num_envs)
        return self.look(), {}

    def look(self):
        self.target = torch.rand(self.num_envs, generator=self.generator) * 1.6 - 0.8
        self.obs = torch.stack([3 * self.target + 5, self.steps], 1)
        return self.obs

    def step(self, actions):
        assert torch.is_tensor(actions) and actions.shape == (self.num_envs, 1)
        action = actions[:, 0].clamp(-1, 1)
        reward = 1 - (action - self.target).abs()
        terminated, truncated = action > 0.9, self.steps + 1 >= LIMIT
        done = terminated | truncated
        final_obs = torch.stack([self.obs[:, 0], self.steps + 1], 1)
        self.steps = torch.where(done, 0, self.steps + 1)
        next_obs = torch.where(done[:, None], final_obs, self.look())
        return self.obs, reward, terminated, truncated, {"next_obs": next_obs}


class SavedAim(Aim):
    """One whose state can be saved."""

    def state_dict(self):
        return {"generator": self.generator.get_state(), "steps": self.steps, "target": self.target, "obs": self.obs}

    def load_state_dict(self, saved):
        self.generator.set_state(saved["generator"])
        self.steps, self.target, self.obs = saved["steps"], saved["target"], saved["obs"]


class ArrayAim(Aim):
    """One that gives arrays of NumPy."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0].numpy(), {}


gym.register("TensorAim-v0", vector_entry_point="simulators:Aim")
gym.register("SavedAim-v0", vector_entry_point="simulators:SavedAim")
gym.register("ArrayAim-v0", vector_entry_point="simulators:ArrayAim")
