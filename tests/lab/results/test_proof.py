"""The data and what is made of it: where results of the queue belong, the page that shows which file is proved by what,
and the models that stay."""

import hashlib
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import test_report
from conftest import ROOT

from solorl import trust
from solorl.catalog.header import scripts
from solorl.errors import UsageError
from solorl.lab.results import comparison
from solorl.lab.results import curves as cv
from solorl.lab.results import result as results
from solorl.lab.results.read import read_folder
from solorl.lab.results.result import Result
from solorl.scripts import script_paths

sys.path.insert(0, str(ROOT / "benchmark"))
import against
import collect
import core_hours
import pages
import proof

import zoo


def made(folder, script, env_id, seed, variant="", steps=1000, score=1.0, **more):
    """A finished result in a folder."""
    columns = {"global_step": [steps], "wall_time": [9.0], "mean": [score], "std": [0.0], "length": [1.0]}
    more = {"wall_time": 3600.0, "machine": {"cores": 1}, **more}
    one = Result(
        env_id, script, seed, variant, args={"total_timesteps": steps}, global_step=steps, eval=columns, **more
    )
    return results.write(one, folder)


# ---------------------------------------------------------------------- benchmark/collect.py
def test_results_of_the_queue_go_where_their_siblings_are(tmp_path, capsys):
    queue, wanted = tmp_path / "queue", {}
    made(tmp_path / "actor_critic", "sac_continuous_action", "Hopper-v5", 1, steps=9000)
    made(tmp_path / "modern", "sac_continuous_action", "Hopper-v5", 1, steps=1000)
    made(tmp_path / "stopped", "twin_dqn", "CartPole-v1", 3)
    for script, env_id, variant, steps, folder in (
        ("sac_continuous_action", "Hopper-v5", "", 1000, "modern"),  # of the same budget
        ("sac_continuous_action", "Hopper-v5", "million", 9000, "actor_critic"),
        ("sac_continuous_action", "games/Cue-v0", "", 1000, "games"),  # games have a folder of their own
        ("sac_nstep", "Hopper-v5", "100k", 1000, "modern"),  # by its parent
    ):
        wanted[made(queue, script, env_id, 2, variant, steps).name] = folder
    assert collect.collect(queue, tmp_path, dry=True) == 0 and len(list(queue.iterdir())) == 4
    assert collect.collect(queue, tmp_path) == 0
    assert not list(queue.iterdir())
    assert all((tmp_path / folder / name).is_file() for name, folder in wanted.items())
    out = capsys.readouterr().out
    assert all(f"{name} -> {folder}" in out for name, folder in wanted.items())
    there = {path: path.read_bytes() for path in tmp_path.glob("*/*")}
    made(queue, "sac_nstep", "Hopper-v5", 2, "100k", 1000)  # the worker has written it again
    assert collect.collect(queue, tmp_path) == 0
    assert {path: path.read_bytes() for path in tmp_path.glob("*/*")} == there


def test_no_result_is_overwritten_and_none_goes_astray(tmp_path, capsys):
    made(tmp_path / "dqn", "dqn", "CartPole-v1", 1)
    made(tmp_path / "queue", "dqn", "CartPole-v1", 1, score=2.0)
    made(tmp_path / "queue", "someone", "Else-v1", 1)
    assert collect.collect(tmp_path / "queue", tmp_path) == 2
    assert "another is in dqn" in (out := capsys.readouterr().out) and "nothing tells where it belongs" in out
    assert "another is in dqn (--replace replaces it)" in out
    assert results.read(tmp_path / "dqn/CartPole-v1__dqn__1.json.gz").eval["mean"] == [1.0]


