"""The command `solo`: what it prints, writes and refuses."""

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest
from conftest import ROOT, environment, refused, run
from safetensors.numpy import load_file

import solorl.run.load
import solorl.run.verbs
from solorl import __version__, cli, scripts
from solorl.args.arguments import RunArgs
from solorl.catalog import header as catalog
from solorl.catalog import stub
from solorl.catalog.header import fields_of, parse_source
from solorl.catalog.standalone import standalone
from solorl.cli.train import args_of
from solorl.errors import UsageError
from solorl.trust import note_start
from tools.source import code_lines

SOLO = (sys.executable, "-m", "solorl.cli")
FAMILY_FILE = '''# /// script
# requires-python = ">=3.11"
# dependencies = ["solorl>=0.1"]
# ///
"""Title of {name}.

Paper     Someone 2020, https://example.org/{name}
          and a second line
Run       solo train {name} --seed 2
Spaces    vector -> discrete
Differs   {differs}
Not for   images: b_image.py; continuous actions: b_cont.py
Details   docs/algorithms/{name}.md
"""

from solorl import RunArgs


# about f
def f(x):
    """Do it."""
    # inside
    return {value}


class Args(RunArgs):
    pass
'''


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A checkout of its own with the family `fam`: root a.py, sibling b.py, which drifted, and a JAX file."""
    folder = tmp_path / "checkout" / "algorithms" / "fam"
    folder.mkdir(parents=True)
    pages = tmp_path / "checkout" / "docs" / "algorithms"
    pages.mkdir(parents=True)
    for name in ("a", "b", "a_jax"):
        (pages / f"{name}.md").write_text(f"# {name}\n")
    (tmp_path / "checkout" / "pyproject.toml").write_text("")
    (folder / "a.py").write_text(FAMILY_FILE.format(name="a", differs="root of its family", value="x + 1"))
    (folder / "b.py").write_text(FAMILY_FILE.format(name="b", differs="from a.py: adds two", value="x + 2"))
    text = FAMILY_FILE.format(name="a_jax", differs="from a.py: JAX", value="x + 3")
    (folder / "a_jax.py").write_text(text.replace("from solorl", "import jax\nfrom solorl"))
    monkeypatch.setattr(scripts, "PACKAGE", tmp_path / "checkout" / "solorl")
    monkeypatch.chdir(tmp_path)
    return folder


# ---------------------------------------------------------------------- help and verbs
@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_verb(solo, words):
    code, out, err = solo(*words)
    assert code == 0 and err == ""
    assert all(f"  {verb} " in out for verb in cli.all_verbs())
    assert len(out.splitlines()) < 28


@pytest.mark.parametrize("verb", sorted(cli.all_verbs()))
def test_each_verb_has_help(solo, verb):
    code, out, err = solo(verb, "--help")
    assert code == 0 and err == "" and f"usage: solo {verb}" in out


BAD_INPUT = [
    (("lsit",), "solo has no verb lsit; did you mean list?"),
    (("--verison",), "solo has no flag --verison"),
    (("list", "--jsno"), "solo list has no flag --jsno; did you mean --json?"),
    (("list", "extra"), "solo list takes no further argument extra"),
    (("list", "--family", "fan"), "there is no family fan; did you mean fam?"),
    (("train",), "needs an algorithm"),
    (("train", "--seed", "1"), "the algorithm comes first"),
    (("train", "a_jaxx"), "there is no algorithm a_jaxx; did you mean a_jax?"),
    (("train", "a_jaxx.py"), "there is no file a_jaxx.py; did you mean a_jax?"),
    (("train", "zzzzzzzz"), "`solo list` shows all"),
    (("train", "."), "is a folder"),
    (("play",), "RUN_DIR"),
    (("play", "runs"), "there is no run folder runs"),
    (("play", "checkout"), "it has no config.json"),
    (("play", "checkout", "--episodes", "0"), "--episodes must be at least 1"),
    (("play", "checkout", "--episodes", "many"), "--episodes"),
    (("play", "checkout", "--seed", "-1"), "--seed must be at least 0"),
    (("copy",), "NAME"),
    (("copy", "zzz"), "there is no algorithm zzz"),
    (("copy", "a", "no/such/folder.py"), "does not exist"),
    (("copy", "a", "~nobody_here/a.py"), "~nobody_here does not exist"),
    (("copy", "~nobody_here/a.py"), "there is no file ~nobody_here/a.py"),
    (("runs", "~nobody_here"), "there is no folder ~nobody_here"),
    (("copy", "a", "a.txt"), "must end in .py"),
    (("copy", "a", "--standalone", "--forse"), "did you mean --force?"),
    (("diff", "a"), "a.py names no file that it comes from: solo diff needs a second file"),
    (("diff", "a", "zzz"), "there is no algorithm zzz"),
    (("new", "c"), "--from"),
    (("new", "b", "--from", "a"), "there is an algorithm b already"),
    (("new", "1c", "--from", "a"), "cannot name a file"),
    (("new", "class", "--from", "a"), "cannot name a file"),
    (("new", "C", "--from", "a"), "cannot name a file"),
    (("new", "../c", "--from", "a"), "cannot name a file"),
    (("new", "random", "--from", "a"), "would hide the module random"),
    (("new", "c", "--from", "zzz"), "there is no algorithm zzz"),
    (("new", "c", "--from", "a", "--family", "../x"), "cannot name a family"),
    (("plot",), "PATH"),
    (("plot", "nowhere"), "nothing to draw: there is no nowhere"),
    (("plot", "checkout", "--out", "curve.pdf"), "--out must end in .png or .svg, not curve.pdf"),
    (("sync", "g", "--from", "a"), "has no function or class g; it has f, Args"),
    (("sync", "args", "--from", "a"), "did you mean Args?"),
    (("sync", "Args", "--from", "a"), "meant to differ"),
    (("sync", "f"), "needs either NAME --from FILE or --main PARENT"),
    (("sync", "f", "--from", "a", "--main", "a"), "needs either NAME --from FILE or --main PARENT"),
    (("sync", "--main", "zzz"), "there is no algorithm zzz"),
    (("sync", "--main", "a"), "git has no checkout/algorithms/fam/a.py at HEAD: "),
    (("check", "zzz"), "there is no algorithm zzz"),
    (("check", "--set-budget"), "needs the files"),
    (("check", "--set-budget", "a"), "names no sibling"),
]


@pytest.mark.parametrize(("words", "sentence"), BAD_INPUT, ids=[" ".join(words) for words, _ in BAD_INPUT])
def test_bad_input_is_one_sentence(solo, tree, words, sentence):
    before = sorted(path.name for path in tree.iterdir())
    refused(solo(*words), sentence)
    assert sorted(path.name for path in tree.iterdir()) == before


def test_bad_input_in_a_process_of_its_own():
    for words in (("lsit",), ("train", "zzz"), ("copy", "zzz")):
        done = run(*SOLO, *words)
        refused((done.returncode, done.stdout, done.stderr))


def test_broken_files_are_one_sentence(solo, tree):
    (tree / "b.py").write_text("def f(:\n")
    refused(solo("list"), "b.py:1 is not valid Python")
    refused(solo("sync", "f", "--from", "b"), "is not valid Python")
    (tree / "b.py").write_text("x = 1\n")
    refused(solo("list"), "b.py has no header")
    (tree / "b.py").write_bytes(b'"""\xff"""\n')
    refused(solo("list"), "not a text file in UTF-8")


# ---------------------------------------------------------------------- list
def test_list_shows_what_the_headers_say(solo, tree):
    code, out, _ = solo("list")
    lines = out.splitlines()
    assert code == 0 and len(lines) == 4
    assert re.match(r"a +fam +vector -> discrete +torch +Someone 2020 +Title of a\.", lines[1])
    assert " jax " in lines[2] and lines[3].startswith("b ")
    assert solo("list", "--family", "fam")[1] == out


def test_list_fits_a_terminal_of_80_columns(solo, monkeypatch):
    """With every algorithm, and its whole title, except what stands next to it."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = solo("list")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in out
    assert {line.split()[0] for line in lines if re.match(r"  \w", line)} == set(scripts.script_paths())
    text = " ".join(out.split())
    assert "ppo_jax Proximal policy optimisation (PPO) ppo_lstm Proximal policy optimisation (PPO) with an LSTM" in text
    assert "normalised observations and rewards" in text and "ppo: vector -> continuous ppo_continuous_action " in text
    assert "d3qn Dueling double DQN (D3QN): two streams in the network, Double DQN's target double_dqn" in text


