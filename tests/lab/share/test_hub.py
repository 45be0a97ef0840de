"""Sharing runs: `solo push`, `solo pull`, `solo play hf://...` and `--upload-model`, with the hub's own client and a
server on this machine."""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment, refused, rows, script
from hub_server import Hub

import solorl
from solorl.errors import UsageError

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")

TINY = "--num-envs 2 --num-steps 64 --total-timesteps 512 --eval-every 256 --eval-episodes 2".split()
# of the client's own use of its library
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
NAME = "ann/CartPole-v1-ppo-seed1"
CHANGED = {"config.json"}  # what is pushed of it is not the file as it is


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The server, to which this process and its children go as ann, with nothing of the real user's."""
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's, before it tries again
    for name in ("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with Hub() as hub:
        own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_good", "HF_HUB_DISABLE_XET": "1"}
        own |= {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        for name, value in own.items():
            monkeypatch.setenv(name, value)
        yield hub


@pytest.fixture(scope="module")
def trained():
    """The folder of the one training of this module, once it is done, and the repository to which it was pushed."""
    return []


@pytest.fixture
def run_dir(trained, train, tmp_path, tmp_path_factory):
    """A copy of the folder of a short training of `ppo`, with videos."""
    if not trained:
        base = tmp_path_factory.mktemp("trained")
        trained.append(train("ppo", *TINY, "--capture-video", runs_dir=base)["run"].dir)
    return shutil.copytree(trained[0], tmp_path / "runs" / trained[0].name)


@pytest.fixture
def pushed(trained, hub, run_dir, solo):
    """The repository on the hub to which `run_dir` was pushed: once, then as that has left it."""
    if len(trained) == 1:
        code, _, err = solo("push", run_dir)
        assert code == 0 and err == "", err
        trained.append(hub.repos[NAME])
    repo = hub.repos[NAME] = copy.deepcopy(trained[1])
    return repo


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder in which the test works."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


# ---------------------------------------------------------------------- there and back
def test_a_run_comes_back_as_it_was(hub, run_dir, solo, here):
    code, out, err = solo("push", run_dir, NAME)
    repo = hub.repos[NAME]
    head = repo.branches["main"]
    assert (code, out, err) == (0, f"pushed to {hub.url}/{NAME}/commit/{head}\n", "")
    assert len(repo.commits) == 2 and repo.messages[1].startswith(run_dir.name) and not repo.private
    assert solo("pull", NAME, "mine") == (0, f"mine: {NAME} at commit {head}\n", "")
    pulled, own = files_of(here / "mine"), files_of_run(run_dir)
    assert json.loads(pulled.pop("hub.json")) == {"repo": NAME, "commit": head}
    assert pulled == repo.head
    assert {"config.json", "ppo.py", "model.safetensors", "model_last.safetensors", "metrics.jsonl"} <= own.keys()
    assert {name: pulled[name] for name in own.keys() - CHANGED} == {name: own[name] for name in own.keys() - CHANGED}
    assert pulled.keys() - own.keys() == {"README.md", ".gitattributes", "results.json", "replay.mp4"}


def files_of_run(run_dir):
    """The files of a run that are published, as they are there."""
    names = "config.json status.json metrics.jsonl learning_curve.png model.safetensors model_last.safetensors ppo.py"
    return {name: (run_dir / name).read_bytes() for name in names.split()}


def test_a_pulled_run_plays_and_loads_as_before(pushed, run_dir, solo, here):
    before = solo("play", run_dir, "--episodes", "3")
    assert solo("pull", NAME)[0] == 0
    folder = Path("runs", NAME.partition("/")[2])
    assert before[0] == 0 and "over 3 greedy episodes" in before[1]
    assert solo("play", folder, "--episodes", "3") == before
    assert solo("play", f"hf://{NAME}", "--episodes", "3") == before
    policies = solorl.load(run_dir), solorl.load(folder)
    obs = policies[0].make_env().reset(seed=5)[0][None].repeat(40, 0) * [[i / 10] for i in range(-20, 20)]
    assert policies[0](obs).tolist() == policies[1](obs).tolist() and set(policies[1](obs).tolist()) == {0, 1}
    code, out, _ = solo("runs", "runs")
    assert code == 0 and "finished" in out and "CartPole-v1" in out


def test_the_metadata_of_the_card(pushed, run_dir, here):
    card = huggingface_hub.ModelCard(pushed.head["README.md"].decode())
    last = rows(run_dir, "eval/episodic_return")[-1]
    mean, std = last["eval/episodic_return"], last["eval/episodic_return_std"]
    [found] = card.data.eval_results
    assert (found.task_type, found.dataset_type, found.dataset_name) == (
        "reinforcement-learning",
        "CartPole-v1",
        "CartPole-v1",
    )
    assert (found.metric_type, found.metric_value) == ("mean_reward", f"{mean:.2f} +/- {std:.2f}")
    assert card.data.library_name == "solorl" and card.data.model_name == "ppo"
    assert {"CartPole-v1", "reinforcement-learning", "deep-reinforcement-learning", "ppo"} <= set(card.data.tags)
    results = json.loads(pushed.head["results.json"])
    assert (results["mean_reward"], results["std_reward"]) == (mean, std)
    assert (results["n_eval_episodes"], results["global_step"]) == (2, 512)


def test_the_card_counts_the_episodes_of_the_evaluation():
    """With `--eval-more` these can be more than `--eval-episodes`."""
    from solorl.lab.share import card

    row = {"eval/episodic_return": 1.0, "eval/episodic_return_std": 0.0, "global_step": 5}
    for more, count in (({}, 20), ({"eval/episodes": 40}, 40)):
        config = {"script": "ppo.py", "args": {"eval_episodes": 20}}
        facts = card.Facts(config, "finished", [row | more], {})
        assert facts.results["n_eval_episodes"] == count
        assert f"over {count} greedy episodes" in card._scores(facts, [])


def test_the_text_of_the_card(pushed, run_dir):
    """The rows of the table are those of the run, and what it says of the best model is what that file says."""
    from safetensors import safe_open

    text = pushed.head["README.md"].decode()
    table = re.findall(r"^\| ([\d,]+) \| ([-\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, flags=re.M)
    kept = rows(run_dir, "eval/episodic_return")
    names = ("eval/episodic_return", "eval/episodic_return_std")
    assert [(int(row[0]), row[1], row[2]) for row in table] == [
        (row["global_step"], *(f"{row[name]:.2f}" for name in names)) for row in kept
    ]
    assert len(kept) == 2
    with safe_open(run_dir / "model.safetensors", "np") as file:
        about = file.metadata()
    best = f"the best of 2 evaluations, {float(about['eval/episodic_return']):.2f} at step {about['step']}"
    assert best in text and f"solo play hf://{NAME}" in text and "![learning curve](learning_curve.png)" in text
    assert "Schulman et al. 2017" in text and '"num_steps": 64' in text


def test_a_long_table_is_shortened(tmp_path):
    from solorl.lab.share.card import _table

    many = [{"global_step": i, "eval/episodic_return": i, "eval/episodic_return_std": 0} for i in range(101)]
    lines = _table(many).splitlines()
    steps = [int(line.split("|")[1]) for line in lines if re.match(r"\| \d", line)]
    assert len(steps) == 20 and steps[0] == 0 and steps[-1] == 100 and steps == sorted(set(steps))
    assert lines[-1].startswith("20 of 101 evaluations")


def test_nothing_of_the_owners_machine_is_published(hub, run_dir, solo, tmp_path):
    config = json.loads((run_dir / "config.json").read_text())
    config["args"] |= {"wandb_entity": "secret_team", "resume": str(run_dir)}
    config["changes"] = [{"step": 5, "args": {"runs_dir": ["runs", str(tmp_path)], "gamma": [0.9, 0.99]}}]
    (run_dir / "config.json").write_text(json.dumps(config))
    assert str(tmp_path.parent) in (run_dir / "config.json").read_text() and "script_path" in config
    assert solo("push", run_dir)[0] == 0
    for name, data in hub.repos[NAME].head.items():
        assert str(tmp_path).encode() not in data and b"secret_team" not in data, name
        assert str(script("ppo").parent).encode() not in data, name
    there = json.loads(hub.repos[NAME].head["config.json"])
    assert there["changes"] == [{"step": 5, "args": {"gamma": [0.9, 0.99]}}]
    same = there["args"].keys() - {"runs_dir", "resume", "wandb_entity"}
    assert {name: there["args"][name] for name in same} == {name: config["args"][name] for name in same}
    assert there["versions"] == config["versions"] and there["script_sha256"] == config["script_sha256"]


# ---------------------------------------------------------------------- the video
def codec_and_frames(data, path):
    import imageio_ffmpeg

    path.write_bytes(data)
    about = next(imageio_ffmpeg.read_frames(str(path)))
    return about["codec"], imageio_ffmpeg.count_frames_and_secs(str(path))[0]


def test_the_video_is_one_of_the_published_model(pushed, run_dir):
    from safetensors import safe_open

    with safe_open(run_dir / "model.safetensors", "np") as file:
        step = file.metadata()["step"]
    assert pushed.head["replay.mp4"] == (run_dir / "videos" / f"step_{step}.mp4").read_bytes()
    assert not (run_dir / "videos" / "play.mp4").exists()


def test_a_run_without_a_video_is_filmed(hub, run_dir, solo, tmp_path):
    shutil.rmtree(run_dir / "videos")
    assert solo("push", run_dir)[0] == 0
    codec, frames = codec_and_frames(hub.repos[NAME].head["replay.mp4"], tmp_path / "replay.mp4")
    out = solo("play", run_dir, "--episodes", "1")[1]
    assert codec == "h264" and frames == float(re.search(r": ([\d.]+) ±", out)[1]) + 1  # a reward of 1 for each step


def test_an_old_video_is_not_that_of_the_model(hub, run_dir, solo):
    for path in (run_dir / "videos").iterdir():
        os.utime(path, (1, 1))
    assert solo("push", run_dir)[0] == 0
    assert hub.repos[NAME].head["replay.mp4"] == (run_dir / "videos" / "play.mp4").read_bytes()


def test_without_a_video_the_run_is_pushed_all_the_same(hub, run_dir, solo, monkeypatch):
    shutil.rmtree(run_dir / "videos")
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    code, _, err = solo("push", run_dir)
    assert code == 0 and err.startswith("warning: no video: ") and err.count("\n") == 1
    assert "replay.mp4" not in hub.repos[NAME].head and "model.safetensors" in hub.repos[NAME].head


def test_a_changed_script_is_not_executed_for_a_video(hub, run_dir, solo):
    shutil.rmtree(run_dir / "videos")
    with open(run_dir / "ppo.py", "a") as file:
        file.write("\nraise SystemExit('executed')\n")
    code, _, err = solo("push", run_dir)
    assert code == 0 and "no video" in err and "executed, then add --trust-script" in err
    assert "replay.mp4" not in hub.repos[NAME].head


# ---------------------------------------------------------------------- whose code is executed
def test_a_strangers_script_is_executed_only_when_told_to(pushed, solo, here):
    pushed.change(ppo__py=pushed.head["ppo.py"] + b"\nopen('executed', 'w')\n")
    assert solo("pull", NAME, "mine")[0] == 0
    refused(solo("play", "mine"), "neither an algorithm of this installation", "--trust-script")
    refused(solo("play", f"hf://{NAME}"), "neither an algorithm of this installation", "--trust-script")
    with pytest.raises(UsageError, match="trust_script=True"):
        solorl.load("mine")
    assert not (here / "executed").exists()
    assert solo("play", "mine", "--episodes", "1", "--trust-script")[0] == 0
    assert (here / "executed").exists()


def test_a_run_of_the_hub_is_exported_by_the_same_rule(pushed, solo, here):
    pytest.importorskip("onnxruntime")
    code, out, err = solo("export", f"hf://{NAME}", "policy.onnx")
    assert code == 0 and "wrote policy.onnx" in out and Path("policy.onnx").stat().st_size > 0, err
    pushed.change(ppo__py=pushed.head["ppo.py"] + b"\nopen('executed', 'w')\n")
    refused(solo("export", f"hf://{NAME}", "other.onnx"), "neither an algorithm of this installation", "--trust-script")
    assert not (here / "executed").exists() and not (here / "other.onnx").exists()
    assert solo("export", f"hf://{NAME}", "other.onnx", "--trust-script")[0] == 0 and (here / "executed").exists()


# ---------------------------------------------------------------------- what is not pulled
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model.pkl": b"x"}, "'model.pkl', which may execute code"),
        ({"pytorch_model.bin": b"x"}, "which may execute code"),
        ({"evil.PT": b"x"}, "which may execute code"),
        ({"notes.txt": b"x"}, "'notes.txt', which is not a file of a run"),
        ({"hub.json": b"{}"}, "'hub.json', which is not a file of a run"),
        ({"checkpoint/state.json": b"x"}, "'checkpoint', which is not a plain file"),
        ({"../outside.py": b"x"}, "which is not a file of a run"),
        ({"..\\outside.txt": b"x"}, "which is not a file of a run"),
        ({"/tmp/outside.py": b"x"}, "which is not a file of a run"),
        ({"other.py": b"x"}, "it has 2 scripts, not one"),
        ({"ppo.py": None}, "it has 0 scripts, not one"),
        ({"ppo.py": None, "dqn.py": b"x"}, "has lost its script ppo.py"),
        ({"config.json": None}, "it has no config.json"),
        ({"config.json": b"["}, "it has no config.json that can be read"),
        ({"config.json": b'{"script": "../ppo.py"}'}, "has lost its script ../ppo.py"),
        ({"model.safetensors": None}, "it has no model.safetensors"),
        ({"metrics.jsonl": b"x" * 2_000_000}, "2.1 MB, more than 2 (solo pull --max-size)"),
    ],
)
def test_what_is_no_run_is_not_pulled(pushed, solo, here, files, words):
    pushed.commit({name: data for name, data in {**pushed.head, **files}.items() if data is not None})
    refused(solo("pull", NAME, "mine", "--max-size", "2"), words)
    assert list(here.iterdir()) == [] and not (here.parent / "outside.py").exists()


def test_links_are_not_pulled(pushed, solo, here):
    pushed.links.add("README.md")
    refused(solo("pull", NAME, "mine"), "'README.md', which is not a plain file")
    assert list(here.iterdir()) == []


def test_what_exists_is_not_overwritten(pushed, solo, here):
    (here / "mine").mkdir()
    refused(solo("pull", NAME, "mine"), "mine exists already")
    (here / "link").symlink_to(here / "nowhere")
    refused(solo("pull", NAME, "link"), "link exists already")
    assert list((here / "mine").iterdir()) == []


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "much"])
def test_the_limit_must_be_a_number(solo, size):
    refused(solo("pull", NAME, "--max-size", size), "--max-size")