def test_a_repeated_run_replaces_its_old_result_on_demand(tmp_path, capsys):
    old = made(tmp_path / "dqn", "dqn", "CartPole-v1", 1, started="2026-11-21T00:00:00Z")
    same = made(tmp_path / "dqn", "dqn", "CartPole-v1", 2)
    made(tmp_path / "queue", "dqn", "CartPole-v1", 1, score=2.0)
    made(tmp_path / "queue", "dqn", "CartPole-v1", 2)
    assert collect.collect(tmp_path / "queue", tmp_path, dry=True, replace=True) == 0
    assert results.read(old).eval["mean"] == [1.0]
    assert collect.collect(tmp_path / "queue", tmp_path, replace=True) == 0
    out = capsys.readouterr().out.splitlines()
    lines = [f"{old.name} -> dqn, replaced that of 2026-11-21", f"{same.name} -> dqn"]
    assert out == [*lines, *lines]  # the trial says the same
    assert results.read(old).eval["mean"] == [2.0] and not list((tmp_path / "queue").iterdir())


# ---------------------------------------------------------------------- benchmark/proof.py
def row(scores, published=(), **changes):
    """A row of the page: runs with these scores, next to published ones."""
    runs = [Result("Hopper-v5", "td7", seed, args={"total_timesteps": 100}, global_step=100, wall_time=3600.0,
                   eval={"mean": [score]}) for seed, score in enumerate(scores)]  # fmt: skip
    peers = [proof.Peer(score, "P", "https://p", 100, "v4") for score in published]
    usual = {"env_id": "Hopper-v5", "runs": runs, "is_full": True, "peers": peers, "current": 0}
    return proof.Row("td7", variant="", **{**usual, **changes})


def test_a_verdict_is_said_where_the_interval_excludes_the_best_published_score():
    five = [9.0, 10.0, 10.0, 10.0, 11.0]
    assert row(five, [5.0, 8.0]).verdict == "above"
    assert row(five, [5.0, 10.1]).verdict == "equal"
    assert row(five, [5.0, 12.0]).verdict == "below"
    assert row(five[:4], [12.0]).verdict == "undecided"
    assert row(five).verdict == "no peer"
    assert row(five, [12.0], is_full=False).verdict == "curve only"
    assert row(five).core_hours == 5.0


def test_a_run_is_full_with_the_budget_and_settings_of_its_page():
    whole = Result("Hopper-v5", "bc", 1, args={"total_timesteps": 100, "target_return": None}, global_step=99)
    assert proof.is_full(whole)
    for changes in (
        {"global_step": 80}, {"status": "stopped"}, {"variant": "medium short"}, {"variant": "medium-replay early"},
        {"env_id": "pixel_probe:Catch-v0"}, {"args": {"total_timesteps": 100, "target_return": 9.0}},
        {"script": "ppo_procgen", "env_id": "StarpilotEasy-v0"}, {"script": "redq"},
    ):  # fmt: skip
        assert not proof.is_full(replace(whole, **changes)), changes
    assert proof.is_full(replace(whole, variant="shortcut"))


def test_runs_of_two_budgets_are_two_rows(tmp_path):
    for seed, steps in enumerate((100_000, 100_000, 1_000_000)):
        made(tmp_path / "modern", "sac_continuous_action", "Hopper-v5", seed, steps=steps)
    found = proof.rows(tmp_path, lambda run: True)
    assert sorted((row.budget, row.steps, len(row.runs)) for row in found) == [(10**5, 10**5, 2), (10**6, 10**6, 1)]
    assert [len({peer.steps for peer in row.peers}) for row in found] == [1, 1]
    assert sorted(row.budget for row in proof.telling(found)) == [10**5, 10**6]


def test_a_page_has_the_rows_of_searches_nowhere(tmp_path):
    made(tmp_path / "muzero_search", "gumbel_muzero_jax", "CartPole-v1", 1)
    made(tmp_path / "planning", "gumbel_muzero_jax", "CartPole-v1", 2)
    assert [[run.seed for run in row.runs] for row in proof.rows(tmp_path, lambda run: True)] == [[2]]


