"""A run folder that somebody else has made: whatever it holds, one sentence, and nothing is executed or overwritten."""

import hashlib
import importlib
import json
import math
import os
import shutil
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import own_registry, refused, rows, run, script
from safetensors.numpy import load_file, save_file

import solorl
from solorl import errors, machine, trust
from solorl.args.arguments import RunArgs, saved_arguments
from solorl.checkpoints import checkpoint as state
from solorl.checkpoints.replay import ReplayLog
from solorl.errors import UsageError
from solorl.files import write_atomically
from solorl.run import pictures
from solorl.run.seeds import arguments_of

TINY = "--num-envs 2 --num-steps 32 --total-timesteps 128 --eval-episodes 1".split()
MORE = "--total-timesteps 192 --resume-changed".split()
GONE = object()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("original")
    done = run(sys.executable, script("ppo"), *TINY, "--runs-dir", folder)
    assert done.returncode == 0, done.stderr
    return next(folder.iterdir())


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "runs" / "copy")


def change(tree, place, value):
    """Replace what is at `place`, names and numbers; take it away where the value is GONE."""
    *way, last = place
    for name in way:
        tree = tree[name]
    if value is GONE:
        del tree[last]
    else:
        tree[last] = value


def with_state(run_dir, place, value):
    """Change the state.json of the newest checkpoint, with the right sums; the other one is gone."""
    *others, newest = state.steps_in(run_dir / "checkpoint")
    for other in others:
        shutil.rmtree(other)
    tree = json.loads((newest / "state.json").read_text())
    change(tree, place, value)
    (newest / "state.json").write_text(json.dumps(tree))
    sums = {name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in state.FILES}
    (newest / "manifest.json").write_text(json.dumps({"format": 1, "sha256": sums}))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def left_alone(train, run_dir, *fragments):
    """Resuming is refused with one sentence, exit code 2, and every file is as it was."""
    before = contents(run_dir)
    train("ppo", "--resume", run_dir, *MORE, code=2)
    assert len(train.out.strip().splitlines()) == 1 and "Traceback" not in train.out, train.out
    for fragment in fragments:
        assert fragment in train.out, train.out
    assert contents(run_dir) == before


# ---------------------------------------------------------------------- state.json
def test_the_name_of_a_generator_calls_nothing(train, copy, monkeypatch):
    monkeypatch.setattr(np.random, "test", lambda: pytest.fail("a checkpoint has called NumPy's tests"), raising=False)
    place = ("parts", "envs", "envs", 0, "start", "generator")
    with_state(copy, place, {"bit_generator": "test", "state": {}})
    left_alone(train, copy, "the part envs of the checkpoint does not fit: state must be for a PCG64 RNG")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("run",), GONE),
        (("run", "iteration"), GONE),
        (("run", "iteration"), "1"),
        (("run", "returns"), {"$array": "/random/torch"}),
        (("parts",), 1),
        (("parts", "agent"), None),
        (("parts", "optimizer"), {}),
        (("parts", "envs"), {}),
        (("parts", "envs", "envs"), GONE),
        (("parts", "envs", "envs", 0), None),
        (("parts", "envs", "envs", 1, "start", "seed"), "x"),
        (("parts", "envs", "autoreset"), {"$array": "/random/torch"}),
        (("parts", "envs", "spaces", 0, "bit_generator"), "MT19937"),
    ],
)
def test_a_checkpoint_that_is_well_formed_and_wrong_is_one_sentence(place, value, train, copy):
    with_state(copy, place, value)
    left_alone(train, copy, "does not fit: ")


def test_actions_that_the_environment_refuses_restart_the_episode(train, copy):
    with_state(copy, ("parts", "envs", "envs", 1, "actions"), {"$array": "/random/torch"})
    train("ppo", "--resume", copy)
    assert "did not replay exactly, so the running episodes of environments [1] restart" in train.out


