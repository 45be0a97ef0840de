"""What others have written in a run folder, a suite or the current folder: nothing of it reaches out by itself."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

from solorl import machine, trust
from solorl.run import hub

SHORT = "--env-id CartPole-v1 --total-timesteps 64 --num-envs 2 --num-steps 32 --num-minibatches 1 --eval-episodes 1"
REACHES = {"track": True, "upload_model": True, "hf_entity": "evil", "wandb_entity": "evil", "threads": 3}


def rewritten(folder, **args):
    """The folder as one that came from elsewhere, with other arguments."""
    config = json.loads((folder / "config.json").read_text())
    config["args"] |= args
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---------------------------------------------------------------------- arguments of a run folder
def test_a_foreign_folder_publishes_connects_and_multiplies_nothing(train):
    folder = rewritten(train("ppo", *SHORT.split())["run"].dir, **REACHES)
    args = train("ppo", "--resume", folder)["args"]
    assert [getattr(args, name) for name in REACHES] == [False, False, None, None, 1]
    said = next(line for line in train.out.splitlines() if "was not started here" in line)
    typed = said.partition("typed: ")[2].split(", ")  # as the command line takes them: switches without a value
    assert {"--track", "--upload-model", "--hf-entity evil", "--wandb-entity evil", "--threads 3"} <= {*typed}
    assert json.loads((folder / "config.json").read_text())["args"]["track"] is False
    train("ppo", "--resume", folder)  # now it is the user's own
    assert "not started here" not in train.out


def test_what_is_typed_again_counts(train):
    folder = rewritten(train("ppo", *SHORT.split())["run"].dir, threads=3, async_envs=True)
    args = train("ppo", "--resume", folder, "--threads", "2")["args"]
    assert (args.threads, args.async_envs) == (2, False)
    assert "--async-envs\n" in train.out and "--threads" not in train.out


def test_an_own_folder_keeps_its_arguments_wherever_it_is_moved(train, tmp_path):
    folder = train("ppo", *SHORT.split(), "--threads", "2", "--wandb-entity", "mine")["run"].dir
    args = train("ppo", "--resume", shutil.move(folder, tmp_path / "moved"))["args"]
    assert (args.threads, args.wandb_entity) == (2, "mine") and "not started here" not in train.out
    train("ppo", "--resume", tmp_path / "moved", "--threads", "1")
    assert train("ppo", "--resume", tmp_path / "moved")["args"].wandb_entity == "mine"  # changed by the user


def test_playing_says_nothing_of_them(train, solo):
    folder = rewritten(train("ppo", *SHORT.split())["run"].dir, **REACHES)
    code, _, err = solo("play", folder, "--episodes", 1)
    assert code == 0 and err == ""


# ---------------------------------------------------------------------- the current folder
@pytest.fixture
def evil(tmp_path, monkeypatch):
    """A current folder with a package `solorl` and a module `evil`, which leave a file where they are executed."""
    (tmp_path / "solorl").mkdir()
    for name in ("solorl/__init__.py", "evil.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w').write(__name__)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "executed"


def test_children_do_not_execute_the_current_folder(evil):
    assert hub.solo("--version")[0] and not evil.exists()
    done = run(Path(sys.executable).with_name("solo"), "train", "ppo", "--nproc", "2", cwd=evil.parent)
    assert done.returncode == 2 and "ppo.py trains in one process" in done.stderr and not evil.exists()
    done = run(*machine.command_of("work", "x"), cwd=evil.parent)
    assert done.returncode == 2 and not evil.exists()


def test_one_function_names_the_command_of_children():
    spelled = [path for path in (ROOT / "solorl").rglob("*.py") if '"-m"' in path.read_text()]
    assert spelled == [Path(machine.__file__)]


# ---------------------------------------------------------------------- suites
def test_a_dry_run_executes_nothing_and_trusts_nothing(evil, solo):
    suite = "name = 'x'\n[[job]]\nscripts = ['ppo']\nenv_ids = ['evil:CartPole-v1', 'CartPole-v1']\nseeds = [1]\n"
    Path("suite.toml").write_text(suite)
    code, out, err = solo("bench", "suite.toml", "--dry-run")
    assert code == 0 and "--env-id evil:CartPole-v1" in out and err.count("not checked: evil:CartPole-v1") == 1
    assert "not checked: CartPole" not in err and not evil.exists() and "evil" not in sys.modules
    assert not trust.was_started(Path("evil.py").resolve())


def test_a_run_refuses_a_module_that_is_not_there(tmp_path, monkeypatch, solo):
    monkeypatch.chdir(tmp_path)
    code, _, err = solo("bench", "ppo", "--env-ids", "nowhere:CartPole-v1")
    assert code == 2 and "there is no environment nowhere:CartPole-v1" in err and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- the terminal
def test_a_foreign_config_does_not_control_the_terminal(train, solo):
    folder = train("ppo", *SHORT.split())["run"].dir
    for env_id in ("Cart\x1b[2JPole-v1", "nowhere\x1b]0;x\x07:CartPole-v1"):
        rewritten(folder, env_id=env_id)
        for words in (("play", folder), ("export", folder, "policy.onnx"), ("record", folder, "--steps", 8)):
            code, out, err = solo(*words)
            assert code == 2 and not {"\x1b", "\x07"} & {*out, *err} and "\\x1b" in err, (words, err)