def test_a_published_score_needs_the_same_budget(tmp_path):
    (tmp_path / "p.toml").write_text(
        '[[source]]\nname = "A"\nurl = "u"\nsteps = 100\nconditions = "c"\n[source.td7]\nHopper-v5 = 7\n'
        '[[source]]\nname = "B"\nurl = "u"\nsteps = 0\nconditions = "any"\n[source.td7]\nHopper-v5 = 8\n'
    )
    assert [one.source for one in proof.peers("td7", "Hopper-v5", 99.0, tmp_path / "p.toml")] == ["A", "B"]
    assert [one.source for one in proof.peers("td7", "Hopper-v5", 300.0, tmp_path / "p.toml")] == ["B"]
    assert proof.peers("td7", "Ant-v5", 100.0, tmp_path / "p.toml") == []


def test_a_score_of_a_torch_file_stands_next_to_its_twin_in_jax(tmp_path):
    (tmp_path / "p.toml").write_text(
        '[[source]]\nname = "A"\nurl = "u"\nsteps = 100\nconditions = "c"\n[source.dqn]\nCartPole-v1 = 7\n'
        '[[source]]\nname = "B"\nurl = "u"\nsteps = 100\nconditions = "c"\n[source.dqn]\nCartPole-v1 = 8\n'
        "[source.dqn_jax]\nCartPole-v1 = 9\n"
    )
    scores = {
        name: [(one.score, one.conditions) for one in proof.peers(name, "CartPole-v1", 100.0, tmp_path / "p.toml")]
        for name in ("dqn", "dqn_jax", "c51_jax", "not_of_ours")
    }
    assert scores["dqn"] == [(7, "c"), (8, "c")] and scores["dqn_jax"] == [(7, "c, not in JAX"), (9, "c")]
    assert scores["c51_jax"] == scores["not_of_ours"] == []


def test_the_most_telling_task_has_full_runs_then_seeds_then_is_hard():
    five, two = [1.0] * 5, [1.0] * 2

    def first(*rows):
        return proof.telling(rows)[0].env_id

    easy, hard = replace(row(five), env_id="Pendulum-v1"), row(five)
    assert first(easy, hard) == first(easy, replace(hard, runs=[*hard.runs, *hard.runs])) == "Hopper-v5"
    assert first(easy, row(two)) == "Pendulum-v1"
    assert first(row(two), replace(easy, is_full=False)) == "Hopper-v5"
    assert len(proof.telling([easy, hard])) == 1  # a further row is one with a published score
    beside = row(five, [2.0])  # a row with a published score
    assert len(proof.telling([hard, replace(easy, peers=beside.peers)])) == 2
    assert first(replace(easy, current=5), replace(hard, current=4)) == "Pendulum-v1"  # runs of the file as it is
    assert first(replace(easy, runs=easy.runs[:4], current=4), replace(hard, runs=hard.runs[:4])) == "Hopper-v5"
    probe = replace(hard, env_id="Corridor-v5", is_full=False)
    assert first(probe, replace(row(two), env_id="Pong-v5", is_full=False)) == "Pong-v5"  # tasks of the tests are last
    # of one environment and budget the best row, and all with five seeds
    assert len(proof.telling([beside, replace(row(two, [2.0]), variant="unclipped")])) == 1
    assert [one.variant for one in proof.telling([replace(beside, variant="tuned"), beside])] == ["", "tuned"]


def test_every_published_score_is_of_a_file_and_has_a_source():
    sources = tomllib.loads((ROOT / "benchmark/published.toml").read_text())["source"]
    for one in sources:
        assert one["url"].startswith("https://") and one["name"] and one["conditions"] and one["steps"] >= 0
        scores = {name: table for name, table in one.items() if isinstance(table, dict)}
        assert scores and scores.keys() <= script_paths().keys()
        assert all(isinstance(score, int | float) for table in scores.values() for score in table.values())
        page = re.match(
            r"https://docs.cleanrl.dev/rl-algorithms/(\w+)/", one["url"]
        )  # of CleanRL, which has one a method
        assert not page or all(name.startswith(page[1]) for name in scores)


