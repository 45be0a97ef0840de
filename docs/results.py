"""Makes the generated parts of all pages from the data: tables and curves of results, tables of speed, the table of
algorithms, sizes and core-hours on the pages of the families, on the page of each algorithm file its curve and what it
can be used for, and the report.

python docs/results.py
"""

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from solorl.catalog.header import scripts
from solorl.lab.results import comparison as cmp
from solorl.lab.results import curves as cv
from solorl.lab.results.read import read_all
from tools import budget

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "docs")]
import core_hours  # noqa: E402
import pages  # noqa: E402

RESULTS, SPEED, ALGORITHMS, PROOF = "docs/results.md", "docs/speed.md", "algorithms/README.md", "docs/proof.md"
FAMILIES = "ppo dqn actor_critic pqn multi_agent offline goals streaming evolution imitation language planning".split()
LOGS = [f"docs/results/{family}.md" for family in FAMILIES]
PPO, DQN, ACTOR_CRITIC, PQN, MULTI_AGENT, OFFLINE, GOALS, STREAMING, _, IMITATION, LANGUAGE, PLANNING = LOGS
CLASSIC, JAX = "benchmark/results/classic", "benchmark/results/jax"
CONTINUOUS, OFF_POLICY_RUNS = "benchmark/results/ppo_continuous", "benchmark/results/actor_critic"
NAME = "ppo_continuous_action"
PPO_CONTINUOUS = f"{NAME} '{NAME} tuned' rpo_continuous_action {NAME}_jax '{NAME}_jax tuned'"
LANDER = "ppo 'ppo unclipped' 'ppo zoo settings' sb3_ppo ppo_jax 'ppo_jax unclipped'"
DQNS = "dqn dqn_jax c51 c51_jax double_dqn dueling_dqn d3qn ez_greedy_dqn"
LONG = "BipedalWalker-v3 HalfCheetah-v5 Hopper-v5 LunarLanderContinuous-v3"
HALFCHEETAH, HOPPER, PENDULUM = (f"--env-ids {env} --methods" for env in "HalfCheetah-v5 Hopper-v5 Pendulum-v1".split())
SHORT = " ".join(f"'{name} medium short'" for name in ("bc", "td3_bc", "iql", "awac", "rebrac"))
NEWER = "'bc medium newer short' 'td3_bc medium newer short' 'fql medium newer short'"
# What learned from the same data, by marker.
DATA_SETS = {
    "medium": f"{HALFCHEETAH} 'bc medium' 'td3_bc medium'",
    "medium-newer-short": f"{HALFCHEETAH} {NEWER}",
    "medium-short": f"{HALFCHEETAH} {SHORT} --baseline 'bc medium short'",
    "medium-replay-short": f"{HALFCHEETAH} 'bc medium-replay short' 'td3_bc medium-replay short'",
    "medium-expert": f"{HALFCHEETAH} 'bc medium-expert short' 'bc medium-expert top short'",
    "hopper-medium": f"{HOPPER} 'bc medium'",
    "hopper-medium-replay": f"{HOPPER} 'bc medium-replay' 'bc medium-replay top' 'iql medium-replay'",
    "cartpole": "--env-ids CartPole-v1 --methods 'bc medium-replay' 'iql_discrete medium-replay'",
    "cql": f"{HALFCHEETAH} 'cql medium early'",
    "transformer": f"{HALFCHEETAH} 'decision_transformer medium-replay early'",
    "cal-ql": f"{HOPPER} 'cal_ql medium-replay early'",
}
IMITATORS = "'dagger 5 episodes' 'gail 5 episodes' 'airl 5 episodes' 'gail no discriminator'"
NUMBERS = ("1 episode", "5 episodes", "25 episodes")
SECOND = " ".join(f"'{name} {number} of expert 2'" for number in NUMBERS for name in ("bc", "dagger"))
BOTH = "benchmark/results/imitation benchmark/results/offline --env-ids"
TEAMS = "benchmark/results/teams --env-ids"
OFF_POLICY = "ddpg_continuous_action td3_continuous_action sac_continuous_action"
OFF_POLICY_JAX = OFF_POLICY.replace("action", "action_jax")

