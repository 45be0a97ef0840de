"""What looks wrong in a training, by rules over its curves, its arguments and its script; `solo doctor` prints it.

A rule is a function that says in numbers what it has seen, "" for nothing. Its docstring is what the user is told: the
likely cause, what to try, and the source. It knows a metric by its name only, and says nothing where this was not
logged.
"""

import ast
import contextlib
import difflib
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from solorl.catalog.header import fields_of, origins, parse_source, read_source
from solorl.lab.results.reference_scores import reference
from solorl.lab.results.statistics import Array
from solorl.lab.results.training import Training, real
from solorl.scripts import script_paths

LARGE_KL, LARGE_CLIPFRAC = 0.1, 0.4  # in a tenth of the rows; 0.02 and 0.1 are usual
LITTLE_ENTROPY, MUCH_ENTROPY = 0.05, 0.97  # of that of the first rows
LARGE_REWARD, LARGE_LOSS = 100.0, 1e4  # of a step in the mean; of a value
GROWTH = 30.0  # of the loss of the values, from the second fifth of a training to the last
ERRORS = 3.0  # standard errors above which a gap is not noise
FAR, FAR_COUNT = 10.0, 100.0  # times the default of an argument, or this part of it; of a whole number
LINES = 6  # of a changed script that are shown
FREE = ("total_timesteps", "num_envs", "seed")  # arguments that may be anything

LOSSES = ("losses/value_loss", "losses/v_loss", "losses/qf_loss", "losses/qf1_loss", "losses/td_loss")
VALUES = ("losses/q_values", "losses/qf_values", "losses/qf1_values")
# A script that learns from other rewards than it counts: np.sign(reward), normalizer.scale(reward), reward / 10.
CHANGES = re.compile(r"(sign|clip|clamp|scale|norm)\w*\([\w.]*reward|reward[\w.\[\]]* [*/] ?\d|\d \* [\w.]*reward")
# Words of a changed line -> what it is about; the first that fits.
TOPICS = {
    r"terminated|truncated|done|timeout|final_|next_value": "where episodes end and what is bootstrapped",
    r"target|tau\b|lerp_|load_state_dict": "the target network",
    r"detach|no_grad|backward|requires_grad": "where the gradient flows",
    r"reward": "rewards",
    r"logprob|ratio|clamp|entropy|advantage|loss|objective": "the loss",
    r"optim|lr\b|learning_rate": "the optimiser",
    r"action": "actions",
    r"obs": "observations",
}


class Finding(NamedTuple):
    """What one rule found."""

    what: str  # the likely cause, in words
    seen: str  # the numbers that say so
    remedy: str  # what to try
    source: str  # who says so


def number(value: float) -> str:
    """Four digits, and no zeros that say nothing."""
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"


# ---------------------------------------------------------------------- rules
def diverged(t: Training) -> str:
    """A number became NaN or infinite.

    The status of the run names it.
    Try: a smaller learning rate, a finite --max-grad-norm; are rewards and observations finite?
    Source: the run itself; where SoloRL trained it, its folder crash/ has the tensors
    """
    return t.status if t.status.startswith("diverged") else ""


def broke_off(t: Training) -> str:
    """The training broke off, or its rows are gone.

    Try: the last lines that it has printed; --resume continues it from its newest checkpoint
    Source: the run itself
    """
    broken = t.status in ("failed", "killed") or (t.copy and t.status == "finished" and not t.curves)
    return f"its status is {t.status}, its last row at step {number(t.steps)} of {number(t.total)}" if broken else ""


def no_update(t: Training) -> str:
    """No gradient step was made: no loss was logged before the end.

    Try: a smaller --learning-starts, or a longer training
    Source: Mnih et al. 2015, https://doi.org/10.1038/nature14236
    """
    starts, learns = t.args.get("learning_starts"), any(name.startswith("losses/") for name in t.curves)
    none = t.copy and starts is not None and not learns
    return f"no loss was logged in {number(t.steps)} steps; --learning-starts is {starts}" if none else ""