@pytest.mark.parametrize(
    "text", ["{", "[" * 10**5, '{"run": {"$array": "x"}}', '{"$items": [[[], 1]]}', '{"$tuple": 1}']
)
def test_a_checkpoint_that_cannot_be_decoded_is_damaged(text, train, copy):
    with_state(copy, ("run", "step"), 1)
    newest = state.steps_in(copy / "checkpoint")[-1]
    (newest / "state.json").write_text(text)
    sums = {name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in state.FILES}
    (newest / "manifest.json").write_text(json.dumps({"format": 1, "sha256": sums}))
    left_alone(train, copy, f"{newest.name} is malformed", "the run is left as it is")


def test_arrays_are_not_repeated_to_fit():
    for part in (np.zeros(3), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"its shape is \(1,\), not \(3,\)"):
            state.restore(part, part[:1] + 1)
        assert not part.any()


# ---------------------------------------------------------------------- config.json, together.json, metrics.jsonl
@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("args",), [], "config.json does not fit: "),
        (("script",), GONE, "its config.json cannot be read"),
        (("script",), 5, "is a run of 5, not of ppo.py"),
        (("args", "gamma"), math.nan, "--gamma is nan"),
        (("args", "num_steps"), 10**400, "--num-steps is too large: it must be smaller than 2**63"),
    ],
)
def test_a_config_that_is_well_formed_and_wrong_is_one_sentence(place, value, words, train, copy):
    config = json.loads((copy / "config.json").read_text())
    change(config, place, value)
    (copy / "config.json").write_text(json.dumps(config))
    left_alone(train, copy, words)


@pytest.mark.parametrize("text", ["", "[]", '{"runs": []}', '{"runs": ["copy", "../b"]}', '{"runs": 1}'])
def test_a_list_of_seeds_that_cannot_be_names_no_other_folder(text, tmp_path):
    (tmp_path / "together.json").write_text(text)
    with pytest.raises(UsageError, match="was trained alone; continue each"):
        arguments_of(SimpleNamespace(resume=str(tmp_path), num_seeds=2), 1)


def test_rows_of_metrics_that_cannot_be_drawn_are_left_out(tmp_path):
    good = {"global_step": 5, "charts/episodic_return": 1.0, "note": "x"}
    bad = [3, [], "global_step", None, {}, {"charts/episodic_return": 1}, good | {"global_step": "x"},
           {"global_step": 10**400}, {"global_step": 7, "eval/episodic_return": 2}]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [good, *bad, good]))
    pictures.draw_learning_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", "title", 20)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------------- modules that a folder names
