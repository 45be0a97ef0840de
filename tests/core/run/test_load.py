"""`solorl.load`: the trained policy of a run folder for one's own code."""

import os
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import script
from safetensors.numpy import save_file

import solorl
from solorl import Run, RunArgs
from solorl.envs.guest import Guest
from solorl.errors import UsageError
from solorl.run import evaluation, load
from solorl.run.load import Play, play_script, play_wanted

SHORT = "--num-envs 2 --num-steps 64 --total-timesteps 512 --eval-every 256 --eval-episodes 2".split()


@pytest.fixture
def ppo(train):
    """The variables of a short training of `ppo`."""
    return train("ppo", *SHORT)


@pytest.fixture
def observations():
    return np.random.default_rng(1).uniform(-1, 1, (50, 4)).astype(np.float32)


def sentence(*words, **kwargs):
    """What `solorl.load` raises, one line."""
    with pytest.raises(UsageError) as error:
        solorl.load(*words, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---------------------------------------------------------------------- the policy
def test_it_acts_as_at_the_end_of_the_training(ppo, observations):
    policy = solorl.load(ppo["run"].dir, last=True)
    wanted = ppo["agent"].act(observations)
    assert policy(observations).tolist() == wanted.tolist() and set(wanted) == {0, 1}
    assert policy.env_id == "CartPole-v1" and policy.args.num_steps == 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_run_of_a_gpu_plays_where_there_is_none(ppo, observations):
    config = ppo["run"].dir / "config.json"
    config.write_text(config.read_text().replace('"device": "auto"', '"device": "cuda"'))
    policy = solorl.load(ppo["run"].dir, last=True)
    assert policy(observations).tolist() == ppo["agent"].act(observations).tolist()
    assert "torch sees 0 CUDA" in sentence(ppo["run"].dir, device="cuda")


def test_the_default_is_the_model_of_the_best_evaluation(ppo, observations):
    from safetensors.torch import load_file

    run_dir = ppo["run"].dir
    best = {name.removeprefix("agent."): value for name, value in load_file(run_dir / "model.safetensors").items()}
    best = {name: -value for name, value in best.items()}  # acts differently from the last one
    ppo["agent"].load_state_dict(best)
    from safetensors.torch import save_file

    save_file({f"agent.{name}": value for name, value in best.items()}, run_dir / "model.safetensors")
    wanted = ppo["agent"].act(observations).tolist()
    assert solorl.load(str(run_dir))(observations).tolist() == wanted
    assert solorl.load(run_dir, last=True)(observations).tolist() != wanted


def test_it_scores_what_solo_play_says(ppo, solo):
    from solorl.compute.device import CONFIRM, env_seed
    from solorl.run.evaluation import play_episodes

    policy = solorl.load(ppo["run"].dir)
    seeds = [env_seed(1, CONFIRM, 2**19 + i) for i in range(3)]  # those of `solo play`
    returns, _ = play_episodes([policy.make_env() for _ in seeds], policy, seeds)
    _, out, _ = solo("play", ppo["run"].dir, "--episodes", "3")
    assert out.startswith(f"CartPole-v1: {returns.mean():.1f} ± {returns.std():.1f} over 3")


@pytest.mark.slow
def test_a_run_in_jax_acts_as_it_evaluated(train, observations):
    pytest.importorskip("jax")
    v = train("ppo_jax", *SHORT)
    policy = solorl.load(v["run"].runs[0].dir, last=True)
    wanted = np.asarray(v["act"](v["run"].trainings.of(0, "params"), observations))
    assert policy(observations).tolist() == wanted.tolist() and set(wanted) == {0, 1}
    env = policy.make_env()
    assert env.spec.id == "CartPole-v1"


def test_make_env_takes_the_words_of_gymnasium(ppo):
    env = solorl.load(ppo["run"].dir).make_env(render_mode="rgb_array")
    env.reset(seed=1)
    assert env.render().ndim == 3


@pytest.mark.parametrize("obs", [np.float32(1.0), np.zeros(4, np.float32), [0.0] * 4, np.zeros((1, 3), np.float32)])
def test_observations_without_a_batch_or_of_another_shape_are_told(ppo, obs):
    with pytest.raises(UsageError, match=re.escape("policy(obs[None])[0]")):
        solorl.load(ppo["run"].dir)(obs)


@pytest.mark.parametrize("shape", [(), (3,), (3, 1), (1, 1), (2, 4)])
@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_continuous_action_jax"])
def test_a_file_that_normalizes_observations_takes_no_others(name, shape, train):
    """To subtract means of shape (3,) makes three observations of one number each."""
    run = train(name, "--env-id", "Pendulum-v1", "--num-steps", 64, "--total-timesteps", 128, "--eval-every", 0)["run"]
    policy = solorl.load(getattr(run, "dir", None) or run.runs[0].dir)
    assert policy(np.zeros((5, 3), np.float32)).shape == (5, 1)
    with pytest.raises(UsageError, match=re.escape("an observation has the shape (3,)")):
        policy(np.zeros(shape, np.float32))


# ---------------------------------------------------------------------- who plays and who trains
def test_a_load_inside_a_script_that_is_played_changes_nothing_for_it(tmp_path, monkeypatch):
    """A script may load the policy of another run, its teacher, before and after it makes its own run."""
    noted = []
    for name, body in (("student", "import solorl\nmake()\nload('teacher')\nmake()\n"), ("teacher", "make()\n")):
        (tmp_path / f"{name}.py").write_text(f"from tests_of_play import make, load\n{body}")

    def make():
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "student.py")])
        noted.append(Run(RunArgs(resume="")).play)

    def load(name):
        play_script(tmp_path / f"{name}.py", tmp_path, Play(model=name), neighbours=True)

    monkeypatch.setitem(sys.modules, "tests_of_play", SimpleNamespace(make=make, load=load))
    make()
    load("student")
    make()
    names = [play and play.model for play in noted]
    assert names == [None, "student", "teacher", "student", None]


