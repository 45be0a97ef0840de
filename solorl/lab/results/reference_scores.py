"""Reference scores, so that environments with different scales can be averaged: low is 0, high is 1.

low: the return of uniformly random actions. high: what counts as solved.
"""

import re

# low: mean over 1,000 episodes (classic control, Lunar Lander), 200 (MuJoCo, Bipedal Walker) or 20 (Car Racing) of
# uniformly random actions, seeds from 0, Gymnasium 1.4. high: the `reward_threshold` with which Gymnasium registers the
# environment; where it has none, a result of trained agents, named after the line. MuJoCo's scores are those of -v5.
CONTROL = {
    "CartPole-v0": (22.6, 195.0),
    "CartPole-v1": (22.6, 475.0),
    "Acrobot-v1": (-498.6, -100.0),
    "MountainCar-v0": (-200.0, -110.0),
    "MountainCarContinuous-v0": (-33.1, 90.0),
    "Pendulum-v1": (-1218.9, -150.0),  # -151: RPO, table in CleanRL's documentation
    "LunarLander-v3": (-184.3, 200.0),
    "LunarLanderContinuous-v3": (-209.7, 200.0),
    "BipedalWalker-v3": (-100.3, 300.0),
    "BipedalWalkerHardcore-v3": (-108.1, 300.0),
    "CarRacing-v3": (-32.7, 900.0),
    "HalfCheetah": (-284.2, 4_800.0),
    "Hopper": (17.5, 3_800.0),
    "Walker2d": (1.7, 4_592.3),  # SAC's expert in D4RL, https://arxiv.org/abs/2004.07219
    "Ant": (-76.2, 6_000.0),
    "Humanoid": (112.7, 5_000.0),  # 5,035 and 4,996: TD3 and SAC after a million steps, CleanRL's documentation
    "HumanoidStandup": (33_574.0, 150_000.0),  # 150,972: RPO after 8 million steps, CleanRL's documentation
    "Swimmer": (2.6, 360.0),
    "Reacher": (-42.9, -3.75),
    "Pusher": (-148.7, 0.0),
    "InvertedPendulum": (5.5, 950.0),
    "InvertedDoublePendulum": (48.6, 9_100.0),
}

# What D4RL, https://arxiv.org/abs/2004.07219, counts as 0 (random) and 100 (expert).
D4RL = {
    "HalfCheetah": (-280.178953, 12135.0),
    "Hopper": (-20.272305, 3234.3),
    "Walker2d": (1.629008, 4592.3),
    "Ant": (-325.6, 3879.7),
}

# Random play and a professional human tester on 57 Atari games, from up to 30 no-ops: Wang et al. 2016,
# https://arxiv.org/abs/1511.06581, as used for "human-normalised" scores since.
# fmt: off
ATARI = {
    "Alien": (227.8, 7127.7), "Amidar": (5.8, 1719.5), "Assault": (222.4, 742), "Asterix": (210, 8503.3),
    "Asteroids": (719.1, 47388.7), "Atlantis": (12850, 29028.1), "BankHeist": (14.2, 753.1),
    "BattleZone": (2360, 37187.5), "BeamRider": (363.9, 16926.5), "Berzerk": (123.7, 2630.4),
    "Bowling": (23.1, 160.7), "Boxing": (0.1, 12.1), "Breakout": (1.7, 30.5), "Centipede": (2090.9, 12017),
    "ChopperCommand": (811, 7387.8), "CrazyClimber": (10780.5, 35829.4), "Defender": (2874.5, 18688.9),
    "DemonAttack": (152.1, 1971), "DoubleDunk": (-18.6, -16.4), "Enduro": (0, 860.5), "FishingDerby": (-91.7, -38.7),
    "Freeway": (0, 29.6), "Frostbite": (65.2, 4334.7), "Gopher": (257.6, 2412.5), "Gravitar": (173, 3351.4),
    "Hero": (1027, 30826.4), "IceHockey": (-11.2, 0.9), "Jamesbond": (29, 302.8), "Kangaroo": (52, 3035),
    "Krull": (1598, 2665.5), "KungFuMaster": (258.5, 22736.3), "MontezumaRevenge": (0, 4753.3),
    "MsPacman": (307.3, 6951.6), "NameThisGame": (2292.3, 8049), "Phoenix": (761.4, 7242.6),
    "Pitfall": (-229.4, 6463.7), "Pong": (-20.7, 14.6), "PrivateEye": (24.9, 69571.3), "Qbert": (163.9, 13455),
    "Riverraid": (1338.5, 17118), "RoadRunner": (11.5, 7845), "Robotank": (2.2, 11.9), "Seaquest": (68.4, 42054.7),
    "Skiing": (-17098.1, -4336.9), "Solaris": (1236.3, 12326.7), "SpaceInvaders": (148, 1668.7),
    "StarGunner": (664, 10250), "Surround": (-10, 6.5), "Tennis": (-23.8, -8.3), "TimePilot": (3568, 5229.2),
    "Tutankham": (11.4, 167.6), "UpNDown": (533.4, 11693.2), "Venture": (0, 1187.5),
    "VideoPinball": (16256.9, 17667.9), "WizardOfWor": (563.5, 4756.5), "YarsRevenge": (3092.9, 54576.9),
    "Zaxxon": (32.5, 9173.3),
}
# fmt: on


def reference(env_id: str) -> tuple[float, float] | None:
    """(low, high) of an environment, or None where no reference is known.

    The versions of a MuJoCo task share one entry; Atari games are known by the names of Gymnasium ("ALE/Pong-v5",
    "PongNoFrameskip-v4") and EnvPool ("Pong-v5").
    """
    name = re.sub(r"-v\d+$", "", env_id)
    game = re.sub(r"(NoFrameskip|Deterministic)$", "", name.removeprefix("ALE/"))
    return CONTROL.get(env_id) or CONTROL.get(name) or ATARI.get(game)