def test_list_filters(solo, tree):
    def names(*flags):
        return [row["name"] for row in json.loads(solo("list", "--json", *flags)[1])]

    (tree / "b.py").write_text((tree / "b.py").read_text().replace("vector -> discrete", "image -> continuous"))
    assert names("--framework", "jax") == ["a_jax"] and names("--framework", "torch") == ["a", "b"]
    assert names("--observations", "image") == names("--actions", "continuous") == ["b"]
    assert names("--actions", "discrete", "--framework", "torch", "--family", "fam") == ["a"]
    assert names("--actions", "continuous", "--framework", "jax") == []
    assert solo("list", "--actions", "continuous", "--framework", "jax")[:2] == (
        0,
        "no algorithm is of all these kinds\n",
    )
    refused(solo("list", "--actions", "continous"), "no algorithm with actions continous; did you mean continuous?")
    refused(solo("list", "--framework", "tf"), "no algorithm with framework tf; there are jax, torch")


def test_list_json_is_complete(solo, tree):
    _, out, _ = solo("list", "--json")
    b = json.loads(out)[2]
    assert b["name"] == "b" and b["parent"] == "a.py" and b["path"] == str(tree / "b.py")
    assert b["paper"] == "Someone 2020, https://example.org/b and a second line"
    assert b["not_for"] == {"images": "b_image.py", "continuous actions": "b_cont.py"}
    assert b["lines"] == len((tree / "b.py").read_text().splitlines())


def test_a_file_wins_over_an_algorithm_of_its_name(tree, tmp_path):
    assert catalog.find_path("a") == catalog.find_path("a.py") == tree / "a.py"
    (tmp_path / "a.py").write_text(FAMILY_FILE.format(name="a", differs="root of its family", value=0))
    assert catalog.find_path("a.py").resolve() == tmp_path / "a.py"
    assert catalog.find_path("a") == tree / "a.py"


def test_the_wheel_finds_its_own_algorithms(tmp_path, monkeypatch):
    """Without a checkout around the package the files lie inside it."""
    monkeypatch.setattr(scripts, "PACKAGE", tmp_path / "solorl")
    (tmp_path / "algorithms").mkdir()  # somebody else's folder
    assert scripts.algorithms_folder() == tmp_path / "solorl" / "algorithms"


# ---------------------------------------------------------------------- train and play
SHOW = """import sys
print(__name__, __file__, sys.argv, sys.path[0])
raise SystemExit(len(sys.argv))
"""


def test_train_behaves_as_python_does(tmp_path):
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    flags = (path, "--seed", "3", "--help", "--", "-x")
    python, ours = run(sys.executable, *flags), run(*SOLO, "train", *flags)
    assert ours.stdout == python.stdout and ours.returncode == python.returncode == 6


def test_train_shows_the_algorithms_own_help():
    done = run(*SOLO, "train", "ppo", "--help")
    assert done.returncode == 0 and "--num-envs" in done.stdout