@pytest.mark.parametrize("body", ["raise SystemExit(2)", "1 / 0", "import no_such_module", "def"])
def test_a_script_that_fails_leaves_no_play_after_it(tmp_path, body):
    (tmp_path / "mine.py").write_text(f"{body}\n")
    with pytest.raises((SystemExit, ZeroDivisionError, UsageError, SyntaxError)):
        play_script(tmp_path / "mine.py", tmp_path, Play(), neighbours=True)
    assert play_wanted() is None


@pytest.mark.parametrize("render", [False, True])
def test_environments_that_were_played_are_closed(render, ppo, monkeypatch):
    """A robot must be let go."""
    closed, played, play = [], [], evaluation.play_episodes
    monkeypatch.setattr(Guest, "close", lambda self: closed.append(self))
    monkeypatch.setattr(
        load, "play_episodes", lambda envs, *more, **named: played.extend(envs) or play(envs, *more, **named)
    )
    monkeypatch.setattr(load, "open_game", lambda *given: evaluation.open_game(*given[:2], None, given[3]))
    load.play_script(script("ppo"), ppo["run"].dir, Play(episodes=3, render=render), neighbours=False)
    assert len(played) == 3 and all(any(one is env for one in closed) for env in played)


def test_threads_that_load_at_once_get_their_own_runs(tmp_path):
    """A server may load its policies in a pool of threads; a script reads its run folder from sys.argv."""
    lines = ["import sys, time", "from solorl.run.load import LoadedPolicy, play_wanted as play", "time.sleep(0.01)"]
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text('{"script": "mine.py"}')
        (folder / "mine.py").write_text("\n".join([*lines, "play().take(LoadedPolicy(sys.argv[2], *[None] * 3))"]))
        save_file({"x": np.zeros(1)}, folder / "model.safetensors")
    before = [*sys.argv]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda folder: solorl.load(folder, trust_script=True), folders))
    assert [one.env_id for one in found] == list(map(str, folders)) and sys.argv == before


# ---------------------------------------------------------------------- what it must not change
def test_nothing_is_printed_and_all_global_state_is_restored(ppo, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mine.py", "--mine"])
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)

    def outside():
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), sys.excepthook
        return states, settings, list(sys.argv), list(sys.path), dict(os.environ), sys.modules["__main__"], Path.cwd()

    before, files = outside(), sorted(ppo["run"].dir.rglob("*"))
    capfd.readouterr()
    try:
        solorl.load(ppo["run"].dir)
        assert outside() == before and play_wanted() is None
        sentence(ppo["run"].dir / "nowhere")
        assert outside() == before and play_wanted() is None
    finally:
        torch.set_num_threads(1)
    assert capfd.readouterr() == ("", "") and sorted(ppo["run"].dir.rglob("*")) == files