WALK = """
import gymnasium as gym
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
open("executed", "a").close()
class Walk(CartPoleEnv):
    pass
gym.register("Walk-v0", __name__ + ":Walk", max_episode_steps=5)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to be in, which is not on the path of Python; `here(path, text)` writes a module there."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "notes"))
    own_registry(monkeypatch)

    def write(path, text=WALK):
        path = tmp_path / "here" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        forget()
        return path

    def forget():
        """A new process has imported nothing of this."""
        for name in [name for name in sys.modules if name.partition(".")[0] in ("walks", "minatar", "here")]:
            monkeypatch.delitem(sys.modules, name)
        gym.registry.pop("Walk-v0", None)
        importlib.invalidate_caches()

    write.forget = forget
    return write


def named(run_dir, env_id, **args):
    """The folder, whose config.json names this environment."""
    config = json.loads((run_dir / "config.json").read_text())
    config["args"] |= {"env_id": env_id, **args}
    (run_dir / "config.json").write_text(json.dumps(config))
    return run_dir


def use(how, run_dir, train, solo):
    """The sentence that refuses a run folder."""
    if how == "resume":
        train("ppo", "--resume", run_dir, code=2)
        return train.out
    if how == "load":
        with pytest.raises(UsageError) as error:
            solorl.load(run_dir)
        return str(error.value)
    code, _, err = solo(how, run_dir, *(["policy.onnx"] if how == "export" else []))
    assert code == 2, err
    return err


@pytest.mark.parametrize(
    ("how", "allows"),
    [("resume", "--env-id walks:Walk-v0"), ("play", "--trust-script"), ("export", "--trust-script"),
     ("load", "trust_script=True")],
)  # fmt: skip
def test_a_module_that_only_a_run_folder_names_is_not_imported(how, allows, here, copy, train, solo):
    module = here("walks.py")
    said = use(how, named(copy, "walks:Walk-v0"), train, solo)
    assert f"{module} is neither installed nor equal to a file that you have started here" in said and allows in said
    assert len(said.strip().splitlines()) == 1 and not Path("executed").exists()
    assert "" not in sys.path or how == "resume"  # there the process ends


@pytest.mark.parametrize("entry", ["", "here", "linked", "parent"])
@pytest.mark.parametrize(
    ("env_id", "path"),
    [("walks:Walk-v0", "walks.py"), ("walks:Walk-v0", "walks/__init__.py"), ("walks.sub:Walk-v0", "walks/__init__.py"),
     ("walks.sub:Walk-v0", "walks/sub.py"), ("here.walks:Walk-v0", "walks.py"), ("MinAtar/Walk-v0", "minatar.py")],
)  # fmt: skip
def test_however_the_current_folder_is_on_the_path(entry, env_id, path, here, copy, train, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "here")
    places = {"": "", "here": tmp_path / "here", "linked": tmp_path / "link", "parent": tmp_path / "here" / ".."}
    monkeypatch.setattr(sys, "path", [str(places[entry]), *sys.path])
    here(path)
    if "sub" in env_id:
        here("walks/sub.py")
    train("ppo", "--resume", named(copy, env_id), code=2)
    assert not Path("executed").exists(), train.out


def test_a_module_that_was_typed_is_imported_again_with_these_contents(here, copy, train, solo, tmp_path):
    module = here("walks.py")
    flags = ["--eval-episodes", 1, "--num-envs", 2, "--num-steps", 32]
    run_dir = train("ppo", "--env-id", "walks:Walk-v0", "--total-timesteps", 64, *flags)["run"].dir
    for total in (128, 192):
        here.forget()
        train("ppo", "--resume", run_dir, "--total-timesteps", total, "--resume-changed")
    here.forget()
    assert solo("play", run_dir, "--episodes", 1)[0] == 0
    assert repr(str(module)) in (tmp_path / "notes" / "solorl" / "started.txt").read_text()
    here("walks.py", WALK + "# changed")
    Path("executed").unlink()
    refused(solo("play", run_dir), f"{module} is neither installed nor equal to a file that you have started here")
    train("ppo", "--resume", run_dir, "--total-timesteps", 256, "--resume-changed", code=2)
    assert not Path("executed").exists()
    train("ppo", "--resume", run_dir, "--total-timesteps", 256, "--resume-changed", "--env-id", "walks:Walk-v0")
    here.forget()
    assert solo("play", run_dir, "--episodes", 1)[0] == 0


@pytest.mark.parametrize("imported", [False, True])
def test_the_environment_of_a_script_s_own_default_is_started_with_it(imported, here, train, solo):
    """Also where the script has imported the module before."""
    here("walks.py")
    text = script("ppo").read_text().replace('env_id: str = "CartPole-v1"', 'env_id: str = "walks:Walk-v0"')
    own = here("own.py", text.replace("import gymnasium", "import walks\nimport gymnasium", 1) if imported else text)
    with pytest.MonkeyPatch.context() as inside:
        inside.setattr(sys, "path", ["", *sys.path])
        run_dir = train(own, *TINY)["run"].dir
    here.forget()
    assert solo("play", run_dir, "--episodes", 1)[1].startswith("walks:Walk-v0: 5.0")
    catalogue = named(run_dir, "walks:Walk-v0")
    (catalogue / "own.py").unlink()
    (catalogue / "ppo.py").write_bytes(script("ppo").read_bytes())
    config = json.loads((catalogue / "config.json").read_text()) | {"script": "ppo.py"}
    (catalogue / "config.json").write_text(json.dumps(config))
    here.forget()
    assert solo("play", catalogue, "--episodes", 1)[0] == 0  # with a script that does not import it


def test_a_module_is_imported_where_all_is_trusted_and_nothing_is_noted(here, copy, solo, tmp_path):
    here("walks.py")
    code, out, err = solo("play", named(copy, "walks:Walk-v0"), "--episodes", 1, "--trust-script")
    assert code == 0 and out.startswith("walks:Walk-v0: 5.0 "), err
    here.forget()
    refused(solo("play", copy), "walks.py is neither installed")
    assert not (tmp_path / "notes").exists()


def test_an_installed_module_is_imported(here, copy, solo, tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    here("../site-packages/walks/__init__.py", WALK + 'open("executed", "w").write(repr(__import__("sys").path))')
    monkeypatch.setattr(trust.site, "getsitepackages", lambda: [str(packages)])
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    assert solo("play", named(copy, "walks:Walk-v0"), "--episodes", 1)[0] == 0
    assert "''" not in Path("executed").read_text()  # nothing here is found in the place of what is not installed


def test_a_script_of_ones_own_imports_its_neighbours_but_no_folder_names_them(here, train, solo, tmp_path, monkeypatch):
    """What lies next to a script is the script's affair; it is not started by that."""
    place = tmp_path / "place"
    here("../place/walks.py")
    here("../place/own.py", script("ppo").read_text() + "\nimport walks_neighbour\n")
    here("../place/walks_neighbour.py", "")
    with monkeypatch.context() as inside:
        inside.setattr(sys, "path", [str(place), *sys.path])
        run_dir = train(place / "own.py", *TINY)["run"].dir
    monkeypatch.delitem(sys.modules, "walks_neighbour")
    assert solo("play", run_dir, "--episodes", 1)[0] == 0
    refused(solo("play", named(run_dir, "walks:Walk-v0")), f"{place / 'walks.py'} is neither installed")
    assert not Path("executed").exists()