def changed_script(t: Training) -> str:
    """The script was changed.

    The script differs from the algorithm that it comes from.
    Try: the original on the same task, then one change at a time (solo diff)
    Source: docs/guides/does_not_learn.md
    """
    if not (t.copy and t.edited):
        return ""
    # the algorithm of its name, else the nearest one that its header names
    original = next(filter(None, map(script_paths().get, (t.copy.stem, *origins(t.copy)))), None)
    if original is None:
        return ""
    theirs, own = map(_code, (original, t.copy))
    changed = [re.sub(r"\s+", " ", line) for line in difflib.ndiff(theirs, own) if line[:2] in ("+ ", "- ")]
    if len(changed) > len(theirs) / 3:  # another algorithm
        return ""
    topics = dict.fromkeys(next((what for words, what in TOPICS.items() if re.search(words, x)), "") for x in changed)
    about = f" about {' and '.join(filter(None, topics))}" if any(topics) else ""
    more = " / ..." if len(changed) > LINES else ""
    return f"lines{about} are not those of {original.name}: {' / '.join(changed[:LINES])}{more}" if changed else ""


def _code(path: Path) -> list[str]:
    """Its lines without header and comments."""
    return [line for node in parse_source(path).body[1:] for line in ast.unparse(node).splitlines()]


def far_from_default(t: Training) -> str:
    """Settings are far from the file's own.

    Arguments that are ten times the defaults of the script, or a tenth; of counts a hundred times. Not where it is 0.
    Try: the defaults, with which its results were made
    Source: docs/guides/does_not_learn.md
    """
    if not t.copy:
        return ""
    found = []
    for name, node in fields_of(parse_source(t.copy)).items():
        value, default = real(t.args.get(name)), real(node.value and _constant(node.value))
        if name in FREE or value is None or default is None or value == default:
            continue
        # of a discount the distance to 1 counts
        a, b = (abs(1 - x) if "gamma" in name or "lambda" in name else abs(x) for x in (value, default))
        far = FAR_COUNT if isinstance(default, int) else FAR
        if b and not (a and 1 / far < a / b < far):
            found.append(f"--{name.replace('_', '-')} is {value:g}, the default {default:g}")
    return "; ".join(found)


def _constant(node: ast.expr) -> Any:
    with contextlib.suppress(ValueError):
        return ast.literal_eval(node)


def rate_at_zero(t: Training) -> str:
    """The learning rate is 0 long before the end.

    Try: --no-anneal-lr, or a slower decay
    Source: 37 details of PPO, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    steps, rates = t.curves.get("charts/learning_rate", (np.zeros(0), np.zeros(0)))
    at = steps[rates <= 1e-3 * rates.max(initial=0.0)][:1]
    late = not len(at) or at[0] > 0.8 * t.total
    return "" if late else f"charts/learning_rate is almost 0 at step {number(at[0])} of {number(t.total)}"


def large_steps(t: Training) -> str:
    """The policy changes too fast: the learning rate is too large.

    The KL divergence of an update, or the fraction of clipped ratios, is far above the usual.
    Try: a smaller --learning-rate, fewer --update-epochs, or --target-kl 0.02
    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html
    """
    found = []
    for name, most, usual in (("approx_kl", LARGE_KL, 0.02), ("clipfrac", LARGE_CLIPFRAC, 0.1)):
        values = t.values(f"losses/{name}")
        if len(values) and (high := np.quantile(values, 0.9)) > most:
            found.append(f"{name} is {number(high)} or more in a tenth of the rows ({usual} is usual)")
    return "; ".join(found)


def no_steps(t: Training) -> str:
    """The policy does not change: there is no gradient, or it is clipped away.

    Try: are all rewards equal? look at --learning-rate, --max-grad-norm and --clip-coef
    Source: 37 details of PPO, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    kl = np.abs(t.values("losses/approx_kl"))
    still = len(kl) and (high := np.quantile(kl, 0.9)) <= 1e-6
    return f"approx_kl is {number(high)} or less in nine tenths of the rows" if still else ""