# page, its markers, words of `solo report`
TABLES = [
    (RESULTS, "classic", CLASSIC),
    (RESULTS, "jax", f"{JAX} --baseline ppo_jax"),
    (PPO, "results", f"{CLASSIC} {JAX} --methods ppo ppo_jax sb3_ppo"),
    (PPO, "mountaincar", "benchmark/results/mountaincar"),
    (PPO, "lunarlander", f"{JAX} {CLASSIC} --env-ids LunarLander-v3 --methods {LANDER}"),
    (PPO, "unclipped", f"{JAX} --env-ids CartPole-v1 Acrobot-v1 --methods ppo_jax 'ppo_jax unclipped'"),
    (PPO, "unclipped-pendulum", f"{JAX} --env-ids Pendulum-v1 --methods {NAME}_jax '{NAME}_jax unclipped'"),
    (PPO, "pendulum", f"{CONTINUOUS} {JAX} {PENDULUM} {NAME} rpo_continuous_action {NAME}_jax"),
    (PPO, "halfcheetah", f"{CONTINUOUS} {JAX} --env-ids HalfCheetah-v5 --methods {PPO_CONTINUOUS}"),
    (PPO, "minatar", "benchmark/results/minatar --methods ppo_jax ppo_minatar_jax 'rejax_gymnax ppo'"),
    (PPO, "minatar-looks", "benchmark/results/minatar_looks --methods ppo_jax ppo_minatar_jax"),
    (PPO, "atari", "benchmark/results/atari --methods 'ppo_atari_envpool budget'"),
    (PPO, "mujoco", f"{CONTINUOUS} --methods '{NAME} mujoco'"),
    (DQN, "results", f"benchmark/results/dqn {JAX} --methods {DQNS}"),
    (DQN, "minatar", "benchmark/results/minatar --methods dqn_jax"),
    (PQN, "cartpole", "benchmark/results/pqn"),
    (PQN, "minatar", "benchmark/results/minatar --methods pqn_jax 'rejax_gymnax pqn'"),
    (PQN, "atari", "benchmark/results/atari --methods 'pqn_atari_envpool budget'"),
    (ACTOR_CRITIC, "results", f"{OFF_POLICY_RUNS} {JAX} {PENDULUM} {OFF_POLICY} {OFF_POLICY_JAX}"),
    (ACTOR_CRITIC, "long", f"{OFF_POLICY_RUNS} {JAX} --env-ids {LONG} --methods {OFF_POLICY} {OFF_POLICY_JAX}"),
    (ACTOR_CRITIC, "discrete", f"{OFF_POLICY_RUNS} --methods sac_discrete"),
    (ACTOR_CRITIC, "modern", "benchmark/results/modern --env-ids Pendulum-v1 Hopper-v5"),
    (ACTOR_CRITIC, "elegantrl", "benchmark/results/elegantrl --baseline 'inter_sac whole'"),
    (MULTI_AGENT, "team-games", "benchmark/results/team_games"),
    (MULTI_AGENT, "pairs", f"{TEAMS} team/climbing team/penalty --baseline vdn"),
    (MULTI_AGENT, "particles", f"{TEAMS} team/simple_spread_v3 --baseline mappo"),
    (MULTI_AGENT, "speaker-listener", f"{TEAMS} team/simple_speaker_listener_v4 --baseline 'maddpg single'"),
    (MULTI_AGENT, "tag", f"{TEAMS} team/simple_tag_v3 --baseline 'maddpg single'"),
    (MULTI_AGENT, "foraging", "benchmark/results/foraging --baseline vdn"),
    (GOALS, "bit-flipping", "benchmark/results/goals --env-ids games/BitFlip15-v0 --baseline 'dqn_her plain'"),
    (IMITATION, "cartpole", f"{BOTH} CartPole-v1 --baseline 'bc 5 episodes' --methods 'bc 5 episodes' {IMITATORS}"),
    (IMITATION, "hopper", f"{BOTH} Hopper-v5 --methods 'bc 25 episodes' 'dagger 25 episodes' 'gail 25 episodes'"),
    (IMITATION, "episodes", f"{BOTH} Hopper-v5 --methods {SECOND}"),
    (LANGUAGE, "reverse", "benchmark/results/language --env-ids text/reverse-8"),
    (PLANNING, "tic-tac-toe", "benchmark/results/planning --env-ids games/TicTacToe-v0"),
    (PLANNING, "cartpole", "benchmark/results/planning --env-ids CartPole-v1"),
    (GOALS, "arm", "benchmark/results/goals --env-ids games/FetchReach-v4"),
    (GOALS, "point", "benchmark/results/goals --env-ids games/PointReach-v0 --baseline 'sac_her plain'"),
    *((OFFLINE, marker, f"benchmark/results/offline {words}") for marker, words in DATA_SETS.items()),
]

