"""`solo doctor`: each rule sees its fault in curves made for it and nothing in healthy ones; reading; the command."""

import fcntl
import gzip
import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, refused

from solorl.games import BOARDS
from solorl.games.teams import GAMES as TEAM_GAMES
from solorl.lab.results import doctor
from solorl.lab.results.read import trainings
from solorl.lab.results.training import Training, of_run, of_tensorboard
from solorl.scripts import script_paths

STEPS = np.arange(1_000, 101_000, 1_000.0)
HEALTHY = {
    "charts/episodic_return": np.linspace(20, 300, 100),
    "charts/episodic_length": np.linspace(20, 300, 100),
    "eval/episodic_return": np.linspace(30, 320, 100),
    "eval/episodic_return_std": np.full(100, 40.0),
    "charts/learning_rate": np.linspace(2.5e-4, 1e-6, 100),
    "losses/approx_kl": np.full(100, 0.01),
    "losses/clipfrac": np.full(100, 0.1),
    "losses/entropy": np.linspace(0.69, 0.4, 100),
    "losses/explained_variance": np.linspace(0, 0.9, 100),
    "losses/value_loss": np.linspace(40, 200, 100),
    "losses/q_values": np.linspace(10, 80, 100),
    "losses/alpha": np.linspace(1, 0.1, 100),
    "charts/epsilon": np.linspace(1, 0.05, 100),
}


def training(args=(), env_id="CartPole-v1", script="ppo", status="finished", copy=None, seed=1, **changes):
    """A healthy training that has not solved its task, with some curves changed ("losses__entropy": values)."""
    curves = HEALTHY | {name.replace("__", "/"): values for name, values in changes.items()}
    curves = {
        name: (STEPS[-len(values) :], np.asarray(values, float)) for name, values in curves.items() if len(values)
    }
    args = {"total_timesteps": 100_000, "gamma": 0.99, "num_envs": 4, "eval_episodes": 20} | dict(args)
    return Training(env_id, script, seed, args=args, status=status, curves=curves, copy=copy, source="runs/x")


def rules_of(case):
    """The names of the rules that see something."""
    return [rule.__name__ for rule, *_ in doctor.RULES if rule(case)]


def full(value):
    return np.full(100, float(value))


def test_a_healthy_training_has_nothing(tmp_path):
    copy = shutil.copy(script_paths()["ppo"], tmp_path / "ppo.py")
    assert rules_of(training(copy=Path(copy))) == []
    assert rules_of(training()) == []
    assert rules_of(Training("CartPole-v1", "ppo", 1)) == []  # nothing was logged


FAULTS = {
    "diverged": dict(status="diverged: losses/value_loss is nan at step 900"),
    "broke_off": dict(status="failed"),
    "rate_at_zero": dict(charts__learning_rate=np.r_[np.linspace(1e-3, 0, 40), np.zeros(60)]),
    "large_steps": dict(losses__approx_kl=np.r_[full(0.01)[:80], full(0.5)[:20]]),
    "no_steps": dict(losses__approx_kl=full(1e-9)),
    "collapsed": dict(losses__entropy=np.r_[0.69, 0.69, np.full(98, 0.01)]),
    "stays_random": dict(losses__entropy=full(0.69)),
    "worthless_values": dict(losses__explained_variance=np.linspace(0.1, -2, 100)),
    "high_values": dict(losses__q_values=np.geomspace(1, 1e5, 100)),
    "low_values": dict(losses__q_values=full(1.0)),
    "growing_loss": dict(losses__value_loss=np.geomspace(1, 1e6, 100), losses__q_values=()),
    "large_rewards": dict(
        charts__episodic_return=np.linspace(2e7, 3e8, 100), losses__value_loss=full(1e12), losses__q_values=(),
        eval__episodic_return=np.linspace(2e7, 3e8, 100), env_id="Own-v0"),
    "small_buffer": dict(args={"buffer_size": 500}),
    "keeps_exploring": dict(charts__epsilon=full(0.9)),
    "temperature": dict(losses__alpha=np.geomspace(1, 300, 100)),
    "worse_evaluation": dict(eval__episodic_return=full(30)),
    "fell": dict(eval__episodic_return=np.r_[np.linspace(30, 400, 90), full(30)[:10]]),
    "never_left": dict(
        charts__episodic_return=full(22), charts__episodic_length=full(22), eval__episodic_return=full(22),
        losses__q_values=full(10)),
}  # fmt: skip


