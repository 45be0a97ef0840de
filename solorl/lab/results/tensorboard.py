"""Results of other libraries, out of the TensorBoard folders that CleanRL and Stable-Baselines3 write.

Needs the package `tensorboard` (`pip install 'solorl[tensorboard]'`), imported only here.

What is in a folder is told by its tags. Its name tells the rest: `{env}__{exp}__{seed}__{time}` for CleanRL, also
one above `{ALGO}_{n}`; `{env}/{ALGO}_{n}` or `{algo}/{env}_{n}` for Stable-Baselines3 and its zoo, where n stands for
the seed. The script is named `cleanrl_{exp}` or `sb3_{algo}`, so that it is told apart from ours.
"""

import math
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

from solorl.envs.ids import OTHERS
from solorl.lab.results.result import Result, ResultError, reading
from solorl.lab.results.run_folder import curves_of, evaluations, last_mean, thinned

TRAIN_TAGS = (  # return, length; the first that a folder holds
    ("charts/episodic_return", "charts/episodic_length"),  # CleanRL: one row per episode
    ("rollout/ep_rew_mean", "rollout/ep_len_mean"),  # Stable-Baselines3: one row per rollout, over 100 episodes
)
EVAL_TAGS = (("eval/mean_reward", "eval/mean_ep_length"), ("eval/episodic_return", "eval/episodic_length"))
SPEED_TAGS = ("charts/SPS", "time/fps")
# Names of Stable-Baselines3 -> ours, which are CleanRL's.
ALIASES = {
    "train/approx_kl": "losses/approx_kl",
    "train/clip_fraction": "losses/clipfrac",
    "train/explained_variance": "losses/explained_variance",
    "train/value_loss": "losses/value_loss",
    "train/critic_loss": "losses/qf_loss",
    "train/ent_coef": "losses/alpha",
    "train/learning_rate": "charts/learning_rate",
    "rollout/ep_rew_mean": "charts/episodic_return",
    "rollout/ep_len_mean": "charts/episodic_length",
    "rollout/exploration_rate": "charts/epsilon",
    "eval/mean_reward": "eval/episodic_return",
}
LOSS = re.compile("(losses|train)/(?!explained_variance)")  # which is NaN where all returns are equal
VERSIONED = re.compile(r"^(?P<env>.*-v\d+)(_(?P<n>\d+))?$")  # Hopper-v4, Hopper-v4_1

Series = list[tuple[int, float, float]]  # (step, seconds since the first event, value)


def read_tensorboard(folder: Path, names: tuple[str, str, int] | None = None, strict: bool = True) -> Result:
    """The result in a TensorBoard folder, with its `curves` by our names; its status is "finished" unless it diverged,
    because the files do not tell more.

    Environment, algorithm and seed are `names` where they are given, else those that the folder's names tell.
    Raises ResultError where `tensorboard` is missing, the files cannot be read, if `strict` where they hold no return,
    or where the names of the folder and of those around it do not tell the environment.
    """
    env_id, name, seed = names or names_of(folder)
    series, status, began = scalars(folder)
    episodes, evals = _table(series, TRAIN_TAGS), _table(series, EVAL_TAGS)
    if strict and not episodes and not evals:
        tags = ", ".join(pair[0] for pair in (*TRAIN_TAGS, *EVAL_TAGS))
        raise ResultError(f"{folder} holds none of the tags {tags}")
    total = max((int(rows[-1][0]) for rows in (episodes, evals) if rows), default=0)
    smoothed = TRAIN_TAGS[0][0] not in series
    curves = curves_of((ALIASES.get(tag, tag), row[0], row[2]) for tag, rows in series.items() for row in rows)
    if "train/entropy_loss" in curves:
        steps, values = curves["train/entropy_loss"]
        curves["losses/entropy"] = steps, -values
    speed = next((series[tag] for tag in SPEED_TAGS if tag in series), [])
    return Result(
        env_id=env_id,
        script=f"{'sb3' if smoothed else 'cleanrl'}_{name.removeprefix('sb3_').removeprefix('cleanrl_')}",
        seed=seed,
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        status=status,
        global_step=total,
        wall_time=max((row[1] for rows in series.values() for row in rows), default=0.0),
        eval=evaluations([[*row[:3], 0.0, row[3]] for row in evals]),  # neither library logs a deviation
        train=thinned(episodes, total),
        last_100_episodes=last_mean([row[2] for row in episodes], 1 if smoothed else 100),
        sps=median(value for _, _, value in speed) if speed else None,
        curves=curves,
        source=str(folder),
    )


def names_of(folder: Path) -> tuple[str, str, int]:
    """(env_id, name of the algorithm, seed) out of the names of a folder and of those above it. Raises ResultError."""
    parts = ("", "", "", *folder.resolve().parts)
    last = re.fullmatch(r"(.+?)(?:_(\d+))?", parts[-1])
    for place, above in zip(parts[-1:-4:-1], parts[-2:-5:-1], strict=True):
        words = place.split("__")  # of CleanRL
        if len(words) > 2 and words[0] and words[2].isdecimal():
            space = f"{above}/" if f"{above}/*" in OTHERS else ""  # CleanRL lets ALE/Pong-v5 make a folder ALE
            return space + words[0], words[1], int(words[2])
        if match := VERSIONED.match(place):  # ppo/Hopper-v4_1 of the zoo; or PPO_1 in a folder of this name
            name, number = last.groups() if last and place != parts[-1] else (above, None)
            return match["env"], name.lower(), int(match["n"] or number or 0)
    ways = "name it ENV__NAME__SEED or put it below a folder named ENV, as in CartPole-v1/PPO_1"
    raise ResultError(f"{folder} does not tell its environment; {ways}")


def scalars(folder: Path) -> tuple[dict[str, Series], str, float]:
    """All scalar series by tag, of finite numbers; the status, "finished" unless a loss ends with NaN or infinity; and
    the time of the first event in seconds since 1970."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ResultError(f"{folder} needs an extra to be read: pip install 'solorl[tensorboard]'") from error
    with reading(folder):
        events: Any = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        found = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    began = min((event.wall_time for rows in found.values() for event in rows), default=0.0)
    series = {tag: sorted((e.step, e.wall_time - began, float(e.value)) for e in rows) for tag, rows in found.items()}
    finite = {tag: [row for row in rows if math.isfinite(row[2])] for tag, rows in series.items()}
    ends = [(tag, *rows[-1]) for tag, rows in series.items() if LOSS.match(tag) and not math.isfinite(rows[-1][2])]
    said = [f"diverged: {tag} is {value} at step {step:,}" for tag, step, _, value in ends]
    return {tag: rows for tag, rows in finite.items() if rows}, [*said, "finished"][0], began


def _table(series: dict[str, Series], pairs: tuple[tuple[str, str], ...]) -> list[list[float]]:
    """[step, seconds, return, length] by step, of the first pair of tags that is there; a missing length is 0."""
    returns, length = next((pair for pair in pairs if pair[0] in series), pairs[0])
    lengths = {row[0]: row[2] for row in series.get(length, [])}
    return [[step, seconds, value, lengths.get(step, 0.0)] for step, seconds, value in series.get(returns, [])]