def test_a_result_is_current_until_its_golden_start_moves(tmp_path):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def commit(script, metric, name="x", flags=""):
        """Commit the script with these contents and this golden start; its hash, and that of the commit."""
        (tmp_path / f"algorithms/f/{name}.py").write_text(script)
        if metric is not None:
            golden = {"flags": flags, "library": "torch", "rows": [{"loss": metric}]}
            (tmp_path / f"tests/golden/{name}.json").write_text(json.dumps(golden))
        git("add", "-A")
        git("commit", "--allow-empty", "-m", script)
        return hashlib.sha256(script.encode()).hexdigest(), git("rev-parse", "HEAD").strip()

    for folder in ("algorithms/f", "tests/golden"):
        (tmp_path / folder).mkdir(parents=True)
    git("init", "-q")

    def is_current(sha256, commit, script="x"):
        run = Result("e", script, 1, script_sha256=sha256, git={"commit": commit}, started="2020-01-01T00:00:00Z")
        return proof.History(tmp_path).is_current(run)

    first = commit("x = 1", 1.0)
    words = commit("x = 1  # a comment", 1.0)
    assert is_current(*first) and is_current(*words)
    moved = commit("x = 2", 2.0)
    assert not is_current(*first) and not is_current(*words) and is_current(*moved)
    assert is_current(moved[0], "0" * 40) and not is_current(words[0], "0" * 40)  # of another clone
    library = commit("x = 2", 3.0)  # the same script, but the library moves its results
    assert not is_current(*moved) and is_current(*library)
    assert not is_current("unknown", first[1]) and is_current("unknown", library[1])
    assert not is_current("unknown", "0" * 40)
    early = commit("y = 1", None, "y")
    commit("y = 1", 1.0, "y")
    assert is_current(*early, script="y")  # made before its golden start was recorded

    before = commit("z = 1", None, "z")
    one = commit("z = 1", 1.0, "z")
    other = commit("z = 1", 9.0, "z", "--env-id e")  # recorded again with other flags, which moves no result
    words = commit("z = 1  # a comment", 9.0, "z", "--env-id e")
    assert all(is_current(*each, script="z") for each in (before, one, other, words))
    moved = commit("z = 1  # a comment", 8.0, "z", "--env-id e")
    assert not is_current(*words, script="z") and is_current(*moved, script="z")
    assert not any(is_current(*each, script="z") for each in (before, one, other))

    silent = commit("y = 2", 1.0, "y")
    row = f'[[moved]]\ncommit = "{silent[1]}"\nscript = "y"\nenv_id = "e"\nwhy = "w"\n'
    (tmp_path / "tests/golden/moved.toml").write_text(row.replace('"e"', '"other"'))
    assert is_current(*early, script="y") and is_current(*silent, script="y")
    (tmp_path / "tests/golden/moved.toml").write_text(row)
    later = commit("y = 2", 1.0, "y")
    assert not is_current(*early, script="y") and not is_current(early[0], "0" * 40, script="y")
    assert is_current(*silent, script="y") and is_current(*later, script="y")


def test_a_commit_that_moved_results_unseen_is_of_this_repository():
    for one in tomllib.loads((ROOT / "tests/golden/moved.toml").read_text())["moved"]:
        assert one.keys() == {"commit", "script", "env_id", "why"} and one["script"] in script_paths()
        assert re.fullmatch(r"[0-9a-f]{40}", one["commit"])


def test_the_page_has_a_row_for_each_file(tmp_path):
    made(tmp_path / "modern", "td7", "Hopper-v5", 1, steps=100_000)
    found = proof.rows(tmp_path, lambda run: True)
    sums, tables = proof.tables(scripts(), found)
    assert all(f"| [`{one.name}`](algorithms/{one.name}.md) |" in tables for one in scripts())
    assert tables.count("no row yet") == len(scripts()) - 1
    assert "| Hopper-v5 | 100,000 | 1 | 1.00 | – | no peer | 1.0 | – | yes |" in tables
    assert sums.startswith(f"0 of {len(scripts())} files have five seeds of a full run, 1 a full run, 1 any data.")