def _entropies(t: Training) -> tuple[float, float, float] | None:
    """The entropy in the first rows, of the middle and of the end; None if one lacks, or of densities below 0."""
    values = t.values("losses/entropy")
    middle, late = t.values("losses/entropy", begin=0.1, end=0.6), t.values("losses/entropy", begin=0.7)
    if len(values) < 10 or values.min() < 0 or not (len(middle) and len(late)):
        return None
    return float(values[:2].mean()), float(np.median(middle)), float(np.median(late))


def collapsed(t: Training) -> str:
    """The policy has stopped exploring: its entropy collapsed.

    The entropy of a policy with discrete actions is gone early.
    Try: a larger --ent-coef, a smaller learning rate
    Source: 37 details of PPO, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    first, middle, _ = _entropies(t) or (0.0, 1.0, 0.0)
    lost = middle < LITTLE_ENTROPY * first
    return f"losses/entropy is {number(first)} at the start, its median before 60 % {number(middle)}" if lost else ""


def stays_random(t: Training) -> str:
    """The policy stays random: its entropy does not fall.

    Try: a smaller --ent-coef or --alpha, a larger learning rate; look at rewards and observations
    Source: 37 details of PPO, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    first, _, late = _entropies(t) or (1.0, 0.0, 0.0)
    stays = late > MUCH_ENTROPY * first
    return f"losses/entropy is {number(first)} at the start, {number(late)} at the end" if stays else ""