# ---------------------------------------------------------------------- commits
def test_a_pinned_pull_gets_the_old_commit(hub, pushed, solo, here):
    old, before = pushed.branches["main"], pushed.head
    new = pushed.change(README__md=b"---\nlibrary_name: x\n---\nnew")
    assert solo("pull", NAME, "old", "--revision", old)[0] == 0
    assert solo("pull", NAME, "new")[0] == 0
    assert (here / "old/README.md").read_bytes() == before["README.md"]
    assert (here / "new/README.md").read_bytes().endswith(b"new")
    assert json.loads((here / "old/hub.json").read_text())["commit"] == old
    assert json.loads((here / "new/hub.json").read_text())["commit"] == new


def test_a_pinned_address_needs_no_network_twice(hub, pushed, solo, here):
    old = pushed.branches["main"]
    pushed.change(ppo__py=b"raise SystemExit(7)\n")
    first = solo("play", f"hf://{NAME}@{old}", "--episodes", "1")
    assert first[0] == 0
    hub.requests.clear()
    hub.fail[""] = 500
    assert solo("play", f"hf://{NAME}@{old}", "--episodes", "1") == first and hub.requests == []
    refused(solo("play", f"hf://{NAME}"), "HTTP 500")


def test_a_download_that_moves_on_is_that_of_one_commit(hub, pushed, solo, here, monkeypatch):
    """A commit that comes while files are fetched changes none of them."""
    before, download = pushed.head, huggingface_hub.HfApi.hf_hub_download

    def push_first(self, repo, path, **kwargs):
        pushed.change(README__md=b"new")
        return download(self, repo, path, **kwargs)

    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", push_first)
    assert solo("pull", NAME, "mine")[0] == 0
    assert (here / "mine/README.md").read_bytes() == before["README.md"] != pushed.head["README.md"]