def test_the_sums_count_rows_with_a_published_score():
    three = [row([9.0, 10.0, 10.0, 10.0, 11.0], [best]) for best in (5.0, 10.0, 12.0)]
    found = [replace(one, env_id=str(i)) for i, one in enumerate([*three, row([1.0], [2.0])])]
    sums, _ = proof.tables([SimpleNamespace(name="td7", family="actor_critic")], found)
    assert sums.endswith("Of 4 rows with a published score 1 above, 1 equal, 1 below, 1 undecided.")
    run = replace(found[3].runs[0], script="redq")
    assert "| curve only: cut, the smallest" in proof.line(replace(found[3], is_full=False, runs=[run]))
    of_two = [replace(found[0], runs=[replace(each, args={"total_timesteps": n}) for each in found[0].runs[:2]])
              for n in (10, 10, 20)]  # fmt: skip
    assert sorted(one.budget for one in proof.telling([found[1], *of_two])) == [10, 20, 100]


def test_a_row_below_its_peer_says_why_where_it_was_looked_into():
    below = row([1.0] * 5, [2.0], env_id="LunarLander-v3")
    ppo, wide = replace(below, script="ppo"), replace(below, script="ppo", variant="wide")
    assert "| below: [why](results/ppo.md#" in proof.line(ppo)
    assert "| below, not looked into |" in proof.line(wide)
    for key, page in proof.published()["findings"].items():
        assert key.split()[0] in script_paths() and (ROOT / "docs" / page.partition("#")[0]).is_file()


def test_a_row_of_a_board_names_the_opponent_of_its_score():
    for env_id, task in (
        ("games/TicTacToe-v0", "games/TicTacToe-v0, points against perfect"),
        ("CartPole-v1", "CartPole-v1"),
    ):
        run = Result(env_id, "alphazero", 1, args={"opponents": "perfect,one-ply"}, eval={"mean": [0.5]})
        assert f"| {task} |" in proof.line(row([1.0], env_id=env_id, runs=[run]))


# ---------------------------------------------------------------------- benchmark/against.py
def test_earlier_results_are_those_of_the_commit_under_another_name(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@x", *words], cwd=tmp_path, check=True)

    suite = tmp_path / "benchmark/results/short"
    made(suite, "ppo", "CartPole-v1", 1, score=3.0), made(suite, "ppo", "CartPole-v1", 2, "wide", score=4.0)
    for words in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "results")):
        git(*words)
    made(suite, "ppo", "CartPole-v1", 1, score=9.0)  # since then
    against.earlier(tmp_path, "HEAD", "short", tmp_path / "place")
    found = [results.read(path) for path in (tmp_path / "place/old").iterdir()]
    assert {(one.seed, one.variant, one.eval["mean"][0]) for one in found} == {(1, "old", 3.0), (2, "old wide", 4.0)}
    with pytest.raises(UsageError):
        against.earlier(tmp_path, "HEAD", "other", tmp_path / "place")


# ---------------------------------------------------------------------- benchmark/zoo.py
ENTRIES = json.loads((ROOT / "zoo/index.json").read_text())


def test_the_zoo_has_the_run_nearest_to_the_median_of_a_whole_row(tmp_path):
    one = row([1.0, 5.0, 2.0, 4.0, 9.0])
    places = {("td7", "Hopper-v5", seed, ""): tmp_path / str(seed) for seed in (0, 1, 2, 4)}
    [(run, folder)] = zoo.chosen([one], places)  # the median is 4.0, seed 3, whose folder is gone; then 5.0
    assert run.seed == 1 and folder == tmp_path / "1"
    assert zoo.chosen([replace(one, runs=one.runs[:4])], places) == []
    assert zoo.chosen([replace(one, is_full=False)], places) == []