@pytest.mark.parametrize("rule", FAULTS)
def test_each_rule_sees_its_fault_and_no_other_does(rule):
    more = {"fell": ["worse_evaluation"], "worse_evaluation": []}.get(rule, [])
    found = rules_of(training(**FAULTS[rule]))
    assert rule in found and set(found) <= {rule, *more, "never_left"} - (
        {"never_left"} if rule != "never_left" else set()
    )


def test_all_rules_have_a_test():
    scripts = {"no_update", "changed_script", "far_from_default"}
    assert {rule.__name__ for rule, *_ in doctor.RULES} == FAULTS.keys() | scripts
    assert all(all(row[1:]) for row in doctor.RULES)  # cause, remedy and source are never empty


def test_a_training_without_gradient_steps(tmp_path):
    copy = Path(shutil.copy(script_paths()["dqn"], tmp_path / "dqn.py"))
    none = {name.replace("/", "__"): () for name in HEALTHY if name.startswith("losses/")}
    assert "no_update" in rules_of(training(args={"learning_starts": 200_000}, copy=copy, **none))
    assert "no_update" not in rules_of(
        training(args={"learning_starts": 200_000}, **none)
    )  # a result file has no losses
    assert "no_update" not in rules_of(training(args={"learning_starts": 1_000}, copy=copy))


def test_the_changed_lines_of_a_script_are_shown_with_what_they_are_about(tmp_path):
    text = script_paths()["dqn"].read_text()
    assert "replay.add(Batch(obs, action, reward, terminated, next_obs))" in text
    copy = tmp_path / "dqn.py"
    copy.write_text(text.replace("reward, terminated, next_obs))", "reward, terminated | truncated, next_obs))"))
    seen = doctor.changed_script(training(copy=copy))
    assert "where episodes end" in seen and "terminated | truncated" in seen and "dqn.py" in seen
    copy.write_text(text + "\n# a comment is no change\n")
    assert doctor.changed_script(training(copy=copy)) == ""
    mine = tmp_path / "mine.py"  # a copy under another name is found by its header
    mine.write_text(text.replace("Differs   root of its family", "Differs   from dqn.py: mine").replace("0.05", "0.5"))
    assert "are not those of dqn.py" in doctor.changed_script(training(copy=mine))
    mine.write_text("def broken(:\n")
    assert doctor.changed_script(training(copy=mine)) == ""


@pytest.mark.parametrize(
    "where, dirty, is_seen",
    [("/home/me/solorl/algorithms/dqn/dqn.py", False, False),  # an older version of the library ran
     ("/home/me/solorl/algorithms/dqn/dqn.py", True, True), ("/home/me/dqn.py", False, True)],
)  # fmt: skip
def test_a_file_of_an_older_version_is_not_a_changed_one(tmp_path, where, dirty, is_seen):
    run = a_run(tmp_path / "run", ROWS, script="dqn")
    copy, config = run / "dqn.py", json.loads((run / "config.json").read_text())
    copy.write_text(copy.read_text().replace("terminated, next_obs))", "terminated | truncated, next_obs))"))
    (run / "config.json").write_text(json.dumps(config | {"script_path": where, "git": {"dirty": dirty}}))
    assert bool(doctor.changed_script(of_run(run))) == is_seen


def test_settings_ten_times_the_default_or_a_tenth_of_it(tmp_path):
    copy = Path(shutil.copy(script_paths()["ppo"], tmp_path / "ppo.py"))
    args = {
        "learning_rate": 2.5e-2,
        "gamma": 0.5,
        "gae_lambda": 0.9,
        "num_envs": 400,
        "vf_coef": 0.5,
        "anneal_lr": False,
    }
    seen = doctor.far_from_default(training(args=args, copy=copy))
    assert seen == "--learning-rate is 0.025, the default 0.00025; --gamma is 0.5, the default 0.99"
    assert "--ent-coef is 0" in doctor.far_from_default(training(args={"ent_coef": 0.0}, copy=copy))
    assert doctor.far_from_default(training(args={"learning_rate": 2e-3}, copy=copy)) == ""
    copy.write_text(copy.read_text().replace("ent_coef: float = 0.01", "ent_coef: float = 0.0"))
    assert doctor.far_from_default(training(args={"ent_coef": 0.001}, copy=copy)) == ""  # nothing is far from 0
    assert "--vf-coef is 0" in doctor.far_from_default(training(args={"ent_coef": 0.1, "vf_coef": 0}, copy=copy))


