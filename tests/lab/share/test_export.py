"""`solo export`: the policy of a run as ONNX (torch) or StableHLO (JAX), which computes what the run computes."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import ROOT, refused, section
from pixel_probe import plays_envpool, use_fake_envpool
from test_golden import flags_of

import solorl
from solorl import scripts
from solorl.lab.share import export as share

SHORT = "--total-timesteps 512 --eval-episodes 1 --eval-every 0"
QUICK = {
    "ppo": f"--num-envs 2 --num-steps 64 {SHORT}",
    "ppo_continuous_action": f"--env-id Pendulum-v1 --num-envs 2 --num-steps 64 {SHORT}",
    "ppo_jax": f"--num-envs 2 --num-steps 64 {SHORT}",
    "ppo_lstm_jax": f"--num-envs 4 --num-steps 64 {SHORT}",
}


@pytest.fixture
def trained(train, monkeypatch):
    """`run_dir, policy = trained("ppo", flags)`: a run folder and its policy as `solorl.load` brings it."""

    def call(name, flags):
        if plays_envpool(name):
            use_fake_envpool(monkeypatch)
        run = train(name, *flags.split())["run"]
        run_dir = run.runs[0].dir if name.endswith("_jax") else run.dir
        return run_dir, solorl.load(run_dir, device="cpu")

    return call


def session(path):
    """The file in its runtime, as a function from inputs by name to outputs by name."""
    if path.suffix == ".onnx":
        of_file = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [output.name for output in of_file.get_outputs()]
        return lambda **inputs: dict(zip(names, of_file.run(None, inputs), strict=True))
    from jax import export

    call = export.deserialize(bytearray(path.read_bytes())).call

    def run(**inputs):
        result = call(*inputs.values())
        action, *state = result if "state" in inputs else [result]
        return {"action": np.asarray(action), "next_state": np.asarray(*state or [0])}

    return run


def acts_as(path, policy):
    """For batches of 1, 7 and 64: the actions of the file are those of the run (discrete ones all the same, for the
    trained policies here have no ties), on real observations and on other random ones than those of the check."""
    act, (inputs, axes) = session(path), share.observations(policy)
    real = inputs["obs"][: share.OBSERVATIONS // 2]
    inputs["obs"] = np.concatenate([real, share.like(real, np.random.default_rng(7))])
    for start, size in ((0, 1), (1, 7), (share.OBSERVATIONS - 64, 64)):
        part = {name: value.take(np.arange(start, start + size), axes[name]) for name, value in inputs.items()}
        got = act(**part)["action"]
        if "state" in part:
            import torch

            state = part["state"] if path.suffix == ".stablehlo" else torch.as_tensor(part["state"])
            want, _ = policy(part["obs"], state, part["first"])
        else:
            want = policy(part["obs"])
        assert got.shape == want.shape and got.dtype == want.dtype and len(got) == size
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def file_for(name, folder):
    """The file to which a script's policy is exported."""
    return folder / f"policy.{'stablehlo' if name.endswith('_jax') else 'onnx'}"


# ---------------------------------------------------------------------- the file computes what the run does
@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        pytest.param("ppo", {"action": "int64 (batch)", "logits": "float32 (batch, 2)"}, marks=pytest.mark.slow),
        pytest.param("ppo_continuous_action", {"action": "float32 (batch, 1)"}, marks=pytest.mark.slow),
        ("ppo_jax", {"action": "int32 (batch)"}),
    ],
)
def test_a_policy_is_exported_with_its_normaliser(name, outputs, trained, solo, tmp_path):
    if name.endswith("_jax"):
        pytest.importorskip("jax")
    run_dir, policy = trained(name, QUICK[name])
    path = file_for(name, tmp_path)
    code, out, err = solo("export", run_dir, path)
    assert (code, err) == (0, ""), err
    assert f"output {', '.join(f'{key} {kind}' for key, kind in outputs.items())}\n" in out
    acts_as(path, policy)
    if path.suffix == ".onnx":
        said = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
        assert said["env_id"] == policy.env_id and said["action_space"].startswith(("Discrete", "Box"))
    if name == "ppo_continuous_action":  # the first thing that is done to the observation is to normalise it
        graph = onnx.load(path).graph
        assert [node.op_type for node in graph.node[:4]] == ["Reshape", "Cast", "Sub", "Div"]  # in float64


FRESH = """
import sys
sys.modules.update(solorl=None, torch=None, gymnasium=None, optax=None)
import numpy as np
from jax import export

given = np.load("given.npz")
policy = export.deserialize(bytearray(open("policy.stablehlo", "rb").read()))
result = policy.call(*given.values())
np.savez("got.npz", *(result if isinstance(result, (list, tuple)) else [result]))
"""


