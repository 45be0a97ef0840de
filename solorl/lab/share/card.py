"""The page of a model repository: README.md with the metadata that leaderboards and viewers of the hub read.

Every number on it is one that the run has logged.
"""

import ast
import contextlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solorl import runfolder
from solorl.errors import UsageError, refuse
from solorl.lab.results.text import table
from solorl.scripts import header_fields

MOST_ROWS = 20  # of the table of evaluations
SCORE, STD, LENGTH = "eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length"


@dataclass(frozen=True)
class Facts:
    """What the card says of a run."""

    config: dict[str, Any]
    status: str  # finished, stopped, ...
    rows: list[runfolder.Row]  # those of metrics.jsonl that are of an evaluation, the last one last
    model: dict[str, str]  # what model.safetensors says of itself

    @property
    def algorithm(self) -> str:
        """The name of the script without its ending."""
        return Path(self.config["script"]).stem

    @property
    def env_id(self) -> str:
        """The environment; "unknown" for a script that has no argument of this name."""
        return str(self.config["args"].get("env_id", "unknown"))

    @property
    def mean_reward(self) -> str:
        """The last evaluation as leaderboards read it."""
        return f"{self.rows[-1][SCORE]:.2f} +/- {self.rows[-1][STD]:.2f}"

    @property
    def results(self) -> dict[str, Any]:
        """The numbers of the last evaluation, under the names that other libraries give them."""
        final = self.rows[-1]
        episodes = final.get("eval/episodes", self.config["args"].get("eval_episodes"))
        numbers = {"mean_reward": final[SCORE], "std_reward": final[STD], "is_deterministic": True}
        return numbers | {"n_eval_episodes": episodes, "global_step": final["global_step"]}


def facts_of(run_dir: Path) -> Facts:
    """What a run folder says. UsageError for a run without a model or without an evaluation."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(run_dir / runfolder.MODEL, "np") as file:
            model = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{run_dir} has no {runfolder.MODEL} that can be read ({error})") from None
    rows = runfolder.rows_of(run_dir / runfolder.METRICS, key=SCORE)
    rows = [row for row in rows if all(isinstance(row.get(name), int | float) for name in (SCORE, STD, "global_step"))]
    refuse(not rows, f"{run_dir} has no evaluation yet, so there is no score to publish; train it to its end")
    config = runfolder.config_of(run_dir) | {"args": runfolder.args_of(run_dir)}
    return Facts(config, str(runfolder.status_of(run_dir).get("status", "unknown")).partition(":")[0], rows, model)


def card(facts: Facts, repo: str, source: str, files: Collection[str]) -> str:
    """README.md of the repository `repo`, which has these `files`; `source` is the text of the script."""
    text = ""
    with contextlib.suppress(SyntaxError, ValueError):
        text = ast.get_docstring(ast.parse(source), clean=False) or ""
    title, paper = text.strip().partition("\n")[0], header_fields(text).get("Paper", "")
    name, script = repo.rpartition("/")[2], facts.config["script"]
    parts = [
        f"---\n{_metadata(facts)}\n---\n# {facts.algorithm} on {facts.env_id}",
        f"{title} Trained with SoloRL; the whole algorithm is the file [`{script}`]({script}).",
        f"Paper: {paper}" if paper else "",
        f"## Use it\n\n```bash\npip install 'solorl[hub]'\nsolo play hf://{repo}\nsolo pull {repo} {name}\n```",
        f'```python\nimport solorl\n\npolicy = solorl.load("{name}")  # the folder that `solo pull` has made\n```',
        f"## Evaluation\n\n{_scores(facts, files)}",
        _table(facts.rows),
        f"![learning curve]({runfolder.PICTURE})" if runfolder.PICTURE in files else "",
        f"## Training\n\n```json\n{json.dumps(facts.config['args'], indent=2)}\n```",
        _about(facts.config),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(facts: Facts) -> str:
    """The YAML block at the top of the card."""
    from huggingface_hub import EvalResult, ModelCardData

    kind, env = "reinforcement-learning", facts.env_id
    score = EvalResult(kind, env, env, "mean_reward", facts.mean_reward, task_name=kind, metric_name="mean_reward")
    tags = [env, "deep-reinforcement-learning", kind, "solorl", facts.algorithm]
    return ModelCardData(library_name="solorl", tags=tags, model_name=facts.algorithm, eval_results=[score]).to_yaml()


def _scores(facts: Facts, files: Collection[str]) -> str:
    """What the models in the repository have scored."""
    found, episodes = facts.results, facts.results["n_eval_episodes"] or "?"
    what = f"over {episodes} greedy episodes, on seeds that the training did not use"
    lines = [f"Last evaluation, at step {found['global_step']:,.0f}: mean return **{facts.mean_reward}** {what}."]
    if "model_last.safetensors" in files:
        lines.append("`model_last.safetensors` has these weights.")
    with contextlib.suppress(KeyError, ValueError):  # somebody else's model file may say other things
        step, score = int(facts.model["step"]), float(facts.model[SCORE])
        best = f"those of the best of {len(facts.rows)} evaluations, {score:.2f} at step {step:,}"
        lines.append(f"`{runfolder.MODEL}` has {best}; the best of several is an optimistic estimate.")
    if facts.status != "finished":
        lines.append(f"The training did not come to its end; its status is {facts.status}.")
    return "\n".join(lines)


def _table(rows: list[runfolder.Row]) -> str:
    """The evaluations, at most MOST_ROWS of them: evenly spaced, with the first and the last."""
    count = min(len(rows), MOST_ROWS)
    shown = [rows[round(i * (len(rows) - 1) / max(1, count - 1))] for i in range(count)]
    cells = [[f"{row['global_step']:,.0f}", f"{row[SCORE]:.2f}", f"{row[STD]:.2f}",
              f"{row[LENGTH]:.1f}" if LENGTH in row else ""] for row in shown[:-1] + rows[-1:]]  # fmt: skip
    note = f"\n{count} of {len(rows)} evaluations; all are in `metrics.jsonl`." if count < len(rows) else ""
    return table(["step", "mean return", "standard deviation", "mean length"], cells, left=0) + note


def _about(config: dict[str, Any]) -> str:
    """The circumstances of the run as a table."""
    about = {"started": config.get("started"), "python": config.get("python")}
    for group in ("versions", "machine"):
        found = config.get(group)
        about |= found if isinstance(found, dict) else {}
    cells = [[" ".join(str(x).split()) for x in pair] for pair in about.items() if pair[1] is not None]
    return table(["", ""], cells, left=2)