# page, its markers, module in benchmark, its data in benchmark/results/speed
SPEEDS = [
    (SPEED, "ppo", "ppo_speed", "ppo"),
    (SPEED, "jax", "jax_speed", "jax"),
    (SPEED, "atari", "atari_speed", "atari"),
    (SPEED, "gpu", "gpu.speed", "gpu"),
    (PPO, "speed", "ppo_speed", "ppo_halfcheetah"),
    (PPO, "contrib", "contrib_speed", "contrib"),
    (PPO, "wide", "jax_speed", "jax_wide"),
    (PPO, "rejax", "jax_speed", "jax_rejax"),
    (PPO, "start", "jax_start", "jax_start"),
    (DQN, "speed", "dqn_speed", "dqn"),
    (ACTOR_CRITIC, "speed", "actor_critic_speed", "actor_critic"),
    (ACTOR_CRITIC, "jax-speed", "jax_speed", "jax_actor_critic"),
    (ACTOR_CRITIC, "modern-speed", "modern_speed", "modern"),
    (ACTOR_CRITIC, "parallel-speed", "parallel_speed", "parallel"),
    (MULTI_AGENT, "speed", "teams_speed", "teams"),
    (OFFLINE, "speed", "offline_speed", "offline"),
    (STREAMING, "speed", "streaming_speed", "streaming"),
]

# Page with results of a family -> the folders of its runs in benchmark/results
RUNS = {
    PPO: ["classic", "jax", "mountaincar", "ppo_continuous", "minatar", "minatar_looks", "atari", "modern"],
    DQN: ["dqn", "jax", "minatar", "modern", "dqn_variants"],
    ACTOR_CRITIC: ["actor_critic", "jax", "modern", "elegantrl"],
    PQN: ["pqn", "minatar", "atari"],
    MULTI_AGENT: ["team_games", "teams", "foraging"],
    OFFLINE: ["offline"],
    **{f"docs/results/{family}.md": [family] for family in FAMILIES[6:]},
}

# Folders with the runs of files that have none in those of their family, finished or not.
ELSEWHERE = ["games", "qdagger", "atari", "stopped"]
MOST_TASKS, MOST_METHODS = 6, 7  # in the picture of a family


REPORT = ["report", CLASSIC, "--out", "benchmark/reports/classic", "--title", "PPO, here and in Stable-Baselines3"]


def speed(module, data):
    """The Markdown table that a benchmark makes of its data; a sentence where it has not been run."""
    path = ROOT / f"benchmark/results/speed/{data}.json"
    return importlib.import_module(module).table(path) if path.exists() else "Not measured yet."


@lru_cache
def proof():
    """(page, marker) -> text, of PROOF and of its sums in README."""
    made = importlib.import_module("proof")
    sums, rows = made.tables(scripts(), made.rows(ROOT / "benchmark/results", made.History().is_current))
    return {("README.md", "proof"): sums, (PROOF, "sums"): sums, (PROOF, "proof"): rows}


def relatives(names):
    """The cell of a file without a parent: the files that it is near to, "–" for a root."""
    return f"relatives: `{'`, `'.join(names)}`" if names else "–"


