"""The parts of a run, each without a run: folder, meter, checkpoints, evaluator."""

import errno
import json
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import refused, rows, script
from safetensors.numpy import load_file

from solorl import Run
from solorl.args.arguments import RunArgs
from solorl.compute.device import CONFIRM, EVALUATE, TRAIN, env_seed
from solorl.compute.ranks import Ranks
from solorl.compute.speed import GradientStep, Metrics
from solorl.errors import UsageError
from solorl.run.evaluation import Evaluator
from solorl.run.folder import RunFolder, new_path
from solorl.run.meter import Diverged, Meter
from solorl.run.saving import Checkpoints
from solorl.runfolder import write_status


def new_folder(path):
    """A folder as a run opens it."""
    folder = RunFolder(path)
    folder.make()
    folder.open(RunArgs(), script("ppo"), "cpu", {})
    return folder


def test_a_metric_named_like_the_step_does_not_replace_it():
    meter = Meter()
    meter.add_row(7, {"global_step": 1.0, "wall_time": -1.0, "mine": 2.0})
    (row,) = meter.take_rows()
    assert list(row) == ["global_step", "wall_time", "mine"] and row["global_step"] == 7 and row["wall_time"] >= 0


# ---------------------------------------------------------------------- the folder
def test_a_folder_of_the_same_second_gets_a_number(tmp_path):
    first, second = new_folder(tmp_path / "a"), new_folder(tmp_path / "a")
    assert (first.path.name, second.path.name) == ("a", "a-2")
    config = json.loads((second.path / "config.json").read_text())
    assert (config["format"], config["script"], config["args"]["seed"]) == (2, "ppo.py", 1)
    assert (second.path / "ppo.py").is_file()


def test_a_folder_that_is_locked_or_cannot_be_made_is_refused(tmp_path):
    folder = new_folder(tmp_path / "a")
    with pytest.raises(UsageError, match=f"another process is training in {folder.path}; it must end first"):
        RunFolder(folder.path).lock()
    folder.unlock()
    again = RunFolder(folder.path)
    again.lock()
    again.unlock()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file/a cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "a").make()
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")  # not a name that is taken: to the next one there is no end
    with pytest.raises(UsageError, match="link/a cannot be written"):
        RunFolder(tmp_path / "link" / "a").make()
    with pytest.raises(UsageError, match="gone cannot be written: No such file"):
        RunFolder(tmp_path / "gone").lock()


def test_what_could_not_be_written_is_missing_until_it_is(tmp_path, capsys):
    folder = new_folder(tmp_path / "a")
    with folder.writing("status.json"):
        write_status(folder.path, "running", {"global_step": 3})
    folder.write_rows([{"global_step": 1, "x": 2.0}])
    assert folder.missing() == {} and rows(folder.path) == [{"global_step": 1, "x": 2.0}]
    with folder.writing("model.safetensors", kept=True):
        raise OSError(errno.ENOSPC, "No space left on device")
    sentence = "model.safetensors could not be written (No space left on device); the one before it is kept\n"
    assert capsys.readouterr().err == f"warning: {sentence}"
    assert folder.missing() == {"model.safetensors": "No space left on device"}
    with folder.writing("model.safetensors"):
        (folder.path / "model.safetensors").touch()
    assert folder.missing() == {}
    (folder.path / "status.json").unlink()
    assert folder.missing() == {"status.json": "it is gone"}


def test_two_runs_of_the_same_second_have_their_own_replay(tmp_path):
    """The second learns its name when it makes its folder."""
    both = []
    for _ in range(2):
        folder = RunFolder(new_path(RunArgs(runs_dir=str(tmp_path), exp_name="same"), script("dqn")).with_name("same"))
        checkpoints = Checkpoints(folder.path)
        replay = type("Replay", (), {"arrays": {"obs": np.zeros((4, 1))}, "inserted": 2})()
        checkpoints.name({"replay": replay})
        folder.make()
        checkpoints.open(folder.path)
        (folder.path / "checkpoint").mkdir()
        checkpoints.save(2, {}, with_replays=True)
        both.append(folder.path)
    assert [path.name for path in both] == ["same", "same-2"]
    assert [len(list((path / "replay" / "replay").glob("*"))) for path in both] == [1, 1]


