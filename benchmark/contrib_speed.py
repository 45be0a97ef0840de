"""Steps per second of PPO with an LSTM and of PPO with action masks: SoloRL and sb3-contrib, the same work in turn.

    pip install sb3-contrib
    python benchmark/contrib_speed.py --rounds 5

games/Cue-v0: 32 environments x 64 steps, 4 minibatches of whole sequences (sb3-contrib: of 512 steps), 4 epochs, a
layer of 64 tanh units and one LSTM of 64 units that actor and critic share. games/ResourceGrid-v0: 4 environments x 128
steps, 4 minibatches, 4 epochs, two hidden layers of 64 tanh units for the actor and as many for the critic, 96 actions
with a mask. Both: value clipping, Adam, one torch thread, CPU. How a round measures and what it includes is said in
ppo_speed.py.
"""

import speed

CASES = {  # environment: (script, steps of one iteration, iterations, iterations before the clock starts)
    "games/Cue-v0": ("ppo/ppo_lstm.py", 2048, 25, 5),
    "games/ResourceGrid-v0": ("ppo/ppo_masked.py", 512, 100, 20),
}
PEER = "sb3-contrib"
TITLES = {
    "games/Cue-v0": "PPO with an LSTM on games/Cue-v0",
    "games/ResourceGrid-v0": "PPO with action masks on games/ResourceGrid-v0",
}


def sb3(env_id):
    """Measure sb3-contrib; in a process of its own."""
    import gymnasium as gym
    import torch
    import torch.nn as nn
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from sb3_contrib.common.wrappers import ActionMasker
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    import solorl.games  # noqa: F401 registers the games

    class Encoder(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 64)
            self.layer = nn.Sequential(nn.Linear(space.shape[0], 64), nn.Tanh())

        def forward(self, obs):
            return self.layer(obs)

    torch.set_num_threads(1)
    _, batch, iterations, before = CASES[env_id]
    settings = speed.PEERS["ppo"] | {"clip_range_vf": 0.2, "device": "cpu", "seed": 1}
    if env_id == "games/Cue-v0":
        settings |= {"n_steps": 64, "batch_size": 512, "learning_rate": 1e-3}
        lstm = {"lstm_hidden_size": 64, "shared_lstm": True, "enable_critic_lstm": False, "net_arch": []}
        lstm |= {"features_extractor_class": Encoder}
        model = RecurrentPPO("MlpLstmPolicy", make_vec_env(env_id, 32), policy_kwargs=lstm, **settings)
    else:
        masked = lambda **_: ActionMasker(gym.make(env_id), lambda env: env.unwrapped._mask())  # noqa: E731
        model = MaskablePPO("MlpPolicy", make_vec_env(masked, 4), **settings)
    speed.time_sb3(model, batch * iterations, batch * before)


def measure(env_id, name):
    if name == PEER:
        return speed.sb3(__file__, env_id)
    script, batch, iterations, before = CASES[env_id]
    return speed.solorl(script, batch * iterations, batch * before, "--env-id", env_id, "--save-every", 0)


def table(path):
    """The measurements of a file as Markdown tables."""
    return speed.tables(path, TITLES, PEER, [PEER], ", one thread.")


def main():
    args = speed.arguments("contrib", __doc__).parse_args()
    if args.sb3 is not None:
        sb3(args.sb3[0])
        return
    rounds = {env_id: [] for env_id in CASES}
    for _ in range(args.rounds):
        for env_id in CASES:
            rounds[env_id].append({name: measure(env_id, name) for name in (PEER, "SoloRL")})
    speed.write(args.out, rounds=rounds)
    print(table(args.out))


if __name__ == "__main__":
    main()