@pytest.mark.parametrize("name", ["ppo_jax", pytest.param("ppo_lstm_jax", marks=pytest.mark.slow)])
def test_a_policy_in_jax_runs_in_a_process_with_jax_and_numpy_only(name, trained, solo, tmp_path):
    """Its actions, and its memory, are those of `solorl.load` on observations of the games."""
    pytest.importorskip("jax")
    run_dir, policy = trained(name, QUICK[name])
    assert solo("export", run_dir, tmp_path / "policy.stablehlo")[0] == 0
    inputs, axes = share.observations(policy)
    part = {name: value.take(np.arange(300), axes[name]) for name, value in inputs.items()}
    np.savez(tmp_path / "given.npz", **part)
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "got.npz") as file:
        got = list(file.values())
    want = policy(*part.values())
    want = list(want) if "state" in part else [want]
    assert len(got) == len(want) and got[0].tolist() == want[0].tolist()
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_last_is_the_model_of_the_end(trained, solo, tmp_path):
    run_dir, policy = trained("ppo", QUICK["ppo"])
    from safetensors.torch import load_file, save_file

    opposite = {name: -value for name, value in load_file(run_dir / "model.safetensors").items()}
    save_file(opposite, run_dir / "model_last.safetensors")
    obs = share.observations(policy)[0]["obs"]
    for flags, last in (([], False), (["--last"], True)):
        assert solo("export", run_dir, tmp_path / "policy.onnx", *flags)[0] == 0
        got = session(tmp_path / "policy.onnx")(obs=obs)["action"]
        assert got.tolist() == solorl.load(run_dir, last=last)(obs).tolist()
    assert got.tolist() != policy(obs).tolist()


# Files whose observations or actions have parts, and what is said of them.
ENTRIES = "observations that are not arrays of numbers"
PARTS = dict.fromkeys(("ppo_dict", "ppo_dict_continuous_action", "sac_dict", "dqn_her", "sac_her"), ENTRIES)
PARTS["ppo_hybrid"] = "must each be one array"


@pytest.mark.parametrize("name", PARTS)
def test_policies_with_observations_or_actions_of_parts_are_refused(name, trained, solo, tmp_path):
    steps = "--num-steps 64" if name.startswith("ppo") else "--learning-starts 100"
    run_dir, _ = trained(name, f"--num-envs 2 {steps} {SHORT}")
    refused(solo("export", run_dir, tmp_path / "policy.onnx"), "cannot be exported", PARTS[name])


# Files whose policies take a mask of the allowed actions.
MASKED = [name for name, path in scripts.script_paths().items() if re.search('(?<!")action_mask', path.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
def test_policies_that_take_a_mask_are_refused(name, trained, solo, tmp_path):
    run_dir, _ = trained(name, " ".join(flags_of(name)))
    refused(solo("export", run_dir, file_for(name, tmp_path)), "action_mask", "an exported one cannot")


def test_the_page_names_every_file_that_is_refused():
    page = (scripts.PACKAGE.parent / "docs/share.md").read_text()
    refusals = page.partition("Refused, with a sentence, are\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", refusals)) == sorted([*PARTS, *MASKED])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in scripts.script_paths() if name not in [*PARTS, *MASKED]])
def test_every_algorithm_is_exported(name, trained, solo, tmp_path, monkeypatch):
    """With the dtype of the environment: bytes for images. On fewer observations than people's are checked on."""
    monkeypatch.setattr(share, "BATCHES", (1, 7, 64))
    monkeypatch.setattr(share, "OBSERVATIONS", 72)
    run_dir, policy = trained(name, " ".join(flags_of(name)))
    path = file_for(name, tmp_path)
    code, out, err = solo("export", run_dir, path)
    assert (code, err) == (0, ""), err
    acts_as(path, policy)
    kinds = {}
    for line in out.splitlines()[1:3]:
        kinds |= dict(re.findall(r"(\w+) (\w+ \([^)]*\))", line))
    images = any(word in policy.env_id for word in ("Catch", "atari/", "MovingDot", "PoleImage"))
    dtype = {"grpo": "int64"}.get(name, "float32")  # tokens
    assert kinds["obs"].startswith(f"{'uint8' if images else dtype} (batch, ")
    remembers = "lstm" in name or name.endswith(("trxl", "decision_transformer"))
    wanted = {"obs", "action"} | ({"state", "first", "next_state"} if remembers else set())
    if kinds["action"] == "int64 (batch)" and path.suffix == ".onnx":
        actors = ("ppo", "actor_critic", "offline", "imitation")
        has_actor = scripts.script_paths()[name].parent.name in actors or name == "stream_ac"
        wanted.add("logits" if has_actor else "q_values")
    assert set(kinds) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo_atari_lstm", "pqn_atari_envpool_lstm"])