# ---------------------------------------------------------------------- the meter
def test_rows_have_means_since_the_last_row_and_name_what_is_not_finite():
    meter = Meter()
    meter.learned({"losses/x": 1.0})
    meter.learned({"losses/x": 5.0}, number=2)
    meter.episodes(4, np.array([[1.0, 2.0], [1.0, 2.0]]), np.array([[False, False], [True, False]]))
    values = meter.report(4, {"charts/learning_rate": 0.5})
    assert values["losses/x"] == 2.0 and values["charts/episodic_return"] == 2.0 == values["charts/episodic_length"]
    episode, row = meter.take_rows()
    assert episode["global_step"] == 4 == row["global_step"] and "charts/episodic_return" not in row
    assert "losses/x" not in meter.report(8, {}) and len(meter.take_rows()) == 1
    with pytest.raises(Diverged, match="losses/y is inf"):
        meter.report(12, {"losses/y": torch.tensor(float("inf"))})
    assert meter.rows == []


def test_trackers_have_the_means_of_all_episodes_since_the_last_row():
    """Also of those whose rows an evaluation or a checkpoint has written before, and after a resume."""
    meter, again = Meter(), Meter()
    meter.episode(2, 1.0, 2)
    written = meter.take_rows()
    meter.episode(4, 3.0, 4)
    again.resume({**meter.counters(), "step": 4})
    for each in (meter, again):
        assert (
            each.report(6, {"x": 1.0}).items() >= {"charts/episodic_return": 2.0, "charts/episodic_length": 3.0}.items()
        )
        assert "charts/episodic_return" not in each.report(8, {"x": 1.0})
    assert [row.get("charts/episodic_return") for row in written + meter.take_rows()] == [1.0, 3.0, None, None]


@pytest.mark.parametrize("value", [np.arange(3), None, "high", torch.ones(2)])
def test_a_metric_that_is_not_a_number_is_named(value):
    meter = Meter()
    with pytest.raises(UsageError, match="mine/x"):
        meter.report(1, {"losses/policy_loss": 1.0, "mine/x": value})
    meter.learned({"mine/y": value if isinstance(value, np.ndarray) else torch.ones(2)})
    with pytest.raises(UsageError, match="mine/y"):
        meter.report(1, {"mine/x": torch.ones(1)})
    assert meter.take_rows() == []


def test_a_metric_of_a_file_in_jax_that_is_not_a_number_is_named():
    """Means are over gradient steps and iterations, not over what the metric itself has."""
    seeds, meter = pytest.importorskip("solorl.run.seeds"), Meter()
    runs = SimpleNamespace(_active=[0], runs=[SimpleNamespace(meter=meter)])
    seeds.Runs.learned(runs, {"mine/x": np.array([[3.0, 5.0]])}, np.array([[2, 2]]))
    assert meter.report(1, {})["mine/x"] == 2.0
    seeds.Runs.learned(runs, {"mine/x": np.ones((1, 2, 3))}, np.array([[2, 2]]))
    with pytest.raises(UsageError, match="mine/x"):
        meter.report(2, {})


def test_numbers_of_numpy_are_written_as_numbers():
    meter = Meter()
    meter.reach(np.int64(8))
    meter.episode(np.int64(4), np.float32(0.5), np.int64(3))
    meter.episodes(np.int64(6), np.ones((1, 2), np.float32), np.array([[True, False]]))
    meter.report(np.int64(8), {"charts/rate": np.float32(0.25)})
    taken = meter.take_rows()
    assert json.loads(json.dumps(taken)) == taken and [row["global_step"] for row in taken] == [4, 6, 8]
    assert taken[0]["charts/episodic_return"] == 0.5 and json.dumps(meter.step) == "8"