@pytest.mark.slow  # a training and several plays
def test_an_entry_has_what_acts_and_plays_the_same(tmp_path, solo):
    flags = "--total-timesteps 400 --learning-starts 100 --eval-every 200 --eval-episodes 2"
    assert solo("train", "dqn", "--env-id", "CartPole-v1", *flags.split(), "--runs-dir", tmp_path / "runs")[0] == 0
    [run_dir] = (tmp_path / "runs").iterdir()
    own = read_folder(run_dir)
    others = [replace(own, seed=seed, started="x") for seed in range(2, 6)]
    whole = proof.Row("dqn", "CartPole-v1", "", [own, *others], True, [], 0)
    zoo.build([whole], [tmp_path / "runs"], tmp_path / "zoo")
    about = json.loads((tmp_path / "zoo/index.json").read_text())["dqn"]
    assert about["without"] == ["target_network"] and about["bytes"] <= zoo.MOST
    entry = tmp_path / "zoo/dqn"
    assert {path.name for path in entry.iterdir()} == {"config.json", "dqn.py", "model.safetensors"}
    assert str(tmp_path) not in (entry / "config.json").read_text()
    assert zoo.played(entry) == zoo.played(run_dir)
    before = {path: path.read_bytes() for path in (tmp_path / "zoo").rglob("*.*")}
    zoo.build([whole], [tmp_path / "runs"], tmp_path / "zoo")
    assert {path: path.read_bytes() for path in (tmp_path / "zoo").rglob("*.*")}.keys() == before.keys()


def test_a_script_of_the_zoo_is_trusted_and_no_other(tmp_path, monkeypatch):
    (tmp_path / "zoo/dqn").mkdir(parents=True)
    copy = tmp_path / "zoo/dqn/dqn.py"
    copy.write_text("print('an earlier version')\n")
    monkeypatch.setattr(trust, "PACKAGE", tmp_path / "solorl")
    assert trust.trusted(copy, None) is None
    listed = {"dqn": {"script_sha256": hashlib.sha256(copy.read_bytes()).hexdigest()}}
    (tmp_path / "zoo/index.json").write_text(json.dumps(listed))
    assert trust.trusted(copy, None) == copy
    copy.write_text("print('changed')\n")
    assert trust.trusted(copy, None) is None