def test_what_is_solved_has_nothing_unless_it_diverged():
    solved = dict(eval__episodic_return=full(500), losses__entropy=full(0.69))
    assert doctor.examine(training(**solved)) == []
    found = doctor.examine(training(**solved, status="diverged: reward is nan"))
    assert found[0].what == "A number became NaN or infinite" and found[0].seen == "diverged: reward is nan"


def test_negative_returns_bound_q_values_by_zero():
    pendulum = dict(
        env_id="Pendulum-v1", charts__episodic_return=np.linspace(-1400, -700, 100), charts__episodic_length=full(200),
        eval__episodic_return=np.linspace(-1400, -600, 100), charts__learning_rate=(), losses__alpha=())  # fmt: skip
    assert "high_values" not in rules_of(training(**pendulum, losses__q_values=np.linspace(0, -150, 100)))
    assert "high_values" in rules_of(training(**pendulum, losses__q_values=np.linspace(0, 150, 100)))
    entropies = pendulum | dict(losses__alpha=full(1.0))  # SAC's values have a bonus for entropies
    assert "high_values" not in rules_of(training(**entropies, losses__q_values=full(150)))


def test_values_are_those_of_the_rewards_that_the_script_learns_from(tmp_path):
    """Not of those that it counts: factors that are known count, and without one nothing is said."""
    few, many = full(3.0), full(500.0)  # returns are at most 300, and those of a state about 80 in the mean

    def found(values, copy=None, args=(), script="dqn", **curves):
        rules = rules_of(training(args, copy=copy, script=script, losses__q_values=values, losses__alpha=(), **curves))
        return {"low_values", "high_values"} & set(rules)

    assert found(few) == {"low_values"} and found(many) == {"high_values"}
    for name in ("dqn_atari", "dqn_atari_jax", "apex_dqn_atari", "pqn_atari_envpool", "stream_q"):
        assert found(few, script=name) == found(many, script=name) == set(), (
            name
        )  # as where TensorBoard is all there is
        assert found(few, copy=script_paths()[name]) == found(many, copy=script_paths()[name]) == set(), name
    text, mine = script_paths()["dqn"].read_text(), tmp_path / "my_dqn.py"
    for reward in ("reward / 10", "0.1 * reward", "np.clip(reward, -1, 1)"):
        mine.write_text(text.replace("action, reward, terminated", f"action, {reward}, terminated"))
        assert mine.read_text() != text and found(few, copy=mine) == found(many, copy=mine) == set(), reward
    mine.write_text(text)
    assert found(few, copy=mine) == {"low_values"}
    for known in (dict(args={"reward_scale": 0.05}), dict(charts__reward_scale=full(20))):
        assert found(few, copy=script_paths()["mod_sac"], **known) == set()
        assert found(full(0.1), copy=script_paths()["mod_sac"], **known) == {"low_values"}
        assert found(full(30), copy=script_paths()["mod_sac"], **known) == {"high_values"}


def test_noise_is_no_gap_between_evaluation_and_training():
    """Of few evaluation episodes, of training episodes, and where it is not known."""

    def found(score, episodes=20, **curves):
        curves = {"eval__episodic_return": full(score), "charts__episodic_return": full(1.0)} | curves
        case = training({"eval_episodes": episodes}, "Own-v0", charts__episodic_length=full(9), **curves)
        return "worse_evaluation" in rules_of(case)

    begins = dict(charts__episodic_return=np.r_[np.full(10, 0.5), np.full(90, 0.6)])  # random actions have 0.5
    half = dict(eval__episodic_return_std=full(0.5), **begins)
    assert not found(0.52, 100, **half) and found(0.52, 10_000, **half) and found(0.3, 100, **half)
    rare = dict(eval__episodic_return_std=full(0), charts__episodic_return=np.r_[np.zeros(90), 1.0, np.zeros(9)])
    often = rare | dict(charts__episodic_return=np.r_[np.zeros(80), np.ones(20)])
    assert not found(0.0, **rare) and found(0.0, **often)
    assert not found(0.0, **often | dict(eval__episodic_return_std=())) and not found(0.0, None, **often)


def test_committed_evaluations_that_chance_explains_have_no_finding():
    results = {
        "stopped": "games_TensorPendulum-v0__ppo_continuous_action_batched__isaac_settings__4",
        "modern": "games_CueContinuous-v0__sac_lstm__2",
        "games": "ppo_trxl_cue_Cue200-v0__ppo_lstm__200k__3",
    }
    found, _ = trainings(ROOT / "benchmark/results" / folder / f"{name}.json.gz" for folder, name in results.items())
    assert len(found) == 3 and [one.source for one in found if doctor.worse_evaluation(one)] == []