def test_pushing_again(hub, pushed, run_dir, solo):
    """What has not changed is no commit; what a new run has not is deleted, other branches stay."""
    first = pushed.branches["main"]
    assert solo("push", run_dir)[0] == 0 and pushed.branches["main"] == first
    pushed.change(dqn__py=b"old", LICENSE=b"mine")
    (run_dir / "model_last.safetensors").unlink()
    assert solo("push", run_dir, NAME, "--revision", "v2")[0] == 0
    there = pushed.commits[pushed.branches["v2"]]
    assert "dqn.py" not in there and "model_last.safetensors" not in there and there["LICENSE"] == b"mine"
    assert "dqn.py" in pushed.head and "model_last.safetensors" in pushed.head


def test_a_repository_of_other_things_is_left_alone(hub, pushed, run_dir, solo):
    head = pushed.change(thesis__tex=b"mine")
    refused(solo("push", run_dir), "holds other files than those of a run (thesis.tex): choose another name")
    assert pushed.branches["main"] == head


def test_private_means_private(hub, run_dir, solo, here, monkeypatch):
    assert solo("push", run_dir, "ann/secret", "--private")[0] == 0 and hub.repos["ann/secret"].private
    assert solo("push", run_dir, "ann/open")[0] == 0
    commits = len(hub.repos["ann/open"].commits)
    refused(solo("push", run_dir, "ann/open", "--private"), "ann/open exists and is public")
    assert len(hub.repos["ann/open"].commits) == commits
    assert solo("pull", "ann/secret", "mine")[0] == 0
    monkeypatch.delenv("HF_TOKEN")
    refused(solo("pull", "ann/secret", "yours"), "there is no such repository, or your token may not see it (HTTP 401)")
    assert solo("pull", "ann/open", "open")[0] == 0  # without an account


