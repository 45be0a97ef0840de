"""The table "Can I use?" on the page of each algorithm file, made from the header and the source of the file."""

import ast
import re
from pathlib import Path

from solorl.catalog.header import definitions, fields_of, parse_source
from solorl.scripts import facts_of, not_for

HEADING, NEXT = "## Can I use?\n", "## Implementation details\n"
OBSERVATIONS = {"vector": "vectors", "image": "images", "dict": "`Dict`"}
ACTIONS = {
    "discrete": "`Discrete`", "continuous": "`Box`", "multidiscrete": "`MultiDiscrete`", "tuple": "`Tuple`",
}  # fmt: skip
# What the header's Spaces says after a comma -> what the row of observations says.
SEEN = {
    "one frame": ", one frame", "vectors and images": " of vectors and images", "with goals": " with goals",
    "batches of tensors": " in batches of tensors", "text": ": the tokens of a prompt",
    "with MinAtar's planes": ": MinAtar's planes",
}  # fmt: skip
EXPORT = {"torch": "ONNX", "jax": "StableHLO"}


def parameters_of_policy(tree):
    """The parameters of the function that the file hands to `run.close`: its policy."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "run.close"]
    name = ast.unparse(calls[0].args[0]).rpartition(".")[2]
    bodies = [tree, *(node for node in definitions(tree).values() if isinstance(node, ast.ClassDef))]
    found = [definitions(body)[name] for body in bodies if name in definitions(body)]
    return {each.arg for function in found for each in function.args.args}


def resuming(script, tree, kind):
    """What `--resume` continues: exactly, where environments can be brought back and all that changes is saved."""
    if "run.place(" in ast.unparse(tree):
        return "yes; exact with `--synchronous --save-replay`"
    replay = any(isinstance(node, ast.ClassDef) and "inserted" in ast.unparse(node) for node in tree.body)
    if kind.startswith("envpool"):
        return "yes; running episodes begin again" + "; `--save-replay` keeps the replay buffer" * replay
    if kind == "batched":
        return "yes; exact if the simulator can be saved, else with new episodes"
    if kind == "jax" and "MinAtar" not in script.spaces:
        return "yes; exact with environments in JAX, with new episodes in those of EnvPool"
    return "yes; exact" + " with `--save-replay`, which keeps the replay buffer" * replay


def uses(script):
    """What a file can be used for: (what, answer) for each row of the table."""
    tree, facts = parse_source(script.path), facts_of(script.path)
    fields, policy = fields_of(tree), parameters_of_policy(tree)
    observations, actions = OBSERVATIONS[script.observations], ACTIONS[script.actions]
    masks = "on a board" if facts.env_kind == "jax" else 'yes, if there is an `info["action_mask"]`'
    for words in script.spaces.split(", ")[1:]:
        if words in SEEN:
            observations += SEEN[words]
        elif words == 'with info["action_mask"]':
            masks = 'required: `info["action_mask"]`'
        else:
            kind = words.removeprefix("or ")
            actions += f" or {ACTIONS[kind]}" if kind in ACTIONS else f", {words}"
    count = next((each for each in ("num_envs", "num_actors", "num_prompts") if each in fields), None)
    several = "the data set takes their place" if "dataset" in fields else "no: one environment"
    if count:
        several = f"yes: `--{count.replace('_', '-')}`, by default {ast.unparse(fields[count].value)}"
    unfit = [
        words for words, unfit in {
            "several spaces": {script.observations, script.actions} & {"dict", "tuple"},
            "masks": "action_mask" in policy,
        }.items() if unfit
    ]  # fmt: skip
    return {
        "observations": observations,
        "actions": actions,
        "memory": "yes" if "state" in policy else "no",
        "action masks": masks if "action_mask" in policy else "no",
        "several environments": several,
        "resume": resuming(script, tree, facts.env_kind),
        "export": f"no: {' and '.join(unfit)}" if unfit else f"yes: {EXPORT[script.framework]}",
        **{what: f"no: [`{file}`]({Path(file).stem}.md)" for what, file in not_for(script.fields).items()},
    }


def with_uses(page, script):
    """An algorithm's page with the part "Can I use?" above its implementation details."""
    table = "\n".join(f"| {what} | {answer} |" for what, answer in uses(script).items())
    page = re.sub(rf"^{re.escape(HEADING)}.*?(?=^## )", "", page, flags=re.M | re.S)
    return page.replace(f"\n{NEXT}", f"\n{HEADING}\n| what | answer |\n|---|---|\n{table}\n\n{NEXT}", 1)