def test_two_gradient_steps_may_share_the_name_of_a_metric():
    """Where metrics are vectors; also after a resume."""
    meter, again = Meter(), Meter()

    def learn(meter):
        meter.learned(Metrics(("losses/x", "losses/a"), torch.tensor([1.0, 2.0])))
        meter.learned(Metrics(("losses/x", "losses/b"), torch.tensor([3.5, 8.0])))

    learn(meter)
    meter.learned(Metrics(("losses/x", "losses/a"), torch.tensor([1.0, 2.0])))
    again.resume({**meter.counters(), "step": 4})
    for each in (meter, again):
        learn(each)
        means = each.report(8, {})
        assert {name: means[f"losses/{name}"] for name in "xab"} == {"x": 2.0, "a": 2.0, "b": 8.0}


def test_a_meter_goes_on_where_it_was():
    meter, again = Meter(), Meter()
    meter.episodes(2, np.array([1.0, 3.0]), np.array([True, False]))
    meter.learned({"losses/x": 4.0}, 2)
    assert meter.is_due("log", 4, 5) and not meter.is_due("log", 4, 7) and not meter.is_due("save", 0, 100)
    again.resume({**meter.counters(), "step": 7})
    assert not again.is_due("log", 4, 7) and again.is_due("log", 4, 8)
    assert again.recent_return == 1.0 and again.returns.tolist() == [0.0, 3.0]
    with pytest.raises(ValueError, match="there were 2 environments, not 3"):
        Meter().resume(meter.counters(), num_envs=3)
    assert again.report(8, {})["losses/x"] == 2.0 and again.wall_time() >= meter.counters()["wall_time"] * 0.5
    again.begin_episodes([1])
    assert again.returns.tolist() == [0.0, 0.0] and again.lengths.tolist() == [0, 0]