def test_memory_is_carried_by_the_caller(name, trained, solo, tmp_path):
    """20 steps in 3 environments, where a game begins at different steps: the same actions and memory as in the run."""
    run_dir, policy = trained(name, " ".join(flags_of(name)))
    assert solo("export", run_dir, tmp_path / "policy.onnx")[0] == 0
    act, rng = session(tmp_path / "policy.onnx"), np.random.default_rng(3)
    state, mine = None, np.zeros((2, 3, 128), np.float32)
    forgot = rng.normal(size=mine.shape).astype(np.float32)  # what is in the memory does not matter where a game begins
    for step in range(20):
        obs = rng.integers(0, 255, (3, 1, 84, 84), np.uint8, endpoint=True)
        first = np.array([step == 0, step in (0, 9), step in (0, 4, 15)])
        before = state
        want, state = policy(obs, state, first)
        got = act(obs=obs, state=np.where(first[:, None], forgot, mine), first=first)
        mine = got["next_state"]
        assert got["action"].tolist() == want.tolist()
        np.testing.assert_allclose(mine, state.numpy(), rtol=1e-4, atol=1e-5)
    other = act(obs=obs, state=mine, first=~first)["next_state"]
    assert before is not None and not np.allclose(other, state.numpy(), atol=1e-3)  # memory and `first` do matter


# ---------------------------------------------------------------------- the check
@pytest.mark.parametrize("name", ["ppo", pytest.param("ppo_continuous_action", marks=pytest.mark.slow)])
def test_a_broken_export_is_caught(name, trained, solo, tmp_path, monkeypatch):
    """One weight of many is a little off: nothing is written, what was there stays, exit code 1."""
    run_dir, _ = trained(name, QUICK[name])
    set_props = onnx.helper.set_model_props

    def mutate(model, props):
        weight = max(model.graph.initializer, key=lambda each: len(each.raw_data))
        values = onnx.numpy_helper.to_array(weight).copy()
        values.flat[5] += 0.01
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        set_props(model, props)

    monkeypatch.setattr(onnx.helper, "set_model_props", mutate)
    path = tmp_path / "policy.onnx"
    path.write_text("before")
    code, out, err = solo("export", run_dir, path)
    assert code == 1 and out == "" and err.count("\n") == 1, (out, err)
    assert "has a relative error of" in err and "nothing was written" in err
    assert path.read_text() == "before" and [each.name for each in tmp_path.glob("*.onnx*")] == ["policy.onnx"]


def test_actions_may_differ_only_where_the_two_best_are_equally_good():
    scores = np.random.default_rng(1).normal(size=(1000, 3)).astype(np.float32)
    scores[3] = [2.0, 2.0 + 1e-6, 0.0]
    action = scores.argmax(1)
    other = action.copy()
    other[3] = 0
    run = {"action": action, "logits": scores}
    assert action[3] == 1 and "except" not in share.compare(run, run, {})
    assert "except 1 where" in share.compare(run, run | {"action": other}, {})
    with pytest.raises(share.CheckFailed, match="1 of 1,000 actions differ"):  # no scores tell whether they are
        share.compare({"action": action}, {"action": other}, {})
    other[4] = (other[4] + 1) % 3
    with pytest.raises(share.CheckFailed, match="2 of 1,000 actions differ"):
        share.compare(run, run | {"action": other}, {})
    with pytest.raises(share.CheckFailed, match="action is int32"):
        share.compare(run, run | {"action": action.astype(np.int32)}, {})
    with pytest.raises(share.CheckFailed, match="logits is"):
        share.compare(run, {"action": action}, {})


@pytest.mark.parametrize(("error", "passes"), [(5e-5, True), (2e-4, False), (np.nan, False)])
def test_numbers_may_differ_by_rounding(error, passes):
    """Relative to the largest of a row, or to what is usual in all of them."""
    run = {"action": np.ones((1000, 2), np.float32)}
    run["action"][3] = 1e-9
    got = {"action": run["action"] + np.float32(error)}
    if passes:
        assert "largest relative error of action" in share.compare(run, got, {})
    else:
        with pytest.raises(share.CheckFailed, match="action has a relative error of"):
            share.compare(run, got, {})