WITHOUT_TORCH = """
import sys
from solorl.cli import main
try:
    main(sys.argv[1:])
finally:
    assert not {"torch", "jax"} & set(sys.modules)
"""


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--no-such-flag", 2), ("--gamma=2", 2), ("CartPole-v1", 2)])
def test_train_answers_without_torch(flag, code):
    done = run(sys.executable, "-c", WITHOUT_TORCH, "train", "ppo", flag)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    if code == 0:
        itself = run(sys.executable, ROOT / "algorithms/ppo/ppo.py", flag)
        assert done.stdout == itself.stdout


def test_the_args_of_every_file_are_read_from_its_text(tmp_path):
    """So help and refusals need nothing that a file imports; only a file of one's own may need it."""
    for path in scripts.script_paths().values():
        args_type = args_of(path)
        assert {*fields_of(parse_source(path))} == {*args_type.__annotations__}, path
        del sys.modules[args_type.__module__]
    own = tmp_path / "own.py"
    text = "from solorl import RunArgs\nSIZE = 3\nclass Args(RunArgs):\n    size: int = SIZE\n"
    for more in ("", "    def __post_init__(self): pass\n"):
        own.write_text(text.replace("SIZE\n", "3\n") + more if more else text)
        assert args_of(own) is None and not [name for name in sys.modules if name.startswith("own")]


def run_folder(path, config, script="show.py"):
    """A folder that looks like that of a run."""
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / script).write_text(
        "import sys\nfrom solorl.run.load import play_wanted\nprint(sys.argv[1:], play_wanted())\n"
    )
    return path


def test_play_asks_the_script_of_the_run(solo, tmp_path):
    folder = run_folder(tmp_path / "r", '{"script": "show.py", "args": {}}')
    code, out, _ = solo("play", folder, "--episodes", 3, "--video", "--seed", 7, "--trust-script")
    asked = solorl.run.load.Play(episodes=3, video=True, render=False, seed=7)
    assert code == 0 and out == f"{['--resume', str(folder), '--device', 'auto']} {asked}\n"
    assert solorl.run.load.play_wanted() is None


def test_play_takes_a_model_of_a_run_and_others_name_its_folder(solo, tmp_path):
    folder = run_folder(tmp_path / "r", '{"script": "show.py", "args": {}}')
    (folder / "model_last.safetensors").write_bytes(b"")
    code, out, _ = solo("play", folder / "model_last.safetensors", "--trust-script")
    asked = solorl.run.load.Play(model="model_last.safetensors")
    assert code == 0 and out == f"{['--resume', str(folder), '--device', 'auto']} {asked}\n"
    refused(solo("play", folder / "config.json"), "config.json is a file, but a run is a folder: " + str(folder))


def test_play_refuses_what_is_no_run(solo, tmp_path, monkeypatch):
    refused(solo("play", run_folder(tmp_path / "damaged", "{")), "that can be read")
    refused(solo("play", run_folder(tmp_path / "silent", "{}")), "that can be read")
    refused(solo("play", run_folder(tmp_path / "outside", '{"script": "../show.py"}')), "lost its script ../show.py")
    refused(solo("play", run_folder(tmp_path / "lost", '{"script": "other.py"}')), "has lost its script other.py")
    refused(solo("play", tmp_path / "damagde"), "did you mean damaged?")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    good = run_folder(tmp_path / "good", '{"script": "show.py"}')
    refused(solo("play", good, "--render", "--trust-script"), "--render needs a display")
    monkeypatch.setenv("DISPLAY", ":0")
    assert solo("play", good, "--render", "--trust-script")[0] == 0


def test_play_takes_the_newest_of_several_runs(solo, tmp_path, monkeypatch):
    """Also of a pattern that no shell has expanded; that begins last whose config.json was written last."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = [f"runs/CartPole-v1__ppo__2__{day}" for day in ("20261122", "20261124", "20261123")]
    for age, name in zip((3, 1, 2), names, strict=True):
        folder = run_folder(tmp_path / name, '{"script": "show.py"}')
        os.utime(folder / "config.json", (1e9 - age, 1e9 - age))
    for given in (names, ["runs/*__ppo__2__*"]):
        code, out, _ = solo("play", *given, "--video", "--trust-script")
        assert code == 0
        assert out.startswith(f"{names[1]} is the newest of 3 runs\n['--resume', '{names[1]}', '--device', 'auto'] ")
    assert "newest" not in solo("play", names[0], "--trust-script")[1]
    refused(solo("play", names[0], "hf://me/ppo"), "takes several run folders", "hf://me/ppo is none")
    refused(solo("play", "runs/*__dqn__*"), "there is no run folder runs/*__dqn__*")


WITH_NEIGHBOUR = "import colorsys\nprint(__file__, colorsys.__file__)\n"  # a module that nothing else imports


@pytest.fixture
def shown(solo, tmp_path, monkeypatch):
    """`shown(folder, ...)` plays it and returns the words that its script prints: its file, its neighbour's file."""

    def call(*words):
        monkeypatch.delitem(sys.modules, "colorsys", raising=False)
        code, out, err = solo("play", *words)
        assert code == 0, err
        return out.split()

    return call


def foreign(path, script, **config):
    """A run folder with a module next to the script that hides one of Python's."""
    run_folder(path, json.dumps({"script": script.name, "args": {}} | config), script.name)
    (path / script.name).write_bytes(script.read_bytes())
    (path / "colorsys.py").write_text(f"open({str(path / 'executed')!r}, 'w')\n")
    return path