def test_what_a_run_folder_says_of_trust_is_not_heard(copy, monkeypatch):
    monkeypatch.setattr("solorl.args.arguments.script_path", lambda: script("ppo"))
    named(copy, "CartPole-v1", trust_script=True, resume_changed=True)
    saved = saved_arguments(copy, make_dataclass("Args", [("trust_script", bool, False)], bases=(RunArgs,)))
    assert (saved.trust_script, saved.resume_changed) == (False, False)


# ---------------------------------------------------------------------- links
@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "checkpoint", "checkpoint/step", "status.json", "config.json", "model.safetensors", ".lock",
     "replay", "videos", "crash", "stop", "events.out.tfevents.1"],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["resume", "play"])
def test_no_link_in_a_run_folder_is_followed(name, verb, train, solo, copy, tmp_path):
    where = state.steps_in(copy / "checkpoint")[-1] if name == "checkpoint/step" else copy / name
    away = tmp_path / "away"
    if where.exists():
        where.rename(away)
    else:
        away.mkdir()
        (away / "precious").write_text("x")
    where.symlink_to(away)
    before = contents(away) if away.is_dir() else away.read_bytes()
    words = f"{where} is a symbolic link; such a folder may hold plain files and folders only"
    if verb == "resume":
        left_alone(train, copy, words)
    else:
        refused(solo("play", copy), words)
    assert before == (contents(away) if away.is_dir() else away.read_bytes())


def test_the_run_folder_itself_may_be_reached_through_a_link(train, copy, tmp_path):
    (tmp_path / "link").symlink_to(copy.parent)
    v = train("ppo", "--resume", tmp_path / "link" / "copy", *MORE)
    assert v["run"].step == 192 and json.loads((copy / "status.json").read_text())["global_step"] == 192


def test_links_of_weights_and_biases_stay_inside_its_folder(tmp_path):
    """Except the one to the log of its service: with it a tracked run can be played, resumed and loaded."""
    (tmp_path / "wandb" / "run-1" / "logs").mkdir(parents=True)
    (tmp_path / "wandb" / "latest-run").symlink_to("run-1")
    (tmp_path / "wandb" / "run-1" / "logs" / "debug-core.log").symlink_to("/home/me/.cache/wandb/logs/core-debug-1.log")
    trust.refuse_links(tmp_path)
    (tmp_path / "debug-core.log").symlink_to("away")
    with pytest.raises(UsageError, match=r"debug-core\.log is a symbolic link"):
        trust.refuse_links(tmp_path)
    (tmp_path / "debug-core.log").unlink()
    (tmp_path / "wandb" / "debug.log").symlink_to("../away")
    with pytest.raises(UsageError, match=r"debug\.log is a symbolic link"):
        trust.refuse_links(tmp_path)