def worthless_values(t: Training) -> str:
    """The values are worse than a constant.

    The value of a state predicts returns worse than a constant does.
    Try: smaller rewards, --no-clip-vloss, a larger --vf-coef; is what the return depends on seen?
    Source: 37 details of PPO, https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    late = t.values("losses/explained_variance", begin=0.5)
    worse = len(late) and (middle := np.median(late)) <= -0.05
    return f"losses/explained_variance has a median of {number(middle)} in the second half" if worse else ""


def _scale(t: Training) -> float:
    """What the script multiplies rewards with before it learns from them; 0 where it changes them otherwise. The metric
    is what it divides them by."""
    divisors, factor = t.values("charts/reward_scale", begin=0.7), real(t.args.get("reward_scale"))
    if len(divisors):
        return 1 / max(float(np.median(divisors)), 1e-8)
    script = t.copy or script_paths().get(re.sub("^(cleanrl|sb3)_", "", t.script))
    return float(not (script and CHANGES.search(read_source(script)))) if factor is None else factor


def _rates(t: Training) -> Array:
    """The mean reward of a step in each training episode, on the scale of the values; empty where this is not known,
    lengths or values are missing, or no discount."""
    returns, lengths, scale = t.values("charts/episodic_return"), t.values("charts/episodic_length"), _scale(t)
    known = scale and len(returns) == len(lengths) and t.gamma < 1 and len(t.values(*VALUES, begin=0.7))
    return scale * returns / lengths.clip(1) if known else np.zeros(0)


def high_values(t: Training) -> str:
    """Q values diverge: they are above the largest possible return.

    Try: a smaller learning rate, two critics (td3, double_dqn), target networks that move more slowly
    Source: van Hasselt et al. 2018, https://arxiv.org/abs/1812.02648
    """
    if not len(rates := _rates(t)):
        return ""
    alpha = t.values("losses/alpha", begin=0.7)
    bonus = 10 * np.median(alpha) if len(alpha) else 0.0  # for entropies
    most = max(0.0, (rates * t.values("charts/episodic_length")).max(), (rates.max() + bonus) / (1 - t.gamma))
    value = np.median(t.values(*VALUES, begin=0.7))
    return f"the mean Q value is {number(value)}, the largest return {number(most)}" if value > 1.5 * most + 1 else ""


def low_values(t: Training) -> str:
    """Q values are far from the returns: the targets do not bootstrap.

    Q values far nearer to 0 than what the policy gets, as where targets do not bootstrap.
    Try: look at the copies of the target network, at (1 - done) in the target, at the scale of rewards
    Source: Mnih et al. 2015, https://doi.org/10.1038/nature14236
    """
    if not len(rates := _rates(t)):
        return ""
    length = max(1, int(t.values("charts/episodic_length")[-len(rates) // 5 :].mean()))
    left = np.arange(1, length + 1)  # steps to the end
    mean = rates[-len(rates) // 5 :].mean() * np.mean((1 - t.gamma**left) / (1 - t.gamma))
    value = np.median(t.values(*VALUES, begin=0.7))
    far = abs(mean) > 2 and value / mean < 0.25
    return f"the mean Q value is {number(value)}, that of discounted returns {number(mean)}" if far else ""


def growing_loss(t: Training) -> str:
    """The loss of the values grows without end.

    Try: a smaller learning rate, smaller rewards
    Source: van Hasselt et al. 2018, https://arxiv.org/abs/1812.02648
    """
    losses = t.values(*LOSSES, begin=0.2, end=0.4), t.values(*LOSSES, begin=0.8)
    early, late = (np.median(values) if len(values) else 0.0 for values in losses)
    grows = len(losses[0]) and late >= GROWTH * max(early, 1.0)
    return f"its median is {number(early)} in the second fifth, {number(late)} in the last" if grows else ""


def large_rewards(t: Training) -> str:
    """The scale of the rewards is too large.

    Rewards of a scale that the loss of a value cannot hold.
    Try: rewards divided by a constant, with gymnasium.wrappers.TransformReward in make_env
    Source: van Hasselt et al. 2016, https://arxiv.org/abs/1602.07714
    """
    loss, returns, lengths = t.values(*LOSSES), t.values("charts/episodic_return"), t.values("charts/episodic_length")
    if not len(loss) or not len(returns) or len(returns) != len(lengths):
        return ""
    reward, loss_ = np.median(np.abs(returns) / lengths.clip(1)), np.median(loss)
    large = reward > LARGE_REWARD and loss_ > LARGE_LOSS
    return f"a step has a reward of {number(reward)}, the loss of the values is {number(loss_)}" if large else ""


def small_buffer(t: Training) -> str:
    """The replay buffer is smaller than an episode.

    Try: a larger --buffer-size
    Source: Mnih et al. 2015, https://doi.org/10.1038/nature14236
    """
    size, lengths = real(t.args.get("buffer_size")), t.values("charts/episodic_length")
    needed = np.median(lengths) * (real(t.args.get("num_envs")) or 1) if len(lengths) else 0.0
    small = size is not None and size < needed
    return f"--buffer-size is {size:g}, the episodes of all environments have {number(needed)}" if small else ""


def keeps_exploring(t: Training) -> str:
    """Most actions are random to the end.

    Try: a smaller --exploration-fraction or --end-e
    Source: Mnih et al. 2015, https://doi.org/10.1038/nature14236
    """
    epsilon = t.values("charts/epsilon")[-1:] if t.steps >= 0.9 * t.total else np.zeros(0)
    return f"charts/epsilon is {number(epsilon[0])} in the end" if len(epsilon) and epsilon[0] > 0.3 else ""


def temperature(t: Training) -> str:
    """The temperature grows without end: the entropy stays below its target.

    Try: smaller rewards, another target entropy
    Source: Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905
    """
    alpha = t.values("losses/alpha")
    grows = len(alpha) > 5 and alpha[-1] > 5 * max(1.0, alpha[0])
    return f"losses/alpha rises from {number(alpha[0])} to {number(alpha[-1])}" if grows else ""


def worse_evaluation(t: Training) -> str:
    """The evaluation is far below the training.

    The greedy policy is far worse than the training episodes, by more than the noise of both.
    Try: does act() see the same observations (normalised, stacked, masked)?
    Source: docs/guides/does_not_learn.md
    """
    scores, returns = t.values("eval/episodic_return", begin=0.6), t.values("charts/episodic_return", begin=0.8)
    stds, episodes = t.values("eval/episodic_return_std", begin=0.6), real(t.args.get("eval_episodes"))
    if len(scores) < 2 or not len(returns) or t.low is None or not len(stds) or not episodes:
        return ""
    score, mean = scores.mean(), returns.mean()
    noise = ERRORS * math.hypot((stds**2).mean() ** 0.5 / episodes**0.5, returns.std() / len(returns) ** 0.5)
    far = mean > t.low and score - t.low < 0.4 * (mean - t.low) and mean - score > noise
    return f"{number(score)} in evaluations, {number(mean)} in training, {number(t.low)} at random" if far else ""


def fell(t: Training) -> str:
    """What was learned was lost again.

    Try: a smaller or falling learning rate; model.safetensors is of the best evaluation
    Source: van Hasselt et al. 2018, https://arxiv.org/abs/1812.02648
    """
    scores, known = t.values("eval/episodic_return"), reference(t.env_id)
    if len(scores) < 5 or t.low is None:
        return ""
    best, last = scores.max(), scores[-2:].mean()
    little = known is not None and best - t.low < 0.3 * (known[1] - known[0])
    lost = best > t.low and not little and last - t.low < 0.5 * (best - t.low)
    return f"the best evaluation is {number(best)}, the mean of the last two {number(last)}" if lost else ""


def never_left(t: Training) -> str:
    """The return never left that of random actions.

    Try: a task that the file solves; if random actions never find a reward, a file that explores
    Source: docs/guides/does_not_learn.md
    """
    returns, known = t.values("charts/episodic_return"), reference(t.env_id)
    if len(returns) < 20 or t.low is None or t.score is None:
        return ""
    noise, little = ERRORS * returns[:20].std() / 20**0.5, 0.05 * (known[1] - known[0]) if known else 0.0
    left = max(t.score, returns[-len(returns) // 5 :].mean()) > t.low + max(noise, little)
    return "" if left else f"the score is {number(t.score)}, random actions have {number(t.low)}"


def told_by(rule: Callable[[Training], str]) -> tuple[str, str, str]:
    """Likely cause, remedy and source, out of the docstring of a rule."""
    what, _, more = (rule.__doc__ or "").partition(".\n\n")
    remedy, source = more.partition("Try: ")[2].split("Source: ")
    return what, " ".join(remedy.split()), " ".join(source.split())


CAUSES_FIRST = (
    diverged, broke_off, no_update, changed_script, far_from_default, large_rewards, high_values, low_values,
    rate_at_zero, large_steps, no_steps, collapsed, stays_random, worthless_values, growing_loss, small_buffer,
    keeps_exploring, temperature, worse_evaluation, fell, never_left,
)  # fmt: skip
RULES = tuple((rule, *told_by(rule)) for rule in CAUSES_FIRST)


def examine(training: Training) -> list[Finding]:
    """What looks wrong, causes before effects; nothing in a training that has solved its task and did not break off."""
    if training.is_solved and not training.status.startswith(("diverged", "failed", "killed")):
        return []
    return [Finding(what, seen, remedy, by) for rule, what, remedy, by in RULES if (seen := rule(training))]


def disagreement(seeds: Sequence[Training]) -> list[Finding]:
    """Three or more seeds of one method whose scores differ by half of what the best has gained."""
    scores = sorted(t.score for t in seeds if t.score is not None and not diverged(t))
    low = min((t.low for t in seeds if t.low is not None), default=math.inf)
    if len(scores) < 3 or not 0 < scores[-1] - low <= 2 * (scores[-1] - scores[0]):
        return []
    remedy = "more seeds before any conclusion, and intervals (solo report)"
    source = "Agarwal et al. 2021, https://arxiv.org/abs/2108.13264"
    return [Finding("The seeds disagree", f"scores {', '.join(map(number, scores))}", remedy, source)]