def test_training_and_evaluation_of_games_against_others_are_not_compared():
    """Unless the return of random actions is known."""
    draws = dict(charts__episodic_return=full(0.7), eval__episodic_return=full(0.5), charts__episodic_length=full(9))
    boards = [f"games/{name}" for name in BOARDS]
    sides = [f"team/{name}" for name, (_, _, teams) in TEAM_GAMES.items() if teams]
    for env_id in (*boards, *sides, "atari/pong_v3", "mpe/simple_adversary_v3"):
        assert training(env_id=env_id, **draws).low is None and "never_left" not in rules_of(
            training((), env_id, **draws)
        )
    for env_id in ("games/Cue-v0", "team/simple_spread_v3", "team/climbing", "ALE/Pong-v5"):
        assert training(env_id=env_id, **draws).low is not None, env_id
    assert "never_left" in rules_of(training((), "Own-v0", **draws))
    assert "never_left" not in rules_of(training((), "Own-v0", **draws, **{"eval__episodic_return_prey": full(0.5)}))
    assert training(**draws, **{"eval__episodic_return_prey": full(0.5)}).low == 22.6


def test_what_has_not_come_yet_is_no_fault():
    """Episodes are long, or it is at its beginning, or of a script whose arguments are texts."""
    few = {"charts__episodic_return": full(100)[:90], "charts__episodic_length": full(100)[:90]}
    rare = training(**few)
    rare = replace(rare, curves={name: (STEPS[: len(x)], x) for name, (_, x) in rare.curves.items()})
    curves = {**rare.curves, "losses/q_values": (STEPS, full(50)), "charts/learning_rate": (STEPS, full(1e-3))}
    assert doctor.examine(replace(rare, curves=curves)) is not None  # no episode ended in the last fifth
    early = {"total_timesteps": 1_000_000}
    assert "keeps_exploring" in rules_of(training(charts__epsilon=full(0.9)))
    assert "keeps_exploring" not in rules_of(training(early, charts__epsilon=full(0.9)))
    texts = {"buffer_size": "10000", "num_envs": "2", "total_timesteps": "500k", "gamma": "0.9"}
    assert rules_of(training(texts)) == rules_of(training())
    assert training({"gamma": 0}).gamma == 0 and training({"gamma": None}).gamma == 0.99


def test_seeds_disagree():
    def ending(*scores):
        return [training(eval__episodic_return=np.linspace(30, end, 100), seed=i) for i, end in enumerate(scores)]

    found = doctor.disagreement(ending(30, 200, 400))
    assert found[0].what == "The seeds disagree" and "30, 200, 400" in found[0].seen
    assert doctor.disagreement(ending(300, 350, 400)) == []
    assert doctor.disagreement(ending(30, 400)) == []  # two say nothing
    assert doctor.disagreement(ending(22.6, 22.6, 22.6)) == []
    assert doctor.disagreement(ending(10, 11, 12)) == []  # none has learned anything: random actions have 22
    lost = [replace(one, status="diverged: x is nan") for one in ending(30, 200, 400)]
    assert doctor.disagreement(lost) == []  # each has said so