def algorithms():
    """A table for each family, from the headers of its files."""
    parts = []
    for family in dict.fromkeys(script.family for script in scripts()):
        files = [script for script in scripts() if script.family == family]
        title = (ROOT / f"algorithms/{family}/README.md").read_text().partition("\n")[0].removeprefix("# ")
        lines = [f"## [{title}]({family}/README.md)", ""]
        lines += ["| file | what it is | observations → actions | from | paper |", "|---|---|---|---|---|"]
        for script in in_order(files):
            what = re.split(r"[,;] (?:discrete|continuous|vector|image|in JAX)", script.title.rstrip("."))[0]
            what = what.rstrip(";,") + (", in JAX" if script.framework == "jax" else "")
            paper = re.sub(r"^(.*?),? (https?://[^\s;]+).*", r"[\1](\2)", script.fields["Paper"])
            near = [Path(each).stem for each in script.relatives]
            parents = " and ".join(f"`{Path(each).stem}`" for each in script.parents) or relatives(near)
            spaces = script.spaces.replace("->", "→")
            lines.append(f"| [`{script.name}`]({family}/{script.name}.py) | {what} | {spaces} | {parents} | {paper} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def in_order(files):
    """Scripts of one family in the order of the table on its page."""
    page = (files[0].path.parent / "README.md").read_text()
    return sorted(files, key=lambda script: page.index(f"[`{script.path.name}`]"))


def runs_of(log):
    """The results of a family: those of its folders that one of its files or its peer made, by folder."""
    family = Path(log).stem
    names = {script.name for script in scripts() if script.family == family} | {f"sb3_{family}"}
    found = {folder: read_all([ROOT / "benchmark/results" / folder])[0] for folder in RUNS[log]}
    return {folder: [run for run in runs if run.script in names] for folder, runs in found.items()}


def measured(log):
    """When and where the runs of a family were made, a row for each folder."""
    lines = ["| data | runs | started | machine | software |", "|---|---:|---|---|---|"]
    for folder, runs in (each for each in runs_of(log).items() if each[1]):
        days = sorted({run.started[:10] for run in runs})
        machines = sorted({f"{run.machine['cpu']}, {run.machine['cores']} cores" for run in runs})
        packages = ("stable-baselines3", "gymnasium", "torch", "jax")
        software = {f"{name} {run.versions[name]}" for run in runs for name in packages if name in run.versions}
        software |= {f"Python {run.python}" for run in runs}
        place = Path(os.path.relpath(ROOT / "benchmark/results" / folder, (ROOT / log).parent)).as_posix()
        cells = [f"[`{folder}`]({place})", str(len(runs)), " to ".join([days[0], *days[1:][-1:]])]
        lines.append(f"| {' | '.join([*cells, '; '.join(machines), ', '.join(sorted(software))])} |")
    return "\n".join(lines)


def qdagger():
    """Evaluations of the student and of scratch on the pixel probe, by steps of their own: the student's first 1,000
    are the teacher's and those of learning from them. An evaluation comes with the next of their iterations of 4."""
    runs, _ = read_all([ROOT / "benchmark/results/qdagger"])
    every, columns = 250, range(0, 1001, 250)
    lines = [f"| method | seed | {' | '.join(map(str, columns))} |", "|---|---:|" + "---:|" * len(columns)]
    for run in sorted(runs, key=lambda run: (run.variant != "student", run.seed)):
        before = 1000 if run.variant == "student" else 0
        steps = [(step - before) // every * every for step in run.eval["global_step"]]
        scores = {step: f"{mean:.1f}" for step, mean in zip(steps, run.eval["mean"], strict=True)}
        if run.variant != "teacher":
            lines.append(f"| `{run.script}` | {run.seed} | {' | '.join(scores.get(step, '–') for step in columns)} |")
    return "\n".join(lines)


def with_data(run):
    """An offline run whose data set, the first word of its variant or `5 episodes`, is part of its environment."""
    data, rest = re.fullmatch(r"(\d+ episodes|\S*) ?(.*)", run.variant).groups()
    return replace(run, env_id=f"{run.env_id}, {data}", variant=rest, method=f"{run.script} {rest}".strip())


def as_long(runs, script):
    """Of each method on each environment the runs of one number of steps: as many as the longest runs of `script` there
    have, else the next larger number, else the largest."""
    own, lengths = {}, {}
    for run in runs:
        steps = run.args["total_timesteps"]
        lengths.setdefault((run.name, run.env_id), set()).add(steps)
        if run.script == script:
            own[run.env_id] = max(steps, own.get(run.env_id, 0))
    kept = {(*key, min((n for n in each if n >= own[key[1]]), default=max(each))) for key, each in lengths.items()}
    return [run for run in runs if (run.name, run.env_id, run.args["total_timesteps"]) in kept]


@lru_cache
def elsewhere():
    """The runs in ELSEWHERE, each folder with names of its own."""
    folders = [ROOT / "benchmark/results" / folder for folder in ELSEWHERE]
    return [run for folder in folders for run in read_all([folder], unfinished=True)[0]]


def families():
    """Picture of a family -> its methods with most seeds (all, where only one has as many) on the tasks that most of
    them share."""
    found = {}
    for log in RUNS:
        runs = [with_data(run) if log == OFFLINE else run for each in runs_of(log).values() for run in each]
        if not runs:
            continue
        groups = cmp.grouped(runs)
        least = max(min(5, len(group)) for group in groups.values())  # seeds: five, where the family has them
        most = {key: group for key, group in groups.items() if len(group) >= least}
        groups = most if len({name for _, name in most}) > 1 else groups
        shared = [env for env, _ in Counter(env for env, _ in groups).most_common(MOST_TASKS)]
        names = [name for name, _ in Counter(name for env, name in groups if env in shared).most_common(MOST_METHODS)]
        ours = [run for (env, name), group in groups.items() if env in shared and name in names for run in group]
        comparison = cmp.compare(ours, "auto", None, None, True)
        found[ROOT / log.replace(".md", ".png")] = comparison, cv.curves(comparison, comparison.metric, "steps")
    return found


def curves():
    """Picture of an algorithm file -> what it shows: the learning curves of its results, of its parents and its twin,
    of offline files also behaviour cloning, on the environments on which it was run; at most four. Nothing for a file
    without results."""
    found = {}
    for log in RUNS:
        usual = [with_data(run) if log == OFFLINE else run for each in runs_of(log).values() for run in each]
        for script in (each for each in scripts() if each.family == Path(log).stem):
            runs = usual if any(run.script == script.name for run in usual) else elsewhere()
            envs = {run.env_id for run in runs if run.script == script.name}
            near = (*script.parents, *script.relatives, script.twin, *(["bc"] if log == OFFLINE else []))
            names = dict.fromkeys([script.name, *(Path(each).stem for each in near if each)])
            ours = [run for name in names for run in runs if run.script == name and run.env_id in envs]
            methods = list(dict.fromkeys(run.name for run in ours))[: cv.MOST_CURVES]
            if ours:
                ours = as_long([run for method in methods for run in ours if run.name == method], script.name)
                comparison = cmp.compare(ours, "auto", None, None, True)
                path = ROOT / f"docs/curves/{script.name}.png"
                found[path] = comparison, cv.curves(comparison, comparison.metric, "steps")
    return found


def blocks():
    """(page, marker) -> the function that makes the text, of all parts except TABLES."""
    made = {(page, marker): partial(speed, module, data) for page, marker, module, data in SPEEDS}
    made |= {(log, "measured"): partial(measured, log) for log in LOGS}
    return {(ALGORITHMS, "algorithms"): algorithms, (DQN, "qdagger"): qdagger, **made}


def put(page, marker, block):
    """Write a part between its markers."""
    path = ROOT / page
    before = path.read_text()
    pattern = re.compile(f"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", re.DOTALL)
    once = len(pattern.findall(before)) == before.count(f"<!-- {marker} -->") == 1
    assert once, f"{page} must have the line <!-- {marker} --> once, its end below it"
    path.write_text(pattern.sub(lambda match: f"{match[1]}{block}\n{match[2]}", before))


def with_sizes(page, script):
    """The family's page with the size of the script's diff and its core-hours in the last two columns of its row."""
    names = "` and `".join(script.parents)
    size = f"{budget.measure(script)[0]} of `{names}`" if names else relatives(script.relatives)
    row = re.compile(rf"^(\| \[`{script.path.name}`\]\(.*?\) \|(?: [^|]* \|){{2}}) [^|]* \| [^|]* \|$", re.MULTILINE)
    page, rows = row.subn(lambda match: f"{match[1]} {size} | {core_hours.of_defaults()[script.name]} |", page, count=1)
    if not rows:
        sys.exit(f"the page of the family of {script.path.name} has no row for it")
    return page


NO_RUN = "No run has been made yet."


def with_results(page, script):
    """An algorithm's page with a part "Results", which shows the picture of its curves where there is one."""
    if "\n## Results\n" not in page:
        page = page.replace("\n## Logged metrics\n", f"\n## Results\n\n{NO_RUN}\n\n## Logged metrics\n", 1)
    picture = f"![Learning curves of {script.name}](../curves/{script.name}.png)"
    if picture not in page and (ROOT / f"docs/curves/{script.name}.png").exists():
        data = f"[Where the data are](../results/{script.family}.md#what-was-measured-when-and-where)"
        text = f"{picture}\n\nEvaluations during training: interquartile mean over seeds. {data}.\n\n"
        before, part, after = re.split(r"^(## Results\n.*?)(?=^## )", page, maxsplit=1, flags=re.M | re.S)
        page = f"{before}{part.replace(f'{NO_RUN}', '').rstrip()}\n\n{text}{after}"
    return page


if __name__ == "__main__":
    for script in scripts():
        family = script.path.parent / "README.md"
        family.write_text(with_sizes(family.read_text(), script))
    made = {(page, marker): pages.table(page, words) for page, marker, words in TABLES}
    for (page, marker), block in (made | {name: make() for name, make in blocks().items()} | proof()).items():
        put(page, marker, block)
    for path, (comparison, shown) in (curves() | families()).items():
        if not pages.shows(path, shown):
            pages.draw(comparison, shown, path, pdf=path.parent.name == "results")
    for script in scripts():
        page = ROOT / f"docs/algorithms/{script.name}.md"
        page.write_text(importlib.import_module("uses").with_uses(with_results(page.read_text(), script), script))
    sys.exit(subprocess.run([sys.executable, "-m", "solorl.cli", *REPORT], cwd=ROOT).returncode)
