"""The page of a model repository: README.md with the metadata that leaderboards and viewers of the hub read.

Every number on it is one that the run has logged.
"""

import ast
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from solorl.errors import UsageError
from solorl.files import read_json
from solorl.runfolder import Row, read_rows
from solorl.scripts import header_fields

MOST_ROWS = 20  # of the table of evaluations
SCORE, STD, LENGTH = "eval/episodic_return", "eval/episodic_return_std", "eval/episodic_length"


@dataclass(frozen=True)
class Facts:
    """What the card says of a run."""

    script: str  # ppo.py
    args: dict[str, Any]
    config: dict[str, Any]
    status: str  # finished, stopped, ...
    rows: Sequence[Row]  # those of metrics.jsonl that are of an evaluation, the last one last
    model: dict[str, str]  # what model.safetensors says of itself

    @property
    def algorithm(self) -> str:
        """The name of the script without its ending."""
        return Path(self.script).stem

    @property
    def env_id(self) -> str:
        """The environment; "unknown" for a script that has no argument of this name."""
        return str(self.args.get("env_id", "unknown"))

    @property
    def final(self) -> Row:
        """The last evaluation."""
        return self.rows[-1]

    @property
    def mean_reward(self) -> str:
        """The last evaluation as leaderboards read it."""
        return f"{self.final[SCORE]:.2f} +/- {self.final[STD]:.2f}"


def facts_of(run_dir: Path) -> Facts:
    """What config.json, status.json, metrics.jsonl and model.safetensors say. UsageError for a run without a model or
    without an evaluation."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(run_dir / "model.safetensors", "np") as file:
            model = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{run_dir} has no model.safetensors that can be read ({error})") from None
    config = read_json(run_dir / "config.json")
    try:
        rows = read_rows(run_dir / "metrics.jsonl", key=SCORE)[0]
    except OSError:
        rows = []
    rows = [row for row in rows if all(isinstance(row.get(name), int | float) for name in (SCORE, STD, "global_step"))]
    if not rows:
        raise UsageError(f"{run_dir} has no evaluation yet, so there is no score to publish; train it to its end")
    args = config.get("args")
    status = str(read_json(run_dir / "status.json").get("status", "unknown")).partition(":")[0]
    return Facts(str(config.get("script")), args if isinstance(args, dict) else {}, config, status, rows, model)


def results(facts: Facts) -> dict[str, Any]:
    """The numbers of the last evaluation, under the names that other libraries give them."""
    return {
        "mean_reward": facts.final[SCORE],
        "std_reward": facts.final[STD],
        "is_deterministic": True,
        "n_eval_episodes": facts.final.get("eval/episodes", facts.args.get("eval_episodes")),
        "global_step": facts.final["global_step"],
    }


def card(facts: Facts, repo: str, source: str, files: Sequence[str]) -> str:
    """README.md of the repository `repo`, which has these `files`; `source` is the text of the script."""
    return f"---\n{_metadata(facts)}\n---\n{_text(facts, repo, source, files)}"


def _metadata(facts: Facts) -> str:
    """The YAML block at the top of the card."""
    from huggingface_hub import EvalResult, ModelCardData

    score = EvalResult(
        task_type="reinforcement-learning",
        task_name="reinforcement-learning",
        dataset_type=facts.env_id,
        dataset_name=facts.env_id,
        metric_type="mean_reward",
        metric_name="mean_reward",
        metric_value=facts.mean_reward,
        verified=False,
    )
    tags = [facts.env_id, "deep-reinforcement-learning", "reinforcement-learning", "solorl", facts.algorithm]
    data = ModelCardData(library_name="solorl", tags=tags, model_name=facts.algorithm, eval_results=[score])
    return data.to_yaml()


def _text(facts: Facts, repo: str, source: str, files: Sequence[str]) -> str:
    """The card below its metadata."""
    name = repo.rpartition("/")[2]
    title, paper = _header(source)
    parts = [
        f"# {facts.algorithm} on {facts.env_id}",
        f"{title} Trained with SoloRL; the whole algorithm is the file [`{facts.script}`]({facts.script}).",
        f"Paper: {paper}" if paper else "",
        "## Use it",
        f"```bash\npip install 'solorl[hub]'\nsolo play hf://{repo}\nsolo pull {repo} {name}\n```",
        f'```python\nimport solorl\n\npolicy = solorl.load("{name}")  # the folder that `solo pull` has made\n```',
        "## Evaluation",
        _scores(facts, files),
        _table(facts),
        "![learning curve](learning_curve.png)" if "learning_curve.png" in files else "",
        "## Training",
        _training(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _header(source: str) -> tuple[str, str]:
    """The first sentence of a script's docstring and the line `Paper` of its header; empty where there is none."""
    try:
        text = ast.get_docstring(ast.parse(source), clean=False) or ""
    except (SyntaxError, ValueError):
        return "", ""
    return text.strip().partition("\n")[0], header_fields(text).get("Paper", "")


def _scores(facts: Facts, files: Sequence[str]) -> str:
    """What the models in the repository have scored."""
    episodes = results(facts)["n_eval_episodes"] or "?"
    what = f"over {episodes} greedy episodes, on seeds that the training did not use"
    lines = [f"Last evaluation, at step {facts.final['global_step']:,.0f}: mean return **{facts.mean_reward}** {what}."]
    if "model_last.safetensors" in files:
        lines.append("`model_last.safetensors` has these weights.")
    with contextlib.suppress(KeyError, ValueError):  # somebody else's model file may say other things
        step, score = int(facts.model["step"]), float(facts.model[SCORE])
        lines.append(
            f"`model.safetensors` has those of the best of {len(facts.rows)} evaluations, {score:.2f} at step {step:,}"
            "; the best of several is an optimistic estimate."
        )
    if facts.status != "finished":
        lines.append(f"The training did not come to its end; its status is {facts.status}.")
    return "\n".join(lines)


def _table(facts: Facts) -> str:
    """The evaluations, at most MOST_ROWS of them: evenly spaced, with the first and the last."""
    last, count = len(facts.rows) - 1, min(len(facts.rows), MOST_ROWS)
    shown = [facts.rows[round(i * last / max(1, count - 1))] for i in range(count - 1)] + [facts.final]
    lines = ["| step | mean return | standard deviation | mean length |", "|---:|---:|---:|---:|"]
    for row in shown:
        length = f"{row[LENGTH]:.1f}" if LENGTH in row else ""
        lines.append(f"| {row['global_step']:,.0f} | {row[SCORE]:.2f} | {row[STD]:.2f} | {length} |")
    note = f"\n\n{count} of {last + 1} evaluations; all are in `metrics.jsonl`." if count <= last else ""
    return "\n".join(lines) + note


def _training(facts: Facts) -> str:
    """The arguments and circumstances of the run."""
    about = {"started": facts.config.get("started"), "python": facts.config.get("python")}
    for group in ("versions", "machine"):
        found = facts.config.get(group)
        about |= found if isinstance(found, dict) else {}
    return "\n".join(
        [
            f"```json\n{json.dumps(facts.args, indent=2)}\n```",
            "",
            "| | |",
            "|---|---|",
            *(f"| {_cell(name)} | {_cell(value)} |" for name, value in about.items() if value is not None),
        ]
    )


def _cell(value: Any) -> str:
    """A value as a cell of a table of Markdown."""
    return " ".join(str(value).replace("|", "\\|").split())