# ---------------------------------------------------------------------- reading and the command
def a_run(folder, rows, status="finished", script="ppo", **args):
    folder.mkdir(parents=True)
    shutil.copy(script_paths()[script], folder / f"{script}.py")
    args = {"env_id": "CartPole-v1", "seed": 1, "total_timesteps": 100} | args
    config = {"script": f"{script}.py", "script_sha256": "", "args": args}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "status.json").write_text(json.dumps({"status": status}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


ROWS = [{"global_step": i, "wall_time": i, "losses/approx_kl": 0.5, "charts/episodic_return": 20.0} for i in range(50)]


def test_a_run_folder_is_read_while_it_trains(tmp_path):
    rows = [*ROWS, {"global_step": 50, "wall_time": 50, "losses/approx_kl": float("nan"), "note": "x"}]
    run = of_run(a_run(tmp_path / "run", rows, "running"))
    steps, values = run.curves["losses/approx_kl"]
    assert (steps == np.arange(50)).all() and (values == 0.5).all()  # what is no finite number is no point
    assert (run.env_id, run.script, run.seed, run.total, run.steps) == ("CartPole-v1", "ppo", 1, 100, 49)
    assert run.copy == tmp_path / "run" / "ppo.py"


def test_a_damaged_run_is_examined_and_not_drawn(solo, tmp_path):
    """A damaged row is left out, and there may be no status."""
    folder = a_run(tmp_path / "run", ROWS)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"losses/approx_kl": \xff\n')
    (folder / "status.json").unlink()
    run = of_run(folder)
    assert len(run.curves["losses/approx_kl"][0]) == 50 and run.status == ""
    assert solo("doctor", folder)[0] == 0
    refused(solo("plot", folder, "--out", tmp_path / "curve.png"), "nothing to draw", "cannot be read")


def test_a_run_without_rows_that_says_it_finished_has_lost_them(tmp_path):
    assert rules_of(of_run(a_run(tmp_path / "lost", []))) == ["broke_off"]
    begins = a_run(tmp_path / "begins", [], "running")
    with open(begins / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rules_of(of_run(begins)) == []  # its first row is still to come
    assert rules_of(of_run(begins)) == ["broke_off"]  # it was killed


def test_seeds_share_a_method(tmp_path):
    runs = [of_run(a_run(tmp_path / f"{i}", ROWS, seed=i, runs_dir=f"{i}")) for i in range(2)]
    other = of_run(a_run(tmp_path / "other", ROWS, learning_rate=0.1))
    assert runs[0].kind == runs[1].kind != other.kind


def test_the_command_names_cause_numbers_remedy_and_source(solo, tmp_path):
    for seed, end in enumerate((20.0, 200.0, 400.0)):
        rows = [row | {"charts/episodic_return": 20 + (end - 20) * i / 49} for i, row in enumerate(ROWS)]
        a_run(tmp_path / "runs" / f"{seed}", rows, seed=seed)
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "config.json").write_text("{}")
    (tmp_path / "runs" / "broken" / "status.json").write_text("{}")
    code, out, err = solo("doctor", tmp_path / "runs")
    assert code == 0 and err == ""
    assert out.count("The policy changes too fast: the learning rate is too large") == 3
    for part in (
        "approx_kl is 0.5",
        "--target-kl 0.02",
        "http://joschu.net",
        "The seeds disagree",
        "broken is damaged",
    ):
        assert part in out


def test_a_run_that_is_named_twice_is_examined_once(solo, tmp_path):
    run = a_run(tmp_path / "runs" / "0", ROWS)
    code, out, _ = solo("doctor", tmp_path / "runs", run, run)
    assert code == 0 and out.count("seed 1: 49 steps") == 1


def test_a_healthy_run_is_said_to_be_so(solo, tmp_path):
    rows = [row | {"losses/approx_kl": 0.01, "eval/episodic_return": 20.0 + 9 * i} for i, row in enumerate(ROWS)]
    code, out, _ = solo("doctor", a_run(tmp_path / "run", rows))
    assert code == 0 and "nothing looks wrong" in out and "solved" not in out


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_nothing_to_examine_is_refused(solo, tmp_path, path):
    (tmp_path / "empty").mkdir()
    refused(solo("doctor", tmp_path / path), "nothing to examine", path)


def test_a_tensorboard_folder_of_stable_baselines3(solo, tmp_path):
    writer = pytest.importorskip("tensorboard.compat.proto.event_pb2") and pytest.importorskip(
        "torch.utils.tensorboard"
    )
    folder = tmp_path / "CartPole-v1" / "PPO_1"
    with writer.SummaryWriter(str(folder)) as board:
        for i in range(30):
            board.add_scalar("rollout/ep_rew_mean", 20 + 9 * i, i)
            board.add_scalar("train/approx_kl", 0.01, i)
            board.add_scalar("train/entropy_loss", -0.69, i)
    code, out, _ = solo("doctor", folder)
    assert code == 0 and "The policy stays random" in out and "changes too fast" not in out


@pytest.mark.parametrize(
    ("tag", "values", "found"),
    [("losses/policy_loss", [1, float("nan"), float("nan")], ["diverged"]),
     ("train/value_loss", [1, 2, float("inf")], ["diverged"]),
     ("losses/value_loss", [float("nan"), 2, 1], []),  # the first row, before anything was learned
     ("losses/explained_variance", [float("nan")] * 3, [])],
)  # fmt: skip
def test_losses_in_tensorboard_that_stay_nan_have_diverged(tag, values, found, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboardX import SummaryWriter

    folder = tmp_path / "CartPole-v1__ppo__1__17"
    with SummaryWriter(str(folder)) as board:
        for step, value in enumerate(values):
            board.add_scalar(tag, value, 100 * step)
    run = of_tensorboard(folder)
    assert rules_of(run) == found and (not found or all(word in run.status for word in (tag, "step 200")))


def test_methods_of_two_libraries_are_not_seeds_of_one(solo, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboardX import SummaryWriter

    def write(name, tag, score):
        with SummaryWriter(str(tmp_path / name)) as board:
            for i in range(30):
                board.add_scalar(tag, 20 + score * i / 30, 100 * i)
                if name.endswith("17"):
                    board.add_scalar("losses/entropy", 0.6 if i < 15 else float("nan"), 100 * i)

    for seed in (1, 2):
        write(f"CartPole-v1__ppo__{seed}__17", "charts/episodic_return", 30)
        write(f"CartPole-v1/PPO_{seed}", "rollout/ep_rew_mean", 480)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a mean of nothing
        code, out, _ = solo("doctor", tmp_path)
    assert code == 0 and "cleanrl_ppo on" in out and "sb3_ppo on" in out and "all seeds" not in out


# ---------------------------------------------------------------------- trainings with a fault
SEEDED = (
    ROOT / "tests/data/faults"
)  # made by somebody who had not read the rules; its README says what is wrong in each
# Name -> what a finding says of its true cause.
CAUSES = {
    "ppo_wrong_sign": r"lines about the loss .*loss = objective \+",
    "ppo_ends_ignored": r"where episodes end .*bootstrap = next_value",
    "ppo_reward_scale": "The scale of the rewards is too large",
    "ppo_reward_log": "became NaN .*where episodes end|became NaN .*rewards",
    "ppo_nan_observation": "became NaN .*lines about observations",
    "ppo_offset": "lines about observations",
    "ppo_entropy": "--ent-coef is 1, .*stays random",
    "ppo_learning_rate": "--learning-rate is 2.5e-08.*The policy does not change",
    "ppo_continuous_action_sign_reward": r"lines about rewards .*np\.sign",
    "ppo_continuous_action_std": "--std-init is 0.01|The return never left",
    "ppo_continuous_action_eval_raw": "The evaluation is far below the training|lines about observations",
    "dqn_learning_rate": "--learning-rate is 0.1, the default 0.00025",
    "dqn_target_frozen": "the target network .*the targets do not bootstrap",
    "dqn_broadcast": r"squeeze\(1\)",
    "dqn_learning_starts": "No gradient step was made.*--learning-starts is 100000",
    "sac_target_entropy": "alpha_step.*The temperature grows without end",
}


def seeded(name, tmp_path):
    """A training of SEEDED, as a run folder."""
    folder = tmp_path / name
    shutil.copytree(SEEDED / name, folder)
    packed = folder / "metrics.jsonl.gz"
    (folder / "metrics.jsonl").write_bytes(gzip.decompress(packed.read_bytes()))
    return of_run(folder)


def test_the_cause_of_each_seeded_fault_is_named(tmp_path):
    made = [path.name for path in SEEDED.iterdir() if path.is_dir() and "healthy" not in path.name]
    assert set(made) <= set(CAUSES) and len(made) >= 15
    said = {name: " ".join(map(" ".join, doctor.examine(seeded(name, tmp_path)))) for name in made}
    missed = {name: words for name, words in said.items() if not re.search(CAUSES[name], words)}
    assert missed == {}


def test_most_faults_show_without_the_script(tmp_path):
    """As where a folder of TensorBoard is all there is."""
    made = [path.name for path in SEEDED.iterdir() if path.is_dir() and "healthy" not in path.name]
    bare = [replace(seeded(name, tmp_path), copy=None) for name in made]
    assert sum(bool(doctor.examine(one)) for one in bare) >= 12


@pytest.mark.parametrize("path", sorted(SEEDED.glob("*healthy*")), ids=lambda path: path.name)
def test_healthy_trainings_have_no_finding(path, tmp_path):
    assert doctor.examine(seeded(path.name, tmp_path)) == []


def test_results_that_solved_their_task_have_no_finding():
    found, problems = trainings([ROOT / "benchmark/results"])
    solved = [one for one in found if one.is_solved]
    assert not problems and len(solved) > 300
    assert [one.source for one in solved if doctor.examine(one)] == []