# ---------------------------------------------------------------------- checkpoints
def test_parts_come_back_and_what_is_not_finite_is_named(tmp_path):
    layer, numbers = torch.nn.Linear(2, 1), np.arange(3.0)
    saved = Checkpoints(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    saved.name({"layer": layer, "numbers": numbers})
    saved.check_finite({"returns": np.zeros(2)})
    counters = Meter().counters() | Evaluator(RunArgs()).counters() | {"iteration": 2, "step": 9, "metrics_bytes": 0}
    saved.save(9, counters, with_replays=False)
    saved.save_model("model.safetensors", {"step": "9"})
    wanted = layer.weight.detach().clone()

    layer.weight.data.fill_(float("nan"))
    numbers += 7
    with pytest.raises(Diverged, match=r"layer\.weight is nan"):
        saved.check_finite({})
    again = Checkpoints(tmp_path)
    again.name({"layer": layer, "numbers": numbers})
    assert again.resume() == [] and again.resumed["iteration"] == 2 and again.newest == 9
    assert torch.equal(layer.weight, wanted) and numbers.tolist() == [0, 1, 2]
    layer.weight.data.zero_()
    again.load_model("model.safetensors")
    assert torch.equal(layer.weight, wanted)


def test_what_learns_and_is_in_no_checkpoint_is_said(tmp_path, capfd):
    def told(**parts):
        checkpoints = Checkpoints(tmp_path)
        checkpoints.steps += [GradientStep(loss, net, adam, 1.0, lambda f: f, fast=True) for net, adam in learning]
        checkpoints.name(parts)
        checkpoints.open(tmp_path)
        return capfd.readouterr().err

    def loss(net, x):
        return net(x).sum(), {}

    learning = [(net := torch.nn.Linear(2, 1), torch.optim.Adam(net.parameters())) for _ in range(2)]
    (actor, adam), (critic, other) = learning
    assert told(actor=actor, critic=critic, adam=adam, other=other) == ""
    state = {"state_dict": dict, "load_state_dict": print}
    assert told(actor=actor, adam=adam, both=SimpleNamespace(critic=critic, other=other, **state)) == ""  # own class
    assert "Adam of the gradient step of loss" in told(actor=actor, critic=critic, adam=adam)
    assert "Parameter of the gradient step of loss" in told(actor=actor, adam=adam, other=other)
    assert "Adam and Parameter of" in told(actor=actor, adam=adam)


def test_a_model_in_bfloat16_comes_back(tmp_path):
    saved, layer = Checkpoints(tmp_path), torch.nn.Linear(2, 1).bfloat16()
    wanted = layer.weight.detach().clone()
    saved.name({"layer": layer})
    saved.save_model("model.safetensors", {})
    layer.weight.data.zero_()
    saved.load_model("model.safetensors")
    assert torch.equal(layer.weight, wanted) and layer.weight.dtype == torch.bfloat16
    assert load_file(tmp_path / "model.safetensors")["layer.weight"].tolist() == wanted.tolist()


@pytest.mark.parametrize("part", [3, [1.0], SimpleNamespace(seen={1}), SimpleNamespace(inside={"a": (1, object())})])
def test_what_cannot_be_saved_is_refused_at_once(part, tmp_path):
    with pytest.raises(UsageError, match=r"^the part odd: a checkpoint cannot hold .*") as error:
        Checkpoints(tmp_path).name({"layer": torch.nn.Linear(2, 1), "odd": part})
    assert "\n" not in str(error.value)


def test_what_does_not_fit_is_a_sentence(tmp_path):
    saved = Checkpoints(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    assert saved.resume() == [] and saved.resumed == {}  # killed before its first checkpoint
    saved.name({"layer": torch.nn.Linear(2, 1)})
    saved.save_model("model.safetensors", {})
    saved.name({"layer": torch.nn.Linear(3, 1)})
    with pytest.raises(UsageError, match=r"the model .*model.safetensors does not fit: .*size mismatch"):
        saved.load_model("model.safetensors")
    with pytest.raises(UsageError, match=r"model_last.safetensors cannot be read .*; the run writes it at its end"):
        saved.load_model("model_last.safetensors")
    (tmp_path / "status.json").write_text('{"status": "finished", "checkpoint": 9}')
    with pytest.raises(
        UsageError, match=r"has lost its checkpoint \(its status is finished, its newest step 9\) and is left as it"
    ):
        saved.resume()
    (tmp_path / "status.json").write_text('{"status": "diverged: q is nan", "checkpoint": null}')
    sentence = r"has lost its checkpoint \(its status is diverged: q is nan, its newest step None\)"
    with pytest.raises(UsageError, match=sentence):
        saved.resume()


# ---------------------------------------------------------------------- the evaluator
def test_an_evaluator_knows_its_best_and_confirms_on_fresh_seeds(monkeypatch):
    seeds = []

    class Counting(gym.Env):
        observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), float(action), True, False, {}

    args = SimpleNamespace(seed=1, env_id="Counting", eval_episodes=3, eval_more=False, target_return=1.0)
    evaluator, make_env = Evaluator(args), lambda env_id: Counting()
    good, bad = (lambda obs: np.ones(len(obs), int)), (lambda obs: np.zeros(len(obs), int))
    assert evaluator.score is None and evaluator.confirm(good, make_env) is None
    assert evaluator.evaluate(5, good, make_env) == {
        "eval/episodic_return": 1.0, "eval/episodic_return_std": 0.0, "eval/episodic_length": 1.0
    }  # fmt: skip
    assert evaluator.improved and (evaluator.best, evaluator.last) == (1.0, (5, 1.0, 0.0))
    assert evaluator.confirm(bad, make_env) == 0.0 and evaluator.confirm(good, make_env) == 1.0
    assert len(set(seeds)) == 9 and set(seeds[3:]) == {env_seed(1, CONFIRM, i) for i in range(6)}
    evaluator.evaluate(6, bad, make_env)
    assert not evaluator.improved and evaluator.best == 1.0 and evaluator.confirm(good, make_env) is None
    again = Evaluator(args)
    again.resume(evaluator.counters())
    assert again.best == 1.0 and again.score == 0.0
    for known in (evaluator.counters(), {**evaluator.counters(), "confirmed": None, "confirmations": 2}):
        fewer = Evaluator(SimpleNamespace(**{**vars(args), "eval_episodes": 2 if known["confirmed"] else 3}))
        fewer.resume({name: value for name, value in known.items() if value is not None})
        fewer.evaluate(7, good, make_env)
        seeds.clear()
        fewer.confirm(good, make_env)
        assert seeds == [env_seed(1, CONFIRM, 6 + i) for i in range(fewer.args.eval_episodes)]
    with pytest.raises(Diverged, match="eval/episodic_return is nan"):
        monkeypatch.setattr(Counting, "step", lambda self, action: (np.zeros(1), np.nan, True, False, {}))
        evaluator.evaluate(7, good, make_env)


class Scored(gym.Env):
    """Every episode is one step, whose reward is the action times a number that the seed decides."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(100)
    worth: dict[int, float] = {}  # noqa: RUF012
    seeds: list[int] = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.now = self.worth[seed]
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), float(action) * self.now, True, False, {}


@pytest.fixture
def more(monkeypatch):
    """`more(action)` evaluates with `--eval-more` two episodes worth 1 and 3, then perhaps two worth 0 and 2."""
    monkeypatch.setattr(Scored, "worth", {env_seed(1, EVALUATE, i): worth for i, worth in enumerate((1, 3, 0, 2))})
    monkeypatch.setattr(Scored, "seeds", [])

    def evaluate(action, target=None, keep=False):
        if not keep:
            args = SimpleNamespace(seed=1, env_id="Scored", eval_episodes=2, eval_more=True, target_return=target)
            evaluate.evaluator = Evaluator(args)
        Scored.seeds.clear()
        return evaluate.evaluator.evaluate(5, lambda obs: np.full(len(obs), action), lambda env_id: Scored())

    return evaluate


def test_the_best_evaluation_so_far_gets_as_many_episodes_again(more):
    assert more(2) == {
        "eval/episodic_return": 3.0, "eval/episodic_return_std": 5**0.5, "eval/episodic_length": 1.0,
        "eval/episodes": 4,
    }  # fmt: skip
    assert list(Scored.seeds) == [env_seed(1, EVALUATE, i) for i in range(4)]
    row = more(1, keep=True)  # 2 is not better than 3
    assert (row["eval/episodic_return"], row["eval/episodes"], len(Scored.seeds)) == (2.0, 2, 2)
    assert not more.evaluator.improved and more.evaluator.best == 3.0


def test_an_evaluation_that_is_best_only_by_half_does_not_count(more):
    more(3)
    assert more.evaluator.best == 4.5
    more.evaluator.best = 5.0
    row = more(3, keep=True)  # the first half has a mean of 6, all have one of 4.5
    assert row["eval/episodes"] == 4 and not more.evaluator.improved and more.evaluator.best == 5.0


def test_a_target_is_reached_by_all_episodes_only(more):
    """Also where an earlier evaluation was better, but was not confirmed."""
    more(2, target=4.0)
    assert more.evaluator.last[1] == 3.0 and more.evaluator.confirm(None, None) is None
    more.evaluator.best = 9.0
    assert more(2, target=4.0, keep=True)["eval/episodes"] == 4 and more.evaluator.confirm(None, None) is None


def test_the_number_of_episodes_is_resumed(more):
    more(2)
    saved = more.evaluator.counters()
    again = Evaluator(more.evaluator.args)
    again.resume(saved)
    assert (again.episodes, again.best, again.last) == (4, 3.0, more.evaluator.last)


def test_other_environments_give_a_metric_and_no_score(more):
    """With the same seeds, in environments of their own; whatever the policy scores there, the score is another one."""

    class Twice(Scored):
        def step(self, action):
            obs, reward, *rest = super().step(action)
            return obs, 2 * reward, *rest

    args = SimpleNamespace(seed=1, env_id="x", eval_episodes=2, eval_more=False, target_return=None)
    evaluator, policy = Evaluator(args), lambda obs: np.ones(len(obs), int)
    row = evaluator.evaluate(5, policy, lambda env_id: Scored(), {"vs_other": lambda env_id: Twice()})
    assert (row["eval/episodic_return"], row["eval/episodic_return_vs_other"]) == (2.0, 4.0)
    assert evaluator.best == evaluator.score == 2.0 and Scored.seeds == 2 * [env_seed(1, EVALUATE, i) for i in (0, 1)]


# ---------------------------------------------------------------------- ranks; more in test_multigpu.py
def test_several_processes_for_a_script_of_one_are_refused(monkeypatch, capsys):
    """The sentence of a rank that is not the first one waits: rank 0, which says the same, ends it meanwhile."""
    waited: list[float] = []
    monkeypatch.setattr("solorl.errors.time.sleep", waited.append)
    monkeypatch.delenv("RANK", raising=False)
    assert (Run(RunArgs()).rank, Run(RunArgs()).world_size) == (0, 1)
    name = Run(RunArgs()).script.name
    cases = {
        ("0", "1"): "",
        ("1", "2"): f"{name} trains in one process, but WORLD_SIZE is 2; start it without torchrun and without --nproc",
        ("2", "2"): "RANK and WORLD_SIZE must be numbers, RANK the smaller one, not '2' and '2'",
        ("", "1"): "RANK and WORLD_SIZE must be numbers, RANK the smaller one, not '' and '1'",
        ("0", "two"): "RANK and WORLD_SIZE must be numbers, RANK the smaller one, not '0' and 'two'",
    }
    for (rank, world_size), sentence in cases.items():
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        if not sentence:
            assert Run(RunArgs()).rank == 0
            continue
        waited.clear()
        with pytest.raises(SystemExit) as end:
            Run(RunArgs())
        refused((end.value.code, *capsys.readouterr()), sentence)
        assert bool(waited) == (rank not in ("0", ""))


def test_alone_a_rank_gets_back_what_it_gives():
    ranks, tensors = Ranks(), [torch.ones(2), torch.zeros(3, 1)]
    assert ranks.everyone(3) == [3] and all(map(torch.equal, ranks.gather(tensors, 1), tensors))
    ranks.close()


def test_the_first_environments_are_those_of_a_share(monkeypatch):
    """With seeds that the environments of no other rank have."""
    run = Run(RunArgs())
    run.rank = 1
    first = [gym.make("CartPole-v1").reset(seed=env_seed(1, TRAIN, 2 + i))[0] for i in range(2)]
    envs = gym.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    np.testing.assert_array_equal(run.reset(envs), np.array(first, np.float32))


def test_a_loop_before_the_folder_is_opened_ends_before_the_training(train, tmp_path):
    text = script("ppo").read_text()
    line = next(line for line in text.splitlines() if "run.resume(" in line)
    (tmp_path / "hacked.py").write_text(text.replace(line, "    start = 0"))
    train(tmp_path / "hacked.py", "--total-timesteps", "1024", code=2)
    assert train.out.splitlines()[-1].startswith("error: run.resume(...) must come before run.loop")
    assert not list((tmp_path / "runs").glob("*/*"))


def test_a_script_without_its_close_is_told(tmp_path):
    text = script("ppo").read_text()
    (tmp_path / "hacked.py").write_text("".join(line for line in text.splitlines(True) if "run.close(" not in line))
    words = [sys.executable, tmp_path / "hacked.py", "--total-timesteps", "512", "--num-envs", "1", "--eval-every", "0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "warning: runs/" in done.stderr
    assert done.stderr.endswith("the script ended without run.close, so there is no last model\n")