def test_the_observations_are_those_of_games_and_random_ones(trained):
    _, policy = trained("ppo", QUICK["ppo"])
    inputs, axes = share.observations(policy)
    obs = inputs["obs"]
    assert obs.shape == (1000, 4) and obs.dtype == np.float32 and axes == {"obs": 0}
    assert np.abs(obs[0]).max() <= 0.05 < np.abs(obs[:500]).max()  # CartPole begins near zero
    assert len(np.unique(obs, axis=0)) > 900 and obs[500:].std(0).min() > 2 * obs[:500].std(0).min()


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8])
def test_observations_in_jax_keep_shape_and_type(dtype):
    """It is the script's `act` that flattens them."""
    jax = pytest.importorskip("jax")
    from solorl.lab.share.stablehlo import converted
    from solorl.run.trainings import PolicyOfSeed

    def act(params, obs):
        assert obs.shape[1:] == (2, 3) and obs.dtype == jax.dtypes.canonicalize_dtype(dtype)
        return (obs.reshape(len(obs), -1) @ params).argmax(1)

    params = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    params -= params.mean(0)  # so that not one action is the best everywhere
    policy = PolicyOfSeed(act, jax.jit(act), lambda: params)
    obs = (100 * np.random.default_rng(1).random((9, 2, 3))).astype(dtype)
    data, _, _ = converted(SimpleNamespace(policy=policy), {"obs": obs}, {"obs": 0})
    call = jax.export.deserialize(bytearray(data)).call
    for size in (1, 9):
        assert np.asarray(call(obs[:size])).tolist() == policy(obs[:size]).tolist()
    assert len(set(policy(obs).tolist())) > 1


# ---------------------------------------------------------------------- bad input
def test_bad_input_is_one_sentence(trained, solo, tmp_path, monkeypatch):
    run_dir, _ = trained("ppo", QUICK["ppo"])
    path, name = tmp_path / "policy.onnx", run_dir.name[:-1]
    refused(solo("export", run_dir.with_name(name), path), "there is no run folder", f"did you mean {run_dir.name}?")
    refused(solo("export", tmp_path, path), "it has no config.json")
    refused(solo("export", run_dir, tmp_path / "policy.pt"), ".onnx", ".stablehlo", "policy.onnx")
    refused(solo("export", run_dir, tmp_path / "policy.stablehlo"), "policy.onnx", "in torch")
    refused(solo("export", run_dir, tmp_path / "no" / "policy.onnx"), f"the folder {tmp_path / 'no'} does not exist")
    (tmp_path / "folder.onnx").mkdir()
    refused(solo("export", run_dir, tmp_path / "folder.onnx"), "is a folder")
    refused(solo("export", run_dir), "FILE")
    copy = run_dir / "ppo.py"
    copy.write_text(copy.read_text() + "\n# mine\n")
    refused(solo("export", run_dir, path), "neither an algorithm of this installation", "--trust-script")
    assert solo("export", run_dir, path, "--trust-script")[0] == 0
    path.unlink()
    monkeypatch.setattr(share, "find_spec", lambda name: None if name in ("onnxruntime", "flatbuffers") else name)
    refused(solo("export", run_dir, path), "needs onnxruntime", "pip install 'solorl[onnx]'")
    refused(solo("export", run_dir, tmp_path / "policy.stablehlo"), "flatbuffers", "pip install 'solorl[jax]'")
    assert not path.exists()


@pytest.mark.parametrize(("body", "said"), [
    pytest.param("obs = np.tanh(obs)", "must compute in torch", marks=pytest.mark.slow),
    ("if obs.sum() > 1e9: return np.zeros(len(obs), int)", "must compute in torch"),
    ("return np.zeros(len(obs), int)", "must compute in torch"),
])  # fmt: skip
def test_a_policy_that_cannot_be_traced_is_told(body, said, trained, solo, tmp_path):
    run_dir, _ = trained("ppo", QUICK["ppo"])
    copy = run_dir / "ppo.py"
    text = copy.read_text()
    line = "        obs = torch.as_tensor(obs, dtype=torch.float32, device=self.actor[0].weight.device).flatten(1)\n"
    assert text.count(line) == 1
    copy.write_text(text.replace(line, f"        {body}\n{line}"))
    refused(solo("export", run_dir, tmp_path / "policy.onnx", "--trust-script"), "cannot be exported", said)
    assert not (tmp_path / "policy.onnx").exists()


# ---------------------------------------------------------------------- the page
@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), [("ppo", "onnxruntime"), ("ppo_jax", "jax")])
def test_the_code_of_the_page_plays_without_the_libraries(name, package, trained, solo, tmp_path):
    """In a process that can import neither SoloRL nor torch."""
    text = section((ROOT / "docs/share.md").read_text(), "Without SoloRL: ONNX and StableHLO")
    [block] = [code for code in re.findall(r"```python\n(.*?)```", text, flags=re.S) if f" {package}" in code]
    run_dir, policy = trained(name, QUICK[name])
    assert solo("export", run_dir, file_for(name, tmp_path))[0] == 0
    forbid = "import sys\nsys.modules.update(torch=None, solorl=None)\n"
    (tmp_path / "block.py").write_text(forbid + block)
    done = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    action, *logits = re.findall(r"-?[\d.]+(?:e-\d+)?", done.stdout)
    obs, _ = policy.make_env().reset(seed=1)
    assert int(action) == policy(obs[None])[0]
    assert not logits or int(action) == np.argmax([float(x) for x in logits])