@pytest.mark.slow
def test_the_settings_of_jax_are_restored(train):
    jax = pytest.importorskip("jax")
    run_dir = train("ppo_jax", *SHORT)["run"].runs[0].dir
    folder, seconds = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 2.5)
        solorl.load(run_dir)
        found = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
        assert found == (None, 2.5)
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)


# ---------------------------------------------------------------------- what is refused
def test_a_module_next_to_the_script_that_is_gone_is_named(train, tmp_path, monkeypatch):
    mine, neighbour = tmp_path / "mine.py", tmp_path / "beside_it.py"
    mine.write_text(script("ppo").read_text().replace("import torch\n", "import beside_it\nimport torch\n", 1))
    neighbour.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    run_dir = train(mine, *SHORT)["run"].dir
    sys.modules.pop("beside_it")
    neighbour.unlink()
    assert sentence(run_dir) == f"{mine} needs beside_it, which is not installed"


def test_an_unknown_script_is_not_executed_unless_trusted(ppo, observations, tmp_path, capsys):
    copy = ppo["run"].dir / "ppo.py"
    mark = tmp_path / "executed"
    copy.write_text(copy.read_text() + f"\nopen({str(mark)!r}, 'w')\nprint('loud')\n")
    capsys.readouterr()
    assert "trust_script=True" in sentence(ppo["run"].dir, trust_script=False) and not mark.exists()
    policy = solorl.load(ppo["run"].dir, trust_script=True)
    assert mark.exists() and len(policy(observations)) == 50 and capsys.readouterr().out == ""


def test_a_script_of_ones_own_is_executed_where_one_has_started_it(train, tmp_path, monkeypatch, observations):
    """Not where the home folder does not know of it: then the run comes from elsewhere."""
    own = tmp_path / "own.py"
    own.write_text(script("ppo").read_text() + "\n# mine\n")
    run_dir = train(own, *SHORT)["run"].dir
    assert len(solorl.load(run_dir)(observations)) == 50
    notes = Path(os.environ["XDG_STATE_HOME"], "solorl/started.txt")
    assert notes.read_text().count(repr(str(own))) == 1 and "algorithms" not in notes.read_text()
    train(own, "--resume", run_dir, "--total-timesteps", 640, "--resume-changed")
    assert notes.read_text().count(repr(str(own))) == 1
    with monkeypatch.context() as changed:
        for elsewhere in (tmp_path / "home", own / "no folder"):
            changed.setenv("XDG_STATE_HOME", str(elsewhere))
            assert "a file that you have started here" in sentence(run_dir)
        train(own, *SHORT)  # where nothing can be noted it trains all the same
    own.write_text(own.read_text() + "# changed\n")
    assert len(solorl.load(run_dir)(observations)) == 50  # the copy in the run folder is what was started here


def test_errors_are_exceptions_of_one_sentence(ppo, tmp_path):
    run_dir = ppo["run"].dir
    name = run_dir.name[:-1]
    assert sentence(run_dir.with_name(name)).endswith(f"did you mean {run_dir.name}?")
    assert "is not a run folder: it has no config.json" in sentence(tmp_path)
    assert sentence("hf://me/ppo") == "hf://me/ppo is on the hub; `solo pull` makes a run folder of it"
    (run_dir / "model.safetensors").write_bytes(b"torn")
    assert "model.safetensors cannot be read" in sentence(run_dir)
    (run_dir / "model_last.safetensors").unlink()
    assert sentence(run_dir, last=True).endswith("the run writes it at its end")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("raise SystemExit(7)", "ppo.py ended before run.close (7)"),
        ("import envpool_nowhere", "envpool_nowhere"),
        ("run.close = lambda *_: None", "came to its end without run.close"),
    ],
)
def test_a_script_that_does_not_reach_close_is_told(ppo, line, said):
    copy = ppo["run"].dir / "ppo.py"
    copy.write_text(copy.read_text().replace("    envs.close()\n", f"    {line}\n"))
    with pytest.raises((UsageError, ModuleNotFoundError), match=re.escape(said)):
        solorl.load(ppo["run"].dir, trust_script=True)
