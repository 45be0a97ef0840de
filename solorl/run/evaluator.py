"""The evaluations of one run: its environments, the best and the last score, and the target."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from solorl.run.device import CONFIRM, EVALUATE, env_seed
from solorl.run.evaluation import Policy, film, play_episodes
from solorl.run.folder import RunFolder
from solorl.run.meter import Diverged
from solorl.terminal import warn


class Evaluator:
    """Plays greedy policies on `--eval-episodes` environments with seeds of their own."""

    def __init__(self, args: Any):
        self.args = args
        self.best = -math.inf  # mean return
        self.last = (-1, 0.0, 0.0)  # step (-1: none yet), mean return and its standard deviation
        self.improved = False  # whether the last one is better than all before it
        self._confirmations = 0
        self._envs: list[Any] = []

    def play(self, stream: int, first: int, policy: Policy, make_env: Callable[..., Any]) -> Any:
        """Returns and lengths of one episode in each environment, with the seeds from number `first` of a stream on."""
        count = self.args.eval_episodes
        if not self._envs:
            self._envs = [make_env(self.args.env_id) for _ in range(count)]
        return play_episodes(self._envs, policy, [env_seed(self.args.seed, stream, first + i) for i in range(count)])

    def evaluate(self, step: int, policy: Policy, make_env: Callable[..., Any]) -> dict[str, float]:
        """Play, note the score, and return its row of metrics. Raises Diverged where the mean return is not finite."""
        returns, lengths = self.play(EVALUATE, 0, policy, make_env)
        mean, std = float(returns.mean()), float(returns.std())
        if not math.isfinite(mean):
            raise Diverged("eval/episodic_return", mean)
        self.last, self.improved = (step, mean, std), mean > self.best
        self.best = max(self.best, mean)
        return {
            "eval/episodic_return": mean,
            "eval/episodic_return_std": std,
            "eval/episodic_length": float(lengths.mean()),
        }

    def confirm(self, policy: Policy, make_env: Callable[..., Any]) -> float | None:
        """Where the last evaluation has reached `--target-return`: the mean return on seeds never used before."""
        if self.args.target_return is None or self.last[1] < self.args.target_return:
            return None
        first = self._confirmations * self.args.eval_episodes
        self._confirmations += 1
        return float(self.play(CONFIRM, first, policy, make_env)[0].mean())

    def close(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()

    def counters(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"best": self.best, "last_eval": list(self.last), "confirmations": self._confirmations}

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on from these counters."""
        self.best, self.last, self._confirmations = saved["best"], tuple(saved["last_eval"]), saved["confirmations"]


def film_to(folder: RunFolder, name: str, seed: int, policy: Policy, make_env: Callable[..., Any], env_id: str) -> Any:
    """Film one episode into a file in `videos`; returns its path, or None, with a warning, where that fails."""
    path = folder.path / "videos" / name
    try:
        folder.require()
        env = make_env(env_id, render_mode="rgb_array")
        try:
            film(env, policy, seed, path)
        finally:
            env.close()
    except Exception as error:  # no renderer, no codec, no space: a film is not worth a training
        warn(f"no video: {type(error).__name__}: {error}")
        return None
    return path
