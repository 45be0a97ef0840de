"""Run folders on the Hugging Face hub: pushed as one commit, pulled as one commit was.

A pulled folder comes from a stranger. It has the files of a run and no others, all of them at the top; what is executed
of it follows the rule of `solorl.run.load`.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from solorl import runfolder
from solorl.args.arguments import RunArgs
from solorl.errors import UsageError, needs_extra, reason, refuse, told
from solorl.files import remove_old, sha256
from solorl.lab.share.card import Facts, card, facts_of
from solorl.machine import command_of
from solorl.run.load import script_of
from solorl.terminal import warn

PULLED = "hub.json"  # in a pulled folder: the repository and the commit
MODELS = (runfolder.MODEL, runfolder.LAST_MODEL)
OF_RUN = (runfolder.CONFIG, runfolder.STATUS, runfolder.METRICS, runfolder.PICTURE, *MODELS)
OTHERS = ("README.md", "results.json", "replay.mp4", ".gitattributes", "LICENSE")
ALLOWED = {*OF_RUN, *OTHERS}  # next to these a repository has its script
PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz")  # may execute code when read
# Arguments that say something of the owner's machine, nothing of the run.
OWN = ("runs_dir", "resume", "record", "wandb_entity")  # record: of runs of version 0.1
MAX_SIZE = 2000  # MB
PREFIX = "hf://"
COMMIT = re.compile(r"[0-9a-f]{40}")


# ---------------------------------------------------------------------- the hub
def _api() -> Any:
    """The client of the hub; UsageError where its library is missing."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars, logging
    except ImportError:
        raise UsageError(needs_extra("the Hugging Face hub", "hub")) from None
    disable_progress_bars()
    logging.set_verbosity(logging.CRITICAL)  # what it has to say becomes one sentence
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="solorl")


def _why(error: BaseException) -> str:
    """What an exception of the library says, in words; of the answers of the server first."""
    code = getattr(getattr(error, "response", None), "status_code", None)
    kind = type(error).__name__
    unseen = f"there is no such repository, or your token may not see it (HTTP {code})"
    said = {
        "RevisionNotFoundError": "there is no such revision",
        "GatedRepoError": "its owner must give you access first",
        "RepositoryNotFoundError": unseen,
        401: unseen,
        403: "your token has no right to do that (HTTP 403); https://huggingface.co/settings/tokens",
    }
    if kind in said or code in said:
        return said.get(kind) or said[code]
    if code is not None:
        return f"{'the hub has a problem, try again later' if code >= 500 else 'the hub refuses it'} (HTTP {code})"
    text = reason(error)
    if error.__cause__ is not None and (kind == "LocalEntryNotFoundError" or "Error while uploading" in text):
        return _why(error.__cause__)
    if any(word in kind for word in ("Connect", "Timeout", "Protocol", "ReadError", "WriteError", "Proxy")):
        return f"there is no connection to the hub ({text:.200})"
    return text if len(text) <= 300 else f"{text[:297]}..."