# ---------------------------------------------------------------------- what goes wrong
@pytest.mark.parametrize("verb", [["push"], ["pull"]])
@pytest.mark.parametrize("name", ["ann", "ann/a/b", "ann/a b", "../x", "ann/" + "x" * 200, "ann/x.git", ""])
def test_names_of_repositories(hub, run_dir, solo, here, verb, name):
    if verb == ["push"] and name in ("", "ann"):
        return  # the name of the run, and a name without its user
    refused(solo(*verb, *([run_dir] if verb == ["push"] else []), name), "a repository is named USER/NAME")
    assert hub.repos == {} and list(here.iterdir()) == []


def test_a_name_alone_is_of_the_account(hub, run_dir, solo):
    assert solo("push", run_dir, "walker")[0] == 0 and list(hub.repos) == ["ann/walker"]


def test_pushing_without_a_token(hub, run_dir, solo, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    refused(solo("push", run_dir), "no Hugging Face token found: run `hf auth login`, or set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_bad")
    refused(solo("push", run_dir), "the hub does not know your token", "HTTP 401")
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    refused(solo("push", run_dir, "rob/walker"), "your token has no right to do that (HTTP 403)")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    refused(solo("push", run_dir, "others/walker"), "your token has no right to do that (HTTP 403)")
    assert hub.repos == {}


def test_without_the_library(hub, run_dir, solo, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    sentence = "the Hugging Face hub needs an extra: pip install 'solorl[hub]'"
    refused(solo("push", run_dir), sentence)
    refused(solo("pull", NAME), sentence)
    refused(solo("play", f"hf://{NAME}"), sentence)


def test_what_is_not_there_is_not_pulled(hub, pushed, solo, here):
    refused(solo("pull", "ann/nothing"), "ann/nothing cannot be pulled: there is no such repository", "HTTP 404")
    refused(solo("pull", NAME, "--revision", "v9"), f"{NAME} at v9 cannot be pulled: there is no such revision")
    refused(solo("play", "hf://ann/nothing"), "there is no such repository")
    refused(solo("play", f"hf://{NAME}@v9"), "there is no such revision")
    assert list(here.iterdir()) == []


# where the hub fails: a regular expression for the request -> how
PULLS = ["GET /api/models/ann/[^/]+$", "/tree/", "HEAD .*README.md", "GET .*config.json", "GET /storage/"]
PUSHES = ["whoami", "repos/create", "/tree/", "validate-yaml", "preupload", "objects/batch", "PUT", "verify", "commit/"]
WORDS = {500: "HTTP 500", 403: "HTTP 403", "drop": "no connection to the hub", "half": "", "other": "corrupted"}


def cases(requests, failures, quick):
    """All pairs; those that are not among the `quick` ones are slow."""
    pairs = [(request, failure) for request in requests for failure in failures]
    return [pytest.param(*pair, marks=[] if pair in quick else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.parametrize(
    ("request_line", "failure"),
    [
        *cases(PULLS, (500, 403, "drop"), [(PULLS[0], 403), (PULLS[1], 500), (PULLS[4], "drop")]),
        *cases([PULLS[1], *PULLS[3:]], ("half",), [(PULLS[3], "half")]),
        *cases(PULLS[3:], ("other",), [(PULLS[3], "other"), (PULLS[4], "other")]),
    ],
)
def test_a_pull_that_fails_leaves_nothing(hub, pushed, solo, here, request_line, failure):
    hub.fail[request_line] = failure
    refused(solo("pull", NAME, "mine"), f"{NAME} cannot be pulled", WORDS[failure])
    assert list(here.iterdir()) == []
    hub.fail.clear()
    assert solo("pull", NAME, "mine")[0] == 0 and (here / "mine/model.safetensors").exists()


@pytest.mark.parametrize(
    ("request_line", "failure"),
    cases(PUSHES, (500, 403, "drop"), [("whoami", 500), ("PUT", "drop"), ("commit/", 403)]),
)
def test_a_push_that_fails_publishes_nothing(hub, run_dir, solo, request_line, failure):
    before = files_of_run(run_dir)
    hub.fail[request_line] = failure
    refused(solo("push", run_dir), WORDS[failure])
    assert all(list(repo.head) == [".gitattributes"] for repo in hub.repos.values())
    hub.fail.clear()
    assert solo("push", run_dir)[0] == 0 and len(hub.repos[NAME].commits) == 2
    assert files_of_run(run_dir) == before


def test_no_hub_at_all(run_dir, solo, hub, here, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused(solo("push", run_dir), "there is no connection to the hub")
    refused(solo("pull", NAME), "there is no connection to the hub")
    assert list(here.iterdir()) == []


def test_what_cannot_be_pushed(hub, run_dir, solo, tmp_path):
    refused(solo("push", tmp_path / "nothing"), "there is no run folder")
    refused(solo("push"), "RUN_DIR")
    status = (run_dir / "status.json").read_text()
    (run_dir / "status.json").write_text('{"status": "running"}')
    refused(solo("push", run_dir), "has not ended")
    (run_dir / "status.json").write_text(status)
    (run_dir / "metrics.jsonl").rename(run_dir / "kept")
    refused(solo("push", run_dir), "has no evaluation yet")
    (run_dir / "kept").rename(run_dir / "metrics.jsonl")
    (run_dir / "model.safetensors").write_bytes(b"damaged")
    refused(solo("push", run_dir), "has no model.safetensors that can be read")
    (run_dir / "model.safetensors").unlink()
    refused(solo("push", run_dir), "has no model.safetensors")
    (run_dir / "model.safetensors").symlink_to(tmp_path / "secret")
    refused(solo("push", run_dir), "is a symbolic link")
    assert hub.requests == []


def test_a_stopped_run_says_so(hub, run_dir, solo):
    status = json.loads((run_dir / "status.json").read_text())
    (run_dir / "status.json").write_text(json.dumps(status | {"status": "stopped"}))
    (run_dir / "model_last.safetensors").unlink()
    assert solo("push", run_dir)[0] == 0
    text = hub.repos[NAME].head["README.md"].decode()
    assert "its status is stopped" in text and "model_last" not in text


# ---------------------------------------------------------------------- at the end of a training
def test_upload_at_the_end_of_a_training(hub, train):
    flags = [*TINY, "--capture-video", "--upload-model"]
    run = train("ppo", *flags, "--exp-name", "my run", "--hf-entity", "team")["run"]
    assert list(hub.repos) == ["team/CartPole-v1-my-run-seed1"], train.out
    [repo] = hub.repos.values()
    assert train.out.endswith(f"pushed to {hub.url}/team/CartPole-v1-my-run-seed1/commit/{repo.branches['main']}\n")
    assert repo.head["model.safetensors"] == (run.dir / "model.safetensors").read_bytes()
    assert {"README.md", "replay.mp4", "model_last.safetensors", "ppo.py"} <= repo.head.keys()


@pytest.mark.slow
def test_an_upload_that_fails_loses_nothing(hub, train, solo):
    hub.fail["commit/"] = 403
    run = train("ppo", *TINY, "--capture-video", "--upload-model")["run"]  # exit code 0
    assert train.out.count("warning:") == 1 and "the model was not uploaded" in train.out and "HTTP 403" in train.out
    status = json.loads((run.dir / "status.json").read_text())
    assert status["status"] == "finished" and (run.dir / "model_last.safetensors").exists()
    hub.fail.clear()
    assert solo("push", run.dir)[0] == 0 and "model.safetensors" in hub.repos[NAME].head


def test_what_upload_needs_is_said_before_the_training(hub, train, tmp_path, monkeypatch):
    train("ppo", *TINY, "--upload-model", "--no-save-model", code=2)
    assert train.out == "error: --upload-model needs a model: leave --no-save-model out\n"
    monkeypatch.delenv("HF_TOKEN")
    train("ppo", *TINY, "--upload-model", code=2)
    assert (
        train.out.startswith("error: --upload-model needs a token: run `hf auth login`") and train.out.count("\n") == 1
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    train("ppo", *TINY, "--upload-model", code=2)
    assert train.out.startswith("error: --upload-model needs an extra: pip install 'solorl[hub]'; --no-upload-model")
    assert not (tmp_path / "runs").exists() and hub.requests == []


def test_a_published_run_is_played_without_an_account(hub, run_dir, solo, monkeypatch):
    config = json.loads((run_dir / "config.json").read_text())
    config["args"]["upload_model"] = True
    (run_dir / "config.json").write_text(json.dumps(config))
    monkeypatch.delenv("HF_TOKEN")
    assert solo("play", run_dir, "--episodes", "1")[0] == 0 and hub.requests == []


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"env_id": "ALE/Breakout-v5", "seed": 3}, "ALE-Breakout-v5-dqn-seed3"),
        ({"env_id": "my.module:Walk-v0", "exp_name": "a  b--c", "seed": 1}, "Walk-v0-a-b-c-seed1"),
        ({"env_id": "mjx/Ant", "exp_name": "é..", "seed": 0}, "mjx-Ant-seed0"),
        ({"env_id": "CartPole-v1", "exp_name": "v1.2", "seed": 0}, "CartPole-v1-v1.2-seed0"),
    ],
)
def test_names_that_the_hub_allows(args, name):
    from solorl.lab.share.hub import repo_name

    found = repo_name(args, "dqn")
    huggingface_hub.utils.validate_repo_id(f"me/{found}")
    assert found == name


@pytest.mark.slow
def test_the_commands_of_the_page(hub, here):
    """All of them, in their order; trainings are shortened."""
    from test_docs import SHARING, SHORT, commands

    seen = commands(SHARING)
    assert [" ".join(words.split()[:2]) for words in seen] == [
        "solo train", "solo push", "solo play", "solo pull", "solo play", "solo train",
        "solo train", "solo export",
    ]  # fmt: skip
    for command in seen:
        words = command.replace("solo ", f"{shlex.quote(sys.executable)} -m solorl.cli ", 1)
        words += f" {' '.join(SHORT)}" if command.startswith("solo train") else ""
        done = subprocess.run(words, shell=True, env=environment(), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert list(hub.repos) == ["ann/ppo-CartPole-v1", "ann/CartPole-v1-dqn-seed2"]
    assert (here / "policy.onnx").stat().st_size > 1000


@pytest.mark.slow
def test_a_run_in_jax(hub, train, solo, here):
    """Two seeds at once, each uploaded; played from the hub as before."""
    pytest.importorskip("jax")
    runs = train("ppo_jax", *TINY, "--num-seeds", "2", "--upload-model")["run"].runs
    names = [f"ann/CartPole-v1-ppo_jax-seed{seed}" for seed in (1, 2)]
    assert list(hub.repos) == names, train.out
    for name, run in zip(names, runs, strict=True):
        assert hub.repos[name].head["model.safetensors"] == (run.dir / "model.safetensors").read_bytes()
        assert "replay.mp4" in hub.repos[name].head
        before = solo("play", run.dir, "--episodes", "2")
        assert before[0] == 0 and solo("play", f"hf://{name}", "--episodes", "2") == before
