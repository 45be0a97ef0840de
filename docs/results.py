"""Makes the generated parts of all pages from the data: tables and curves of results, tables of speed, the headline
table of README, the table of algorithms, and the report.

python docs/results.py
"""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

from solorl.catalog.header import scripts
from solorl.results import comparison as cmp
from solorl.results import text
from solorl.results.read import read_all
from solorl.terminal import duration

ROOT = Path(__file__).resolve().parent.parent
RESULTS, SPEED, ALGORITHMS = "docs/results.md", "docs/speed.md", "algorithms/README.md"
PPO, DQN, ACTOR_CRITIC = (f"algorithms/{family}/README.md" for family in ("ppo", "dqn", "actor_critic"))
CLASSIC, CONTINUOUS, OFF_POLICY_RUNS, JAX = (
    f"benchmark/results/{name}" for name in ("classic", "ppo_continuous", "actor_critic", "jax")
)
PENDULUM = "--env-ids Pendulum-v1 --methods"
PPO_CONTINUOUS = (
    "ppo_continuous_action 'ppo_continuous_action tuned' rpo_continuous_action"
    " ppo_continuous_action_jax 'ppo_continuous_action_jax tuned'"
)
LANDER = "ppo_jax 'ppo_jax unclipped' ppo sb3_ppo"
OTHER = "BipedalWalker-v3 Hopper-v5 InvertedPendulum-v5 Walker2d-v5"
LONG = "BipedalWalker-v3 HalfCheetah-v5 Hopper-v5 LunarLanderContinuous-v3"
OFF_POLICY = "ddpg_continuous_action td3_continuous_action sac_continuous_action"
OFF_POLICY_JAX = OFF_POLICY.replace("action", "action_jax")

# page, its markers, words of `solo report`, picture in docs/curves ("" for none; of more than 4 methods also X_2, X_3)
TABLES = [
    (RESULTS, "classic", CLASSIC, ""),
    (RESULTS, "jax", f"{JAX} --baseline ppo_jax", ""),
    (PPO, "results", f"{CLASSIC} {JAX} --methods ppo ppo_jax sb3_ppo", "ppo"),
    (PPO, "mountaincar", "benchmark/results/mountaincar", "ppo_mountaincar"),
    (PPO, "lunarlander", f"{JAX} {CLASSIC} --env-ids LunarLander-v3 --methods {LANDER}", "ppo_lunarlander"),
    (
        PPO,
        "pendulum",
        f"{CONTINUOUS} {JAX} {PENDULUM} ppo_continuous_action rpo_continuous_action ppo_continuous_action_jax",
        "ppo_pendulum",
    ),
    (PPO, "halfcheetah", f"{CONTINUOUS} {JAX} --env-ids HalfCheetah-v5 --methods {PPO_CONTINUOUS}", "ppo_halfcheetah"),
    (PPO, "minatar", "benchmark/results/minatar", "ppo_minatar"),
    (PPO, "other", f"{CONTINUOUS} --env-ids {OTHER}", "ppo_other"),
    (
        DQN,
        "results",
        f"benchmark/results/dqn {JAX} --methods dqn dqn_jax c51 c51_jax double_dqn dueling_dqn d3qn ez_greedy_dqn",
        "dqn",
    ),
    (
        ACTOR_CRITIC,
        "results",
        f"{OFF_POLICY_RUNS} {JAX} {PENDULUM} {OFF_POLICY} {OFF_POLICY_JAX}",
        "actor_critic_pendulum",
    ),
    (
        ACTOR_CRITIC,
        "long",
        f"{OFF_POLICY_RUNS} {JAX} --env-ids {LONG} --methods {OFF_POLICY} {OFF_POLICY_JAX}",
        "actor_critic_long",
    ),
    (ACTOR_CRITIC, "discrete", f"{OFF_POLICY_RUNS} --methods sac_discrete", "actor_critic_discrete"),
]

# page, its markers, module in benchmark, its data in benchmark/results/speed
SPEEDS = [
    (SPEED, "ppo", "ppo_speed", "ppo"),
    (SPEED, "jax", "jax_speed", "jax"),
    (PPO, "speed", "ppo_speed", "ppo_halfcheetah"),
    (PPO, "wide", "jax_speed", "jax_wide"),
    (PPO, "rejax", "jax_speed", "jax_rejax"),
    (PPO, "start", "jax_start", "jax_start"),
    (DQN, "speed", "dqn_speed", "dqn"),
    (ACTOR_CRITIC, "speed", "actor_critic_speed", "actor_critic"),
    (ACTOR_CRITIC, "jax-speed", "jax_speed", "jax_actor_critic"),
]