def test_the_zoo_is_small_and_is_what_its_index_says():
    assert (ROOT / "zoo/README.md").read_text() == zoo.page(ENTRIES)
    folders = {path.name for path in (ROOT / "zoo").iterdir() if path.is_dir()}
    assert folders == ENTRIES.keys() <= script_paths().keys()
    assert sum(about["bytes"] for about in ENTRIES.values()) <= zoo.MOST_IN_ALL
    for name, about in ENTRIES.items():
        files = [path for path in (ROOT / "zoo" / name).iterdir() if path.is_file() and path.name != ".lock"]
        assert sum(path.stat().st_size for path in files) == about["bytes"] <= zoo.MOST, name
        assert hashlib.sha256((ROOT / f"zoo/{name}/{name}.py").read_bytes()).hexdigest() == about["script_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_of_the_zoo_plays(name, solo):
    code, out, _ = solo("play", ROOT / "zoo" / name, "--episodes", 1)
    assert code == 0 and re.match(rf"{re.escape(ENTRIES[name]['env_id'])}: -?\d", out), out


# ---------------------------------------------------------------------- pages of results
def test_core_hours_are_those_of_the_defaults(tmp_path):
    """The median over the runs without a variant on the default environment, of as many steps as the default."""
    for seed, sps in enumerate((500.0, 1000.0, 4000.0)):
        made(tmp_path, "ppo", "CartPole-v1", seed, sps=sps, machine={"cores": 4})
    made(tmp_path, "ppo", "Acrobot-v1", 1, sps=1.0)
    made(tmp_path, "ppo", "CartPole-v1", 7, "variant", sps=1.0)
    made(tmp_path, "dqn", "CartPole-v1", 1)
    ppo = next(script for script in scripts() if script.name == "ppo")
    assert core_hours.default_budget(ppo) == ("CartPole-v1", 500_000)
    hours = core_hours.of_defaults(tmp_path)
    assert hours == {script.name: "not measured" for script in scripts()} | {"ppo": "0.14"}


def test_runs_trained_together_use_all_cores_they_had():
    assert core_hours.core_seconds(Result("E-v0", "a", 1, sps=10.0, together=10, machine={"cores": 2})) == 0.02
    assert core_hours.core_seconds(Result("E-v0", "a", 1, sps=10.0, args={"threads": 3}, machine={"cores": 4})) == 0.3


def test_a_table_is_that_of_the_report_with_a_link_to_its_data(tmp_path):
    """Words of `solo report` choose what is in it."""
    data, page = tmp_path / "some data", str(tmp_path / "docs/page.md")
    for seed in range(1, 5):
        made(data, "ppo", "CartPole-v1", seed, score=100.0 + seed)
        made(data, "dqn", "CartPole-v1", seed, score=200.0 + seed)
        made(data, "dqn", "Acrobot-v1", seed)
    whole = pages.table(page, f"'{data}'")
    assert "| CartPole-v1 | dqn | 4 | 202.5 [" in whole and "| Acrobot-v1 | dqn | 4 |" in whole
    assert whole.endswith(" Every run: [../some data](../some%20data).\n")
    some = pages.table(page, f"'{data}' --env-ids CartPole-v1 --methods ppo dqn")
    assert some.startswith("\n**dqn is better than ppo; P(improvement) = 1.00") and "Acrobot" not in some
    rows = [line.split(" | ")[1] for line in some.splitlines() if line.startswith("| CartPole")]
    assert rows == ["ppo", "dqn"]


def test_no_page_has_a_table_of_one_seed_each(tmp_path):
    page = str(tmp_path / "page.md")
    for script in ("dqn", "c51"):
        made(tmp_path / "data", script, "CartPole-v1", 1)
    assert pages.table(page, str(tmp_path / "data")) == (
        "\nNo table yet, there is only one run of each: dqn, c51. Every run: [data](data).\n"
    )
    made(tmp_path / "data", "dqn", "CartPole-v1", 2)
    pages.read.cache_clear()
    text = pages.table(page, str(tmp_path / "data"))
    assert "| CartPole-v1 | dqn | 2 |" in text and "| CartPole-v1 | c51 | 1 |" in text


def test_a_picture_of_curves_says_what_it_shows(tmp_path):
    """So that the builder of the pages draws it again where its curves have changed, and only then."""
    picture = tmp_path / "new.png"
    compared = comparison.compare(test_report.made(), baseline="old")
    curves = cv.curves(compared, "eval", "steps")
    assert not pages.shows(picture, curves)
    pages.draw(compared, curves, picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and not picture.with_suffix(".pdf").exists()
    assert pages.shows(picture, curves)
    key = next(iter(curves))
    assert not pages.shows(picture, curves | {key: replace(curves[key], y=curves[key].y + 1)})
    picture.write_bytes(b"no picture")
    assert not pages.shows(picture, curves)
    with pytest.raises(AssertionError, match="no curve to draw"):
        pages.draw(compared, {}, picture)


def test_what_a_picture_of_curves_is_known_by():
    """Other names or another band make another picture, the last bits of a line do not."""
    curves = cv.curves(comparison.compare(test_report.made()), "eval", "steps")
    names = list(curves)
    some = {name: curves[name] for name in names[:2]}
    renamed = dict(zip(names[1::-1], some.values(), strict=True))
    assert pages.fingerprint(some) != pages.fingerprint(renamed)
    moved = replace(curves[names[0]], band=curves[names[0]].band + 1)
    assert pages.fingerprint(some) != pages.fingerprint(some | {names[0]: moved})
    ranged = replace(curves[names[0]], kind="range")
    assert pages.fingerprint(some) != pages.fingerprint(some | {names[0]: ranged})
    nudged = replace(curves[names[0]], y=curves[names[0]].y * (1 + 1e-13))
    assert pages.fingerprint(some) == pages.fingerprint(some | {names[0]: nudged})