def _check_name(repo: str) -> None:
    """UsageError unless `repo` is USER/NAME as the hub allows it."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo = ""
    signs = "letters, digits, `-`, `_` and `.`"
    refuse(repo.count("/") != 1, f"a repository is named USER/NAME ({signs}), as in me/ppo-CartPole-v1")


# ---------------------------------------------------------------------- push
def push(run_dir: Path, repo: str = "", private: bool = False, revision: str | None = None) -> str:
    """Publish a run folder as one commit; returns the commit's address.

    `repo` is USER/NAME; NAME alone is of the account whose token it is, and USER/ or nothing gets a name from the run.
    UsageError, with one sentence, where that cannot be done; then the hub has no file of it.
    """
    copy, _ = script_of(run_dir)
    facts = facts_of(run_dir)
    if facts.status == "running":
        raise UsageError(f"the training in {run_dir} has not ended: push it afterwards, or resume it if it was killed")
    api = _api()
    if repo[-1:] in ("", "/"):
        repo += repo_name(facts.config["args"], facts.algorithm)
    repo = _full_name(api, repo)
    with told(f"{repo} cannot be pushed to", _why):
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: as the account has it
        if private and not api.model_info(repo).private:
            raise UsageError(f"{repo} exists and is public; --private makes new repositories only")
        if revision:
            api.create_branch(repo, branch=revision, exist_ok=True)
    with told(f"{run_dir} was not pushed to {repo}", _why), tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), run_dir, copy, facts, repo)
        there = [entry.path for entry in api.list_repo_tree(repo, revision=revision, recursive=True)]
        if foreign := sorted(path for path in there if path not in ALLOWED and not _may_be_script(path)):
            others = ", ".join(foreign[:3])
            raise UsageError(f"{repo} holds other files than those of a run ({others}): choose another name")
        message, old = f"{run_dir.resolve().name}: {facts.mean_reward}", ["*.py", *OF_RUN, *OTHERS[:3]]
        how = {"commit_message": message, "revision": revision, "delete_patterns": old}
        return str(api.upload_folder(repo_id=repo, folder_path=folder, **how).commit_url)


def _full_name(api: Any, name: str) -> str:
    """USER/NAME; a name alone is of the account. UsageError where there is no token, or the hub does not know it."""
    from huggingface_hub import get_token

    refuse(not get_token(), "no Hugging Face token found: run `hf auth login`, or set HF_TOKEN")
    try:
        user = str(api.whoami()["name"])
    except Exception as error:
        if getattr(getattr(error, "response", None), "status_code", None) == 401:
            raise UsageError("the hub does not know your token: `hf auth login` makes a new one (HTTP 401)") from error
        raise UsageError(f"the hub does not answer: {_why(error)}") from error
    full = name if "/" in name else f"{user}/{name}"
    _check_name(full)
    return full


def repo_name(args: dict[str, Any], algorithm: str) -> str:
    """The name of a run's repository, as CleanRL has it: ENVIRONMENT-EXPERIMENT-seedN."""
    env_id = str(args.get("env_id", "run")).rpartition(":")[2]
    name = f"{env_id}-{args.get('exp_name') or algorithm}-seed{args.get('seed')}"
    name = re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)
    return re.sub(r"[.-]{2,}", "-", name).strip("-.")[:90]  # the hub allows neither -- nor ..


def fill(folder: Path, run_dir: Path, copy: Path, facts: Facts, repo: str) -> None:
    """Put all that is published of a run into a folder."""
    for path in (copy, *(run_dir / name for name in OF_RUN)):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    if video := replay(run_dir, str(facts.model.get("step"))):
        shutil.copyfile(video, folder / "replay.mp4")
    if not (folder / runfolder.PICTURE).exists():  # as of a run that was killed
        from solorl.lab.results import curves, figures, read  # here, because it loads matplotlib

        if found := curves.trainings(read.read_all([run_dir], unfinished=True)[0]):
            figures.write_trainings(found, folder / runfolder.PICTURE)
    facts = replace(facts, config=public(facts.config))
    (folder / runfolder.CONFIG).write_text(json.dumps(facts.config, indent=2))
    (folder / "results.json").write_text(json.dumps(facts.results, indent=2))
    source = copy.read_text(encoding="utf-8", errors="replace")
    (folder / "README.md").write_text(card(facts, repo, source, {path.name for path in folder.iterdir()}))