def test_play_executes_a_script_only_where_it_is_trusted(solo, shown, tmp_path):
    """The user's own file in its place, with its neighbours; the folder's copy with --trust-script, without them."""
    place = tmp_path / "place"
    place.mkdir()
    mine = place / "mine.py"
    mine.write_text(WITH_NEIGHBOUR)
    folder = foreign(tmp_path / "r", mine, script_path=str(mine))
    refused(solo("play", folder), "nor equal to a file that you have started here", "--trust-script")
    note_start(mine)
    assert shown(folder) == [str(mine), os.__file__.replace("os.py", "colorsys.py")]
    (place / "colorsys.py").write_text("")
    assert shown(folder) == [str(mine), str(place / "colorsys.py")]
    assert shown(folder, "--trust-script")[0] == str(mine)
    (place / "colorsys.py").unlink()
    for change in ("", "print()\n" + WITH_NEIGHBOUR):
        mine.write_text(change)
        refused(solo("play", folder), f"{folder / 'mine.py'} is neither an algorithm of", "--trust-script")
    assert shown(folder, "--trust-script") == [str(folder / "mine.py"), os.__file__.replace("os.py", "colorsys.py")]
    (place / "neighbour_of_mine.py").write_text("")
    (folder / "mine.py").write_text("import neighbour_of_mine\n")
    refused(solo("play", folder, "--trust-script"), "neighbour_of_mine", "PYTHONPATH")
    mine.unlink()
    refused(solo("play", folder), "--trust-script")
    assert not (folder / "executed").exists()


def test_play_trusts_no_file_that_the_folder_brings(solo, tmp_path):
    """Nor one that has come with it, as by `git clone`, and one that is named by a path that means another file in
    another folder."""
    mine, others = tmp_path / "mine.py", tmp_path / "cloned" / "mine.py"
    others.parent.mkdir()
    for path in (mine, others):
        path.write_text("print('executed')")
    note_start(mine)
    os.mkfifo(tmp_path / "pipe.py")  # who reads it waits for ever
    files = map(str, [mine, tmp_path / "1" / "mine.py", others, tmp_path / "pipe.py", tmp_path])
    for i, place in enumerate([*files, "mine.py", "", 3, None, "\0"]):
        folder = foreign(tmp_path / str(i), mine, script_path=place)
        code, out, _ = solo("play", folder)
        assert (code, out) == ((0, "executed\n") if place == str(mine) else (2, "")), place


def test_play_runs_the_algorithm_and_not_its_copy(tree, shown, solo, tmp_path):
    (tree / "a.py").write_text(WITH_NEIGHBOUR)
    folder = foreign(tmp_path / "r", tree / "a.py")
    assert shown(folder) == [str(tree / "a.py"), os.__file__.replace("os.py", "colorsys.py")]
    (folder / "a.py").write_text(WITH_NEIGHBOUR + "\n")
    refused(solo("play", folder), "neither an algorithm of this installation")


def test_play_reads_no_pipe(solo, tmp_path):
    folder = run_folder(tmp_path / "r", '{"script": "show.py"}')
    os.mkfifo(folder / "model.safetensors")
    refused(solo("play", folder, "--trust-script"), "model.safetensors is a pipe, a socket or a device")


def test_play_says_what_it_executes(solo):
    out = " ".join(solo("play", "--help")[1].split())
    assert "This executes the script that made it" in out and "only with --trust-script" in out


# ---------------------------------------------------------------------- copy
def test_copy_says_where_it_comes_from_and_replaces_nothing(solo, tree, tmp_path):
    """One line more in its header; all other bytes are those of the file."""
    code, out, _ = solo("copy", "a")
    line = f"Copy of   a.py (SoloRL {__version__})\n"
    data = (tree / "a.py").read_text().replace("Paper  ", f"{line}Paper  ").encode()
    assert code == 0 and (tmp_path / "a.py").read_bytes() == data
    assert catalog.parse_header(tmp_path / "a.py").copy_of == "a.py"
    assert out == "copied a to a.py; run it: python a.py\n"
    (tmp_path / "a.py").write_text("mine")
    refused(solo("copy", "a"), "a.py exists; --force replaces it")
    assert (tmp_path / "a.py").read_text() == "mine"
    assert solo("copy", "a", "--force")[0] == 0
    assert (tmp_path / "a.py").read_bytes() == data


def test_copy_of_a_copy_names_the_nearest(solo, tree, tmp_path):
    """Also with the line ends of Windows; a new variant of it names it as its parent instead."""
    solo("copy", "a", "mine.py")
    (tmp_path / "mine.py").write_bytes((tmp_path / "mine.py").read_bytes().replace(b"\n", b"\r\n"))
    assert solo("copy", "mine.py", "other file.py")[0] == solo("copy", "other file.py", "last.py")[0] == 0
    data = (tmp_path / "last.py").read_bytes()
    assert data.count(b"Copy of   ") == 1 and data.count(b"\r\n") == data.count(b"\n")
    assert catalog.origins(tmp_path / "last.py") == ["other file", "a"]  # its line Run trains a
    assert solo("new", "newer", "--from", "mine.py")[0] == 0
    text = (tmp_path / "newer.py").read_text()
    assert "Copy of" not in text and "Differs   from mine.py: nothing yet\n" in text


@pytest.mark.parametrize("data", [b"", b"x = 1\n", b"(" * 300, b'"""Caf\xe9."""\n', b'"""Mine."""\nx = 1\n'])
def test_copy_of_a_file_without_a_header_is_equal(solo, tree, tmp_path, data):
    (tmp_path / "mine.py").write_bytes(data)
    assert solo("copy", "mine.py", "other.py")[0] == 0
    assert (tmp_path / "other.py").read_bytes() == data


def test_copy_goes_where_it_is_told(solo, tree, tmp_path):
    (tmp_path / "folder").mkdir()
    assert solo("copy", "a", "folder")[0] == solo("copy", "--force", "a", "x.py")[0] == 0
    assert (tmp_path / "folder" / "a.py").is_file() and (tmp_path / "x.py").is_file()
    refused(solo("copy", tree / "a.py", tree), "itself")
    refused(solo("copy", tree / "a.py", tree, "--force"), "itself")