def test_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UsageError, match=r"config\.json is a pipe, a socket or a device"):
        trust.refuse_links(tmp_path)


def test_rows_are_not_written_through_a_hard_link(train, solo, copy, tmp_path):
    precious = tmp_path / "precious"
    (copy / "metrics.jsonl").rename(precious)
    os.link(precious, copy / "metrics.jsonl")
    before = precious.read_bytes()
    left_alone(train, copy, "metrics.jsonl is a hard link: writing there would change another file")
    assert solo("play", copy, "--episodes", 1)[0] == 0  # which reads only
    assert precious.read_bytes() == before and len(rows(copy)) > 0


def test_files_that_are_replaced_are_not_written_through_a_hard_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")
    segment = "000000000000_000000000003.safetensors"
    for name in (f".status.json.{os.getpid()}", f".{segment}.{os.getpid()}", ".play.mp4"):
        os.link(precious, tmp_path / name)
    write_atomically(tmp_path / "status.json", b"new")
    replay = type("Replay", (), {"arrays": {"obs": np.zeros((5, 2))}, "inserted": 3})()
    ReplayLog(tmp_path).append(replay)
    env = gym.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=3)
    pictures.film(env, lambda obs: np.zeros(len(obs), int), 1, tmp_path / "play.mp4")
    assert precious.read_text() == "x" and precious.stat().st_nlink == 1
    assert all((tmp_path / name).stat().st_size > 1 for name in ("status.json", segment, "play.mp4"))


# ---------------------------------------------------------------------- models, memory
@pytest.mark.parametrize("damage", ["shape", "missing", "text"])
def test_a_model_that_does_not_fit_is_one_sentence(damage, solo, copy):
    path = copy / "model.safetensors"
    arrays = load_file(path)
    name = next(iter(arrays))
    if damage == "shape":
        arrays[name] = np.zeros((3, *arrays[name].shape), np.float32)
    if damage == "missing":
        del arrays[name]
    save_file(arrays, path)
    if damage == "text":
        path.write_text("{}")
    words = f"{path} cannot be read" if damage == "text" else f"the model {path} does not fit: "
    refused(solo("play", copy), words)


@pytest.mark.slow
def test_a_buffer_larger_than_memory_is_one_sentence(tmp_path):
    """In a real process, for it is the way of an exception out of the script."""
    done = run(sys.executable, script("dqn"), "--buffer-size", 10**13, "--runs-dir", tmp_path / "runs")
    assert done.returncode == 2 and done.stdout == "" and not (tmp_path / "runs").exists()
    assert done.stderr.count("\n") == 1 and "error: there is not so much memory: Unable to allocate" in done.stderr


def test_other_errors_are_shown_as_they_are(monkeypatch):
    seen = []
    monkeypatch.setattr(errors, "_HOOK", lambda *error: seen.append(error))
    errors.shown(ValueError, error := ValueError("something"), None)
    assert seen == [(ValueError, error, None)]
    with pytest.raises(SystemExit, match="2"):
        errors.shown(UsageError, UsageError("something"), None)


def test_a_buffer_that_would_fill_later_than_it_is_allocated(train, tmp_path, monkeypatch):
    """The system gives out more memory than it has; only the rows that the training will fill are counted."""
    monkeypatch.setattr(
        machine, "memory", lambda: 48 * 1000
    )  # a transition: 4 + 4 numbers, reward and done, an action of 8 bytes
    flags = "--learning-starts 10 --batch-size 4 --eval-episodes 1".split()
    train("dqn", "--buffer-size", 1001, "--total-timesteps", 1001, *flags, code=2)
    assert "--buffer-size 1001 needs" in train.out and "it must be less than 1000" in train.out
    assert not (tmp_path / "runs").exists()
    train("dqn", "--buffer-size", 1001, "--total-timesteps", 100, *flags)


def test_a_buffer_in_jax_larger_than_memory_is_one_sentence(train, tmp_path):
    train("dqn_jax", "--buffer-size", 10**13, code=2)
    assert train.out.startswith("error: --buffer-size 10000000000000 needs ") and train.out.count("\n") == 1
    assert not (tmp_path / "runs").exists()