def public(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without paths and names that say something of its owner's machine, nothing of the run."""
    shown = {name: value for name, value in config.items() if name not in ("script_path", "command")}
    own = {name: getattr(RunArgs, name, None) for name in OWN}  # the defaults
    shown["args"] = {name: own.get(name, value) for name, value in config["args"].items()}
    if isinstance(changes := config.get("changes"), list):
        pairs = [(change, change.get("args") or {}) for change in changes if isinstance(change, dict)]
        shown["changes"] = [one | {"args": {k: x for k, x in args.items() if k not in OWN}} for one, args in pairs]
    return shown


def replay(run_dir: Path, step: str) -> Path | None:
    """A video of model.safetensors, which is of this step: filmed in the training, by `solo play --video` or pulled
    with it; else it is filmed now. None, with a warning, where that fails."""
    saved = (run_dir / MODELS[0]).stat().st_mtime
    for name in (f"videos/step_{step}.mp4", "videos/play.mp4", "replay.mp4"):
        if (run_dir / name).is_file() and (run_dir / name).stat().st_mtime >= saved:
            return run_dir / name
    played = command_of("play", str(run_dir), "--episodes", "1", "--video")
    done = subprocess.run(played, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    path = run_dir / "videos" / "play.mp4"
    if path.is_file() and path.stat().st_mtime >= saved:
        return path
    why = (done.stderr or done.stdout or "the script has not played").strip().splitlines()[-1]
    warn(f"no video: {why.removeprefix('error: ').removeprefix('warning: no video: ')}")
    return None


def _may_be_script(path: str) -> bool:
    return path.endswith(".py") and not {*path} & {"/", "\\", "\0"}


# ---------------------------------------------------------------------- pull
def pull(repo: str, folder: Path, revision: str | None = None, max_size: float = MAX_SIZE) -> str:
    """Make `folder` a copy of a run on the hub, as it is at `revision` (default: the newest commit); returns the
    commit, which the folder's hub.json has, too. UsageError, and no folder, where that cannot be done."""
    refuse(folder.is_symlink() or folder.exists(), f"{folder} exists already: name another folder")
    api = _api()
    _check_name(repo)
    return _pull(api, repo, folder, _commit_of(api, repo, revision), max_size)


def fetch(address: str) -> Path:
    """The folder of `hf://USER/NAME` or `hf://USER/NAME@REVISION` in the cache, pulled unless it is there. A revision
    that is a whole commit hash needs no network then."""
    repo, _, revision = address.removeprefix(PREFIX).partition("@")
    api = _api()
    _check_name(repo)
    known = COMMIT.fullmatch(revision) and _cached(repo, revision).is_dir()
    commit = revision if known else _commit_of(api, repo, revision or None)
    if not (folder := _cached(repo, commit)).is_dir():
        _pull(api, repo, folder, commit, MAX_SIZE)
    return folder


def run_dir_of(address: str) -> Path:
    """The run folder that a command names, pulled into the cache if it is `hf://USER/NAME`."""
    return fetch(address) if address.startswith(PREFIX) else Path(address)


def _cached(repo: str, commit: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "solorl" / "hub" / repo.replace("/", "--") / commit


def _commit_of(api: Any, repo: str, revision: str | None) -> str:
    """The hash of the commit that a branch, a tag, or the beginning of a hash names now."""
    at = f" at {revision}" if revision else ""
    with told(f"{repo}{at} cannot be pulled", _why):
        commit = str(api.model_info(repo, revision=revision).sha)
        refuse(not COMMIT.fullmatch(commit), f"the hub names no commit of {repo}")
        return commit


def _pull(api: Any, repo: str, folder: Path, commit: str, max_size: float) -> str:
    """Fetch the files of a commit into a folder that appears whole or not at all."""
    with told(f"{repo} cannot be pulled", _why):
        entries = list(api.list_repo_tree(repo, revision=commit, recursive=False))
        check_files(repo, entries, max_size)
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_old(folder.parent, ".pull-*")
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder.parent) as temporary:
            staging = Path(temporary)
            for entry in entries:
                api.hf_hub_download(repo, entry.path, revision=commit, local_dir=staging)
                _check_contents(repo, staging / entry.path, entry)
            shutil.rmtree(staging / ".cache", ignore_errors=True)  # the library's notes
            (staging / PULLED).write_text(json.dumps({"repo": repo, "commit": commit}))
            staging.chmod(0o755)
            _check_run(repo, staging)
            staging.rename(folder)
    return commit


def check_files(repo: str, entries: list[Any], max_size: float) -> None:
    """UsageError unless the entries of a repository are plain files of one run, of at most `max_size` MB in all."""
    scripts = [entry for entry in entries if _may_be_script(str(entry.path))]
    for entry in entries:
        path = str(entry.path)
        for wrong, which in (
            (path.lower().endswith(PICKLES), "may execute code when it is read"),
            (getattr(entry, "size", None) is None, "is not a plain file"),  # a folder, a link, a submodule
            (path not in ALLOWED and not _may_be_script(path), "is not a file of a run"),
        ):
            refuse(wrong, f"{repo} holds {path!r:.80}, which {which}; it is not pulled")
    missing = {runfolder.CONFIG, runfolder.MODEL} - {entry.path for entry in entries}
    what = f"it has no {min(missing)}" if missing else f"it has {len(scripts)} scripts, not one"
    refuse(missing or len(scripts) != 1, f"{repo} is not a run of SoloRL: {what}")
    if (total := sum(entry.size for entry in entries) / 1e6) > max_size:
        raise UsageError(f"{repo} has {total:,.1f} MB, more than {max_size:g} (solo pull --max-size); it is not pulled")


def _check_contents(repo: str, path: Path, entry: Any) -> None:
    """UsageError unless a file is the one that the commit names, by its hash."""
    if entry.lfs is not None:
        right = sha256(path) == entry.lfs.sha256
    else:  # Git's hash of a file
        data = path.read_bytes()
        right = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == entry.blob_id
    if not right or path.is_symlink():
        raise UsageError(f"{repo} cannot be pulled: the download of {entry.path} is corrupted; try again")


def _check_run(repo: str, folder: Path) -> None:
    """UsageError unless a pulled folder is that of a run with its script."""
    try:
        script_of(folder)
    except UsageError as error:
        raise UsageError(f"{repo} is not a run of SoloRL: {str(error).replace(f'{folder}/', '')}") from None