# The headline table of README: environment, method, folder in benchmark/results.
HEADLINE = [
    ("CartPole-v1", "ppo", "classic"),
    ("Acrobot-v1", "dqn", "dqn"),
    ("LunarLander-v3", "ppo_jax unclipped", "jax"),
    ("Breakout-MinAtar", "ppo_jax", "minatar"),
    ("Pendulum-v1", "sac_continuous_action", "actor_critic"),
    ("HalfCheetah-v5", "ppo_continuous_action_jax tuned", "jax"),
]

REPORT = ["report", CLASSIC, "--out", "benchmark/reports/classic", "--title", "PPO, here and in Stable-Baselines3"]


def words(page, marker, report, picture):
    """The command line of one of TABLES, after `solo`."""
    curves = ["--curves", f"docs/curves/{picture}.png"] if picture else []
    return ["report", *shlex.split(report), "--markdown", page, "--marker", marker, *curves]


def speed(module, data):
    """The Markdown table that a benchmark makes of its data."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    return importlib.import_module(module).table(ROOT / f"benchmark/results/speed/{data}.json")


def headline():
    """The six rows of README."""
    paths = {script.name: script.path.relative_to(ROOT).as_posix() for script in scripts()}
    lines = [
        "| environment | algorithm | score [95 % interval] | seeds | steps | time |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for env_id, method, folder in HEADLINE:
        results, _ = read_all([ROOT / "benchmark/results" / folder])
        [row] = cmp.env_rows(cmp.compare(cmp.only(results, [env_id], [method]), "eval", None, None, True), env_id)
        name, _, variant = method.partition(" ")
        cells = [f"[`{name}`]({paths[name]}){' ' + variant if variant else ''}", text.estimate(row.iqm), str(row.seeds)]
        together = f" for {row.together} at once" if row.together > 1 else ""
        cells += [f"{row.steps:,.0f}", duration(row.seconds) + together]
        lines.append(f"| [{env_id}](benchmark/results/{folder}) | {' | '.join(cells)} |")
    torch, jax = speed("ppo_speed", "ppo"), speed("jax_speed", "jax")
    number = r"\| ([\d,]+) \|[^|]*\| ([\d.]+) \|"  # steps/s and the ratio to the first peer
    eager, compiled, in_jax = (
        re.search(rf"^\| {name} {number}", table, flags=re.M).groups()
        for name, table in (("SoloRL", torch), ("SoloRL compiled", torch), ("SoloRL, JAX", jax))
    )
    lines.append(
        f"\nSpeed of PPO on CartPole-v1 on one CPU thread: {eager[0]} steps/s ({eager[1]} times Stable-Baselines3), "
        f"compiled {compiled[0]} ({compiled[1]} times), in JAX {in_jax[0]} ({in_jax[1]} times SBX)."
    )
    return "\n".join(lines)


def algorithms():
    """A table for each family, from the headers of its files."""
    parts = []
    families = {script.family: [] for script in scripts()}
    for script in scripts():
        families[script.family].append(script)
    for family, files in families.items():
        title = (ROOT / f"algorithms/{family}/README.md").read_text().partition("\n")[0].removeprefix("# ")
        lines = [
            f"## [{title}]({family}/README.md)",
            "",
            "| file | what it is | observations → actions | from | paper |",
        ]
        lines.append("|---|---|---|---|---|")
        for script in sorted(files, key=lambda script: (script.framework != "torch", script.parent or "", script.name)):
            what = re.split(r"[,;] (?:discrete|continuous|vector|image|in JAX)", script.title.rstrip("."))[0]
            what += ", in JAX" if script.framework == "jax" else ""
            paper = re.sub(r"^(.*?),? (https?://[^\s;]+).*", r"[\1](\2)", script.paper)
            parent = f"`{Path(script.parent).stem}`" if script.parent else "–"
            spaces = script.spaces.replace("->", "→")
            lines.append(f"| [`{script.name}`]({family}/{script.name}.py) | {what} | {spaces} | {parent} | {paper} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def blocks():
    """(page, marker) -> text, of all parts that are not made by `solo report`."""
    made = {(page, marker): speed(module, data) for page, marker, module, data in SPEEDS}
    return {("README.md", "headline"): headline(), (ALGORITHMS, "algorithms"): algorithms(), **made}


def put(page, marker, block):
    """Write a part between its markers."""
    path = ROOT / page
    before = path.read_text()
    pattern = re.compile(f"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", re.DOTALL)
    assert len(pattern.findall(before)) == 1, f"{page} must have the line <!-- {marker} --> once, its end below it"
    path.write_text(pattern.sub(lambda match: f"{match[1]}{block}\n{match[2]}", before))


if __name__ == "__main__":
    for (page, marker), block in blocks().items():
        put(page, marker, block)
    commands = [*(words(*entry) for entry in TABLES), REPORT]
    codes = [
        subprocess.run([sys.executable, "-m", "solorl.cli", *command], cwd=ROOT).returncode for command in commands
    ]
    sys.exit(max(codes))