def test_copy_leaves_no_partial_file(solo, tree, tmp_path, monkeypatch):
    """A disk that fills up while the copy is written leaves neither half a file nor a temporary one."""
    (tmp_path / "a.py").write_text("mine")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    refused(solo("copy", "a", "--force"), "cannot be written: No space left on device")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "checkout"]
    assert (tmp_path / "a.py").read_text() == "mine"


# ---------------------------------------------------------------------- standalone copies
@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A training with the library, and with a standalone copy where SoloRL cannot be imported: two folders."""
    folder = tmp_path_factory.mktemp("twins")
    (folder / "block").mkdir()
    (folder / "block" / "sitecustomize.py").write_text("import sys\nsys.modules['solorl'] = None\n")
    assert cli.main(["copy", "ppo", str(folder / "mine.py"), "--standalone"]) == 0
    env = environment() | {"PYTHONPATH": str(folder / "block")}
    blocked = subprocess.run([sys.executable, "-c", "import solorl"], env=env, capture_output=True, text=True)
    assert "ModuleNotFoundError" in blocked.stderr or "ImportError" in blocked.stderr
    flags = ["--total-timesteps", "2048", "--seed", "5", "--eval-episodes", "2", "--num-envs", "2", "--no-norm-adv"]
    alone = [sys.executable, str(folder / "mine.py"), *flags]
    ours = [*SOLO, "train", "ppo", "--no-fast", *flags]
    how = {"cwd": folder, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    jobs = [subprocess.Popen(alone, env=env, **how), subprocess.Popen(ours, env=environment(), **how)]
    outputs = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    return folder, next((folder / "runs").iterdir()), outputs


def test_standalone_learns_the_same_weights(twins):
    folder, run_dir, _ = twins
    ours, alone = load_file(run_dir / "model_last.safetensors"), np.load(next(folder.glob("*__5.npz")))
    assert set(ours) == set(alone.files) and len(ours) > 4
    for name, weight in ours.items():
        assert np.array_equal(weight, alone[name]), name
        assert weight.dtype == alone[name].dtype


def test_standalone_says_the_same(twins):
    alone, ours = twins[2]
    assert re.search(r"^step 256 .*losses/policy_loss", alone, re.MULTILINE)
    evaluation = re.search(r"evaluation (\S+ ± \S+) over 2", alone)
    assert evaluation and f"evaluation {evaluation.group(1)} over 2" in ours


def test_play_scores_a_real_run(twins):
    done = run(*SOLO, "play", twins[1], "--episodes", 2)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^CartPole-v1: \S+ ± \S+ over 2 ", done.stdout)


TORCH = [path for path in scripts.script_paths().values() if catalog.parse_header(path).framework == "torch"]
STUDENTS = [path for path in TORCH if "run.keep(" in path.read_text()]
GAMES = r"PettingZooEnvs\(|run.multi_agent_env\(|env_kind = .board"
SEVERAL = [path for path in TORCH if re.search(GAMES, path.read_text())]
OFFLINE = [path for path in TORCH if "run.dataset(" in path.read_text()]
PLACING = [path for path in TORCH if re.search(r"run.place\(", path.read_text())]
ALONE = [path for path in TORCH if path not in STUDENTS + SEVERAL + OFFLINE + PLACING]


@pytest.mark.parametrize("path", ALONE, ids=lambda path: path.stem)
def test_standalone_leaves_nothing_of_solorl(path):
    text = standalone(path, "mine.py")
    assert "solorl" not in catalog.top_modules(ast.parse(text)) and '"solorl' not in text.split("# ///\n")[0]
    names = [node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(names) == len(set(names)) and {"Run", "parse", "given_arguments"} <= set(names)
    assert ("EnvPoolVectorEnv" in names) == ("EnvPoolVectorEnv(" in path.read_text())
    used = set(re.findall(r"\brun\.(\w+)\(", text))
    assert used <= set(dir(stub.Run)), "verbs that the stub has not"


@pytest.mark.parametrize("odd", ["\f", "\u2028"])
def test_standalone_cuts_where_lines_of_python_end(odd, tmp_path):
    """What else ends a line of text, as in a comment, moves nothing."""
    plain, changed = ROOT / "algorithms/dqn/dqn.py", tmp_path / "dqn.py"
    changed.write_text(plain.read_text().replace('"""Deep', f'"""{odd}Deep', 1), encoding="utf-8")
    assert odd in changed.read_text(encoding="utf-8")
    assert standalone(changed, "mine.py").replace(odd, "") == standalone(plain, "mine.py")


def test_standalone_refuses_files_in_jax():
    """Their environments and runs of many seeds are of the library."""
    with pytest.raises(UsageError, match=r"cannot stand alone: it says `from solorl import RunArgs, Runs, parse`"):
        standalone(ROOT / "algorithms" / "ppo" / "ppo_jax.py", "mine.py")


@pytest.mark.parametrize("path", [path for path in TORCH if path not in ALONE], ids=lambda path: path.stem)
def test_standalone_refuses_files_that_need_more_of_the_library(path):
    """Games of several agents, opponents, teachers, data sets, several processes."""
    why = r"the library alone has (run\.\w+|opponents)$|it says `from solorl import .*(PettingZooEnvs|vector_env)"
    with pytest.raises(UsageError, match=f"cannot stand alone: ({why})"):
        standalone(path, "mine.py")


@pytest.fixture
def alone(tmp_path, monkeypatch, capsys):
    """`alone("--flag", ...)` runs a standalone copy of ppo.py: exit code, output, errors."""
    path = tmp_path / "alone" / "ppo.py"
    path.parent.mkdir()
    path.write_text(standalone(ROOT / "algorithms" / "ppo" / "ppo.py", "ppo.py"))

    def call(*flags):
        monkeypatch.setattr(sys, "argv", [str(path), *flags])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        return end.value.code, *capsys.readouterr()

    return call


def test_standalone_shows_the_same_help(alone, train):
    code, out, err = alone("--help")
    train("ppo", "--help")
    own, shared = out.split("options of every run:")
    header, ours = train.out.split("options of every run:")[0].split("options of ppo:")
    assert code == 0 and err == "" and own.split("options of ppo:")[1] == ours and "--gamma" in ours
    assert own.startswith(header.splitlines()[0])
    assert (
        re.findall(r"--[\w-]+", shared)
        == "--seed --device --threads --compile --no-compile --eval-episodes --save-to".split()
    )


@pytest.mark.parametrize(
    "flags",
    ["--num-envs many", "--num-envs", "--num-envs 0", "--gamma 1.5", "--gamma=", "--gamma nan", "--target-kl -1",
     "--max-grad-norm -inf", "--lerning-rate 1", "--num-env 3", "--no-gamma", "extra", "--anneal-lr False",
     "--anneal-lr=False", "--seed 2147483648", "--seed -1", "--eval-episodes 0", "--learning_rate -1e-3",
     "--num-steps 1.2345k", "--total-timesteps 0.5k"],
)  # fmt: skip
def test_standalone_refuses_the_same_input(flags, alone, train):
    code, out, err = alone(*flags.split())
    train("ppo", *flags.split(), code=2)
    assert (code, out) == (2, "") and err == train.out and err.startswith("error: ") and err.count("\n") == 1


def test_standalone_refuses_what_is_not_an_atari_game(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.py"
    path.write_text(standalone(ROOT / "algorithms" / "ppo" / "ppo_atari.py", "mine.py"))
    monkeypatch.setattr(sys, "argv", [str(path), "--env-id", "CartPole-v1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 2 and capsys.readouterr().err == "error: CartPole-v1 is not an Atari game\n"


def test_the_stub_stays_small():
    assert code_lines((scripts.PACKAGE / "catalog/stub.py").read_text()) <= 148


def test_stub_has_the_verbs_of_the_library():
    def verbs(kind):  # not what the classes have that it is made from
        functions = [(name, each) for name, each in vars(kind).items() if inspect.isfunction(each)]
        return {name: list(inspect.signature(f).parameters) for name, f in functions if not name.startswith("_")}

    ours = verbs(solorl.run.verbs.Run)
    lacking = "keep multi_agent_env dataset place share first answers evaluation_seeds"
    ours = {name: each for name, each in ours.items() if name not in lacking.split()}  # files with one are refused
    del ours["fit"], ours["begin"], ours["next_loop"]  # with which `Runs` makes its own verbs
    assert {name: verbs(stub.Run).get(name) for name in ours} == ours


def test_stub_has_the_defaults_of_the_library():
    ours = {field.name: field.default for field in fields(RunArgs)}
    assert {f.name: f.default for f in fields(stub.RunArgs) if f.name != "save_to"}.items() <= ours.items()


def test_standalone_brings_what_the_extras_bring(tmp_path):
    text = standalone(ROOT / "algorithms" / "ppo" / "ppo_continuous_action.py", "mine.py")
    assert text.startswith("# /// script\n# requires-python = ") and "mujoco" in text.split("# ///\n")[0]
    assert "Run       python mine.py --env-id" in text


def test_standalone_refuses_other_uses_of_the_library(solo, tree, tmp_path):
    for line in (
        "import solorl",
        "from solorl.checkpoints.checkpoint import write_state",
        "from solorl import Run as R",
    ):
        (tree / "b.py").write_text((tree / "a.py").read_text().replace("from solorl import RunArgs", line))
        refused(solo("copy", "b", "--standalone"), f"it says `{line}`")
    (tree / "b.py").write_text('"""Title."""\nimport sys\n')
    refused(solo("copy", "b", "--standalone"), "stands alone already")
    assert not (tmp_path / "b.py").exists()


# ---------------------------------------------------------------------- diff
OLD = ["one", "two = 2", "same"] + [f"line {i}" for i in range(20)] + ["gone", "tail"]
NEW = ["one", "two = 3", "same"] + [f"line {i}" for i in range(20)] + ["tail", "<new> & 'more'"]


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Two files with one changed line, one that is gone and one that is new."""
    monkeypatch.chdir(tmp_path)
    for name, lines in (("old.py", OLD), ("new.py", NEW)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    return "old.py", "new.py"


def test_diff_counts_lines(solo, pair):
    code, out, _ = solo("diff", *pair)
    lines = out.splitlines()
    assert code == 0 and "2 insertions(+), 2 deletions(-)" in out and "\033" not in out
    assert {"-two = 2", "+two = 3", "-gone", "+<new> & 'more'"} <= {*lines}
    assert " line 1" in lines and " line 10" not in lines
    assert solo("diff", "old.py", "old.py")[:2] == (0, "")


def test_diff_colors_the_words_that_differ(solo, pair, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "two = \033[31m2\033[m\033[32m3\033[m" in solo("diff", *pair)[1]
    assert "\033" not in solo("diff", *pair, "--no-color")[1]


def test_diff_without_git_is_a_sentence(solo, pair, monkeypatch):
    monkeypatch.setenv("PATH", "")
    refused(solo("diff", *pair), "solo diff needs git to print a difference")


def test_diff_of_one_file_is_with_what_it_comes_from(solo, tree, tmp_path, monkeypatch):
    """A variant with the parent of its header, a copy and a new file with what they were made from."""
    monkeypatch.chdir(tmp_path)
    assert re.search(r"6 insertions.*6 deletions.*^--- .*a\.py\n\+\+\+ .*b\.py", solo("diff", "b")[1], re.S | re.M)
    assert solo("copy", "b", "mine.py")[0] == solo("new", "fresh", "--from", "b")[0] == 0
    for name in ("mine.py", "fresh.py"):
        code, out, err = solo("diff", name)
        assert code == 0 and re.search(rf"^--- .*/b\.py\n\+\+\+ {name}$", out, re.M), err
    (tmp_path / "bare.py").write_text("x = 1\n")
    refused(solo("diff", "bare.py"), "the header of bare.py names no file")


# ---------------------------------------------------------------------- new
def test_new_differs_in_its_header_only(solo, tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "checkout")
    code, out, _ = solo("new", "c", "--from", "b")
    assert code == 0 and out.startswith("created algorithms/fam/c.py from b.py. Next:\n")
    old, new = ((tree / name).read_text().splitlines() for name in ("b.py", "c.py"))
    changed = [(x, y) for x, y in zip(old, new, strict=True) if x != y]
    assert changed == [
        ("Run       solo train b --seed 2", "Run       solo train c --seed 2"),
        ("Differs   from a.py: adds two", "Differs   from b.py: nothing yet"),
        ("Details   docs/algorithms/b.md", "Details   docs/algorithms/c.md"),
    ]
    assert catalog.parse_header(catalog.find_path("c")).parent == "b.py"
    page = (tmp_path / "checkout" / "docs" / "algorithms" / "c.md").read_text()
    assert page.startswith("# c\n\nFrom [`b.py`](b.md): nothing yet.\n\n```bash\nsolo train c --seed 2\n```\n")
    assert "(../../algorithms/fam/c.py)" in page and "say in its page, docs/algorithms/c.md, when" in out


def test_new_leaves_a_page_that_is_there_alone(solo, tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path / "checkout")
    page = tmp_path / "checkout" / "docs" / "algorithms" / "c.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("mine")
    refused(solo("new", "c", "--from", "b"), "docs/algorithms/c.md exists already")
    assert page.read_text() == "mine" and not (tree / "c.py").exists()


def test_new_drops_continued_lines_and_makes_a_family(solo, tree, monkeypatch):
    monkeypatch.chdir(tree)
    text = (tree / "b.py").read_text().replace("adds two\n", "adds two\n          and more\n")
    (tree / "b.py").write_text(text)
    assert solo("new", "c", "--from", "b", "--family", "other")[0] == 0
    made = tree.parent / "other" / "c.py"
    assert "and more" not in made.read_text() and "and a second line" in made.read_text()
    assert len(made.read_text().splitlines()) == len(text.splitlines()) - 1


def test_new_outside_a_checkout_writes_here(solo, tree, tmp_path):
    (tmp_path / "checkout" / "pyproject.toml").unlink()
    (tmp_path / "checkout" / "solorl").mkdir()
    tree.parent.rename(tmp_path / "checkout" / "solorl" / "algorithms")
    assert solo("new", "c", "--from", "a")[0] == 0 and (tmp_path / "c.py").is_file()
    refused(solo("new", "c", "--from", "a"), "c.py exists already")


def test_new_needs_a_whole_header(solo, tree, tmp_path):
    (tmp_path / "x.py").write_text('"""Title."""\n')
    refused(solo("new", "c", "--from", "x.py"), "has no line Paper in its header")


# ---------------------------------------------------------------------- sync
def test_sync_replaces_the_definition_and_nothing_else(solo, tree):
    target = (tree / "b.py").read_bytes().replace(b"# about f", b"# ours\t \n#   and odd ")
    (tree / "b.py").write_bytes(target)
    jax = (tree / "a_jax.py").read_bytes()
    code, out, _ = solo("sync", "f", "--from", "a")
    assert code == 0 and out == "synced: f in checkout/algorithms/fam/b.py\n"
    assert (tree / "b.py").read_bytes() == target.replace(b"x + 2", b"x + 1")
    assert (tree / "a_jax.py").read_bytes() == jax
    assert solo("sync", "f", "--from", "a")[1] == "f is equal in all 1 other files that must have the same\n"


def test_sync_check_writes_nothing(solo, tree):
    before = (tree / "b.py").read_bytes()
    code, out, _ = solo("sync", "f", "--from", tree / "a.py", "--check")
    assert code == 1 and out == "differs: f in checkout/algorithms/fam/b.py\n"
    assert (tree / "b.py").read_bytes() == before
    solo("sync", "f", "--from", "a")
    assert solo("sync", "f", "--from", "a", "--check")[0] == 0


def test_sync_takes_decorators_and_comments_inside(solo, tree):
    source = (tree / "a.py").read_text().replace("def f(x):", "@print\n@print  # twice\ndef f(x):\n    # new inside")
    (tree / "a.py").write_text(source)
    solo("sync", "f", "--from", "a")
    assert "# about f\n@print\n@print  # twice\ndef f(x):\n    # new inside\n" in (tree / "b.py").read_text()
    (tree / "a.py").write_text(source.replace("@print\n@print  # twice\n", ""))
    solo("sync", "f", "--from", "a")
    assert "# about f\ndef f(x):\n    # new inside\n" in (tree / "b.py").read_text()


def test_sync_keeps_line_ends_permissions_and_a_bare_end(solo, tree):
    body = b'"""Title."""\r\n\x0c\r\ndef f(x):\r\n    return 0'
    (tree / "b.py").write_bytes(body)
    (tree / "b.py").chmod(0o755)
    assert solo("sync", "f", "--from", "a")[0] == 0
    expected = b'"""Title."""\r\n\x0c\r\ndef f(x):\r\n    """Do it."""\r\n    # inside\r\n    return x + 1'
    assert (tree / "b.py").read_bytes() == expected
    assert (tree / "b.py").stat().st_mode & 0o777 == 0o755


# ---------------------------------------------------------------------- sync --main
def family_file(name, differs, **changed):
    """A file of forty lines below its header, some of them other ones."""
    body = "".join(f"{changed.get(f'x{i}', f'x{i} = {i}')}\n" for i in range(40))
    return FAMILY_FILE.format(name=name, differs=differs, value=0) + body


@pytest.fixture
def repository(tree):
    """A git repository: a.py, b.py and c.py from it, d.py from both; returns a function that edits a file."""
    (tree / "b.py").write_text(family_file("b", "from a.py: b", x10="x10 = 'b'"))
    (tree / "c.py").write_text(family_file("c", "from a.py: c", x30="x30 = 'c'"))
    (tree / "d.py").write_text(family_file("d", "from b.py, c.py: both", x10="x10 = 'b'", x30="x30 = 'c'"))
    (tree / "a.py").write_text(family_file("a", "root of its family"))
    (tree / "a_jax.py").unlink()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tree, check=True, capture_output=True)

    def edit(name, old, new):
        text = (tree / name).read_text()
        assert text.count(old) == 1
        (tree / name).write_text(text.replace(old, new))

    return edit


def test_sync_main_carries_a_change_down(solo, tree, repository):
    """Through two parents to their child, once; the headers stay, except for what stands above the docstring."""
    repository("a.py", "x20 = 20\n", "x20 = 'fixed'\nnew = 1\n")
    repository("a.py", "Title of a", "Title of all")
    repository("a.py", '["solorl>=0.1"]', '["solorl>=0.2"]')
    before = {name: (tree / f"{name}.py").read_text() for name in "bcd"}
    code, out, _ = solo("sync", "--main", "a")
    assert code == 0
    assert out.splitlines() == [f"merged: checkout/algorithms/fam/{name}.py" for name in "bcd"]
    for name, text in before.items():
        expected = text.replace("x20 = 20\n", "x20 = 'fixed'\nnew = 1\n").replace("solorl>=0.1", "solorl>=0.2")
        assert (tree / f"{name}.py").read_text() == expected
    assert solo("sync", "--main", "a")[:2] == (0, "the 3 files that come from a.py need no change\n")


def test_sync_main_leaves_conflicts_out(solo, tree, repository):
    """What else changed is merged, also into the children of the file that has the conflict."""
    repository("a.py", "x10 = 10\n", "x10 = 'a'\n")
    repository("a.py", "x20 = 20\n", "x20 = 'a'\n")
    code, out, _ = solo("sync", "--main", "a")
    assert code == 1
    assert "conflict: checkout/algorithms/fam/b.py, 1 place: merge by hand\n" in out
    assert "conflict: checkout/algorithms/fam/d.py, 1 place: merge by hand\n" in out and "fam/c.py, " not in out
    for name, wanted in (("b", "'b'"), ("c", "'a'"), ("d", "'b'")):
        text = (tree / f"{name}.py").read_text()
        assert f"x10 = {wanted}\n" in text and "x20 = 'a'\n" in text and "<<<" not in text


def test_sync_main_check_writes_nothing(solo, tree, repository):
    repository("b.py", "x20 = 20\n", "x20 = 'b'\n")
    before = {path: path.read_bytes() for path in tree.glob("*.*") if path.is_file()}
    code, out, _ = solo("sync", "--main", "b", "--check")
    assert (code, out) == (1, "would change: checkout/algorithms/fam/d.py\n")
    assert {path: path.read_bytes() for path in tree.glob("*.*") if path.is_file()} == before
    assert solo("sync", "--main", "b")[0] == 0 and solo("sync", "--main", "b", "--check")[0] == 0
    assert "x20 = 'b'\n" in (tree / "d.py").read_text() and "x20 = 20\n" in (tree / "c.py").read_text()


def test_sync_main_takes_the_change_since_a_commit(solo, tree, repository):
    repository("a.py", "x20 = 20\n", "x20 = 'a'\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "commit", "-qam", "second"]
    subprocess.run(git, cwd=tree, check=True, capture_output=True)
    assert solo("sync", "--main", "a")[:2] == (0, "the 3 files that come from a.py need no change\n")
    assert solo("sync", "--main", "a", "--base", "HEAD~1")[0] == 0
    assert all("x20 = 'a'\n" in (tree / f"{name}.py").read_text() for name in "bcd")
    refused(solo("sync", "--main", "a", "--base", "nothing"), "git has no checkout/algorithms/fam/a.py at nothing")


def test_sync_main_keeps_line_ends(solo, tree, repository):
    (tree / "c.py").write_bytes((tree / "c.py").read_bytes().replace(b"\n", b"\r\n"))
    repository("a.py", "x20 = 20\n", "x20 = 'a'\n")
    assert solo("sync", "--main", "a")[0] == 0
    data = (tree / "c.py").read_bytes()
    assert b"x20 = 'a'\r\n" in data and data.count(b"\n") == data.count(b"\r\n")


def test_sync_main_leaves_a_file_alone_that_would_be_no_python(solo, tree, repository):
    repository("c.py", "x20 = 20\n", 'x20 = """c"""\n')
    repository("a.py", "x15 = 15\n", 'x15 = """\n')
    repository("a.py", "x25 = 25\n", '"""\n')
    before = (tree / "c.py").read_bytes()
    code, out, _ = solo("sync", "--main", "a")
    assert code == 1 and "conflict: checkout/algorithms/fam/c.py, 1 place: merge by hand\n" in out
    assert (tree / "c.py").read_bytes() == before and 'x15 = """\n' in (tree / "b.py").read_text()


def test_catalog_raises_what_the_command_says(tree):
    with pytest.raises(UsageError, match="did you mean a_jax"):
        catalog.find_path("a_jxa")


def test_interrupted_while_a_verb_is_imported(monkeypatch, solo):
    """Ctrl+C in the first half second: one word and exit code 130, no traceback."""

    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "import_module", interrupted)
    code, _, err = solo("list")
    assert (code, err) == (130, "interrupted\n")
