"""`solo export`: the policy of a run as an ONNX file, which computes what the run computes."""

import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from conftest import ROOT, definitions, refused, section
from pixel_probe import plays_envpool, use_fake_envpool
from test_golden import flags_of

import solorl
from solorl import scripts
from solorl.lab.share import onnx as share

SHORT = "--total-timesteps 512 --eval-episodes 1 --eval-every 0"
QUICK = {
    "ppo": f"--num-envs 2 --num-steps 64 {SHORT}",
    "ppo_continuous_action": f"--env-id Pendulum-v1 --num-envs 2 --num-steps 64 {SHORT}",
    "dqn_jax": f"--learning-starts 100 {SHORT}",
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
    """The file in ONNX Runtime, as a function from inputs by name to outputs by name."""
    of_file = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in of_file.get_outputs()]
    return lambda **inputs: dict(zip(names, of_file.run(None, inputs), strict=True))


def inputs_of(policy, seed=0):
    """Observations of the policy's games and random ones, and memory; other random ones than those of the check."""
    inputs, axes = share.observations(policy)
    inputs["obs"] = np.concatenate(
        [inputs["obs"][:500], share.like(inputs["obs"][:500], np.random.default_rng(seed + 7))]
    )
    return inputs, axes


def acts_as(path, policy):
    """For batches of 1, 7 and 64: the actions of the file are those of the run (discrete ones all the same, for the
    trained policies here have no ties)."""
    act, (inputs, axes) = session(path), inputs_of(policy)
    for start, size in ((0, 1), (400, 7), (600, 64)):
        part = share.batch(inputs, axes, start, size)
        got = act(**part)["action"]
        if "state" in part:
            import torch

            want, _ = policy(part["obs"], torch.as_tensor(part["state"]), part["first"])
        else:
            want = policy(part["obs"])
        assert got.shape == want.shape and got.dtype == want.dtype and len(got) == size
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- the file computes what the run does
@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        pytest.param("ppo", {"action": "int64 (batch)", "logits": "float32 (batch, 2)"}, marks=pytest.mark.slow),
        pytest.param("ppo_continuous_action", {"action": "float32 (batch, 1)"}, marks=pytest.mark.slow),
        pytest.param("dqn_jax", {"action": "int32 (batch)", "q_values": "float32 (batch, 2)"}, marks=pytest.mark.slow),
    ],
)
def test_a_policy_is_exported_with_its_normaliser(name, outputs, trained, solo, tmp_path):
    if name.endswith("_jax"):
        pytest.importorskip("jax")
    run_dir, policy = trained(name, QUICK[name])
    path = tmp_path / "policy.onnx"
    code, out, err = solo("export", run_dir, path)
    assert (code, err) == (0, ""), err
    assert re.search(r"on 1,000 observations: largest relative error of \w+ \d\.\de-0[6-9]", out), out
    assert f"output {', '.join(f'{key} {kind}' for key, kind in outputs.items())}\n" in out
    acts_as(path, policy)
    said = {prop.key: prop.value for prop in onnx.load(path).metadata_props}
    assert said["env_id"] == policy.env_id and said["action_space"].startswith(("Discrete", "Box"))
    if name == "ppo_continuous_action":  # the first thing that is done to the observation is to normalise it
        graph = onnx.load(path).graph
        assert [node.op_type for node in graph.node if "obs" in node.input] == ["Sub"]


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
PARTS = {"ppo_dict": "observations that are not arrays of numbers", "ppo_hybrid": "it gives a tuple for a tensor"}


@pytest.mark.parametrize("name", PARTS)
def test_policies_with_observations_or_actions_of_parts_are_refused(name, trained, solo, tmp_path):
    run_dir, _ = trained(name, f"--num-envs 2 --num-steps 64 {SHORT}")
    refused(solo("export", run_dir, tmp_path / "policy.onnx"), "cannot be exported", PARTS[name])


IN_JAX = ["ppo_lstm_jax"]  # files in JAX with memory
# Files whose policies take a mask of the allowed actions.
MASKED = [name for name, path in scripts.script_paths().items() if "action_mask" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED)
def test_policies_that_take_a_mask_are_refused(name, trained, solo, tmp_path):
    run_dir, _ = trained(name, " ".join(flags_of(name)))
    refused(solo("export", run_dir, tmp_path / "policy.onnx"), "action_mask", "an exported one cannot")


def test_the_page_names_every_file_that_is_refused():
    page = (scripts.PACKAGE.parent / "docs/share.md").read_text()
    refusals = page.partition("Refused, with a sentence, are\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`(\w+)`", refusals)) == sorted([*PARTS, *MASKED, *IN_JAX])


@pytest.mark.slow
def test_memory_in_jax_is_refused(trained, solo, tmp_path):
    run_dir, _ = trained(IN_JAX[0], " ".join(flags_of(IN_JAX[0])))
    refused(solo("export", run_dir, tmp_path / "policy.onnx"), "it is in JAX and has memory")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in scripts.script_paths() if name not in [*PARTS, *MASKED, *IN_JAX]])
def test_every_algorithm_is_exported(name, trained, solo, tmp_path):
    """With the dtype of the environment: bytes for images."""
    run_dir, policy = trained(name, " ".join(flags_of(name)))
    path = tmp_path / "policy.onnx"
    code, _, err = solo("export", run_dir, path)
    assert (code, err) == (0, ""), err
    acts_as(path, policy)
    graph = onnx.load(path).graph
    kinds = share.types_of([*graph.input, *graph.output])
    images = any(word in policy.env_id for word in ("Catch", "atari/", "MovingDot"))
    assert kinds["obs"].startswith("uint8 (batch, " if images else "float32 (batch, ")
    remembers = name.endswith(("lstm", "trxl", "decision_transformer"))
    wanted = {"obs", "action"} | ({"state", "first", "next_state"} if remembers else set())
    if kinds["action"] in ("int64 (batch)", "int32 (batch)"):
        actors = ("ppo", "actor_critic", "offline")
        wanted.add("logits" if scripts.script_paths()[name].parent.name in actors else "q_values")
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
    describe = share.describe

    def mutate(model, loaded):
        weight = max(model.graph.initializer, key=lambda each: len(each.raw_data))
        values = onnx.numpy_helper.to_array(weight).copy()
        values.flat[5] += 0.01
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        describe(model, loaded)

    monkeypatch.setattr(share, "describe", mutate)
    path = tmp_path / "policy.onnx"
    path.write_text("before")
    code, out, err = solo("export", run_dir, path)
    assert code == 1 and out == "" and err.count("\n") == 1, (out, err)
    assert "has a relative error of" in err and "nothing was written" in err
    assert path.read_text() == "before" and [each.name for each in tmp_path.glob("*.onnx*")] == ["policy.onnx"]


class Fixed:
    """An exporter whose run computes what is given."""

    def __init__(self, exact=None, **outputs):
        self.outputs_of_run, self.exactly = outputs, exact or outputs

    def outputs(self, inputs):
        return {name: value[inputs["obs"][:, 0]] for name, value in self.outputs_of_run.items()}

    def exact(self, inputs):
        return {name: value.astype(np.float64) for name, value in self.exactly.items() if value.dtype.kind == "f"}


def checked(exporter, monkeypatch, **outputs):
    """`check` of a file that computes these outputs."""
    inputs = {"obs": np.arange(share.OBSERVATIONS)[:, None]}

    def computed(data, inputs, axes):
        start = 0
        for size in share.BATCHES:
            yield share.batch(inputs, axes, start, size), {k: v[start : start + size] for k, v in outputs.items()}
            start += size

    monkeypatch.setattr(share, "computed", computed)
    return share.check(b"", exporter, inputs, {"obs": 0})


def test_actions_may_differ_only_where_the_two_best_are_equally_good(monkeypatch):
    scores = np.random.default_rng(1).normal(size=(share.OBSERVATIONS, 3)).astype(np.float32)
    scores[3] = [2.0, 2.0 + 1e-6, 0.0]
    action = scores.argmax(1)
    other = action.copy()
    other[3] = 0
    run = Fixed(action=action, logits=scores)
    assert action[3] == 1 and checked(run, monkeypatch, action=action, logits=scores)[1] == 0
    assert checked(run, monkeypatch, action=other, logits=scores) == ({"logits": 0.0}, 1)
    other[4] = (other[4] + 1) % 3
    with pytest.raises(share.CheckFailed, match="2 of 1,000 actions differ"):
        checked(run, monkeypatch, action=other, logits=scores)
    with pytest.raises(share.CheckFailed, match="action is int32"):
        checked(run, monkeypatch, action=action.astype(np.int32), logits=scores)
    with pytest.raises(share.CheckFailed, match="logits is missing"):
        checked(run, monkeypatch, action=action)


@pytest.mark.parametrize(("error", "rounding", "passes"), [
    (5e-6, 0, True), (2e-5, 0, False), (2e-5, 1e-5, True), (6e-5, 1e-5, False), (np.nan, 0, False),
    (4.5e-5, 1e-5, True), (-3.5e-5, 1e-5, False),
])  # fmt: skip
def test_a_larger_error_is_allowed_only_where_the_run_itself_rounds_so(error, rounding, passes, monkeypatch):
    """The file is at most four times as far from double precision (1 + rounding) as the run (1)."""
    values = np.ones((share.OBSERVATIONS, 2))
    run = Fixed(exact={"action": values + rounding}, action=values.astype(np.float32))
    got = (values + error).astype(np.float32)
    if passes:
        errors, ties = checked(run, monkeypatch, action=got)
        assert errors["action"] == pytest.approx(error, rel=0.05) and ties == 0
    else:
        with pytest.raises(share.CheckFailed, match="action has a relative error of"):
            checked(run, monkeypatch, action=got)


@pytest.mark.slow
def test_double_precision_leaves_the_policy_as_it_was(trained):
    _, policy = trained("ppo_continuous_action", QUICK["ppo_continuous_action"])
    inputs, axes = share.observations(policy)
    exporter = share.exporter_of(policy, "logits")
    exporter.graph(share.batch(inputs, axes, 0, 3), axes)
    before, exact, after = exporter.outputs(inputs), exporter.exact(inputs), exporter.outputs(inputs)
    assert exact["action"].dtype == np.float64 and before["action"].dtype == np.float32
    assert before["action"].tobytes() == after["action"].tobytes()
    assert 0 < share.relative_error(exact["action"], before["action"]) < 1e-5


def test_the_observations_are_those_of_games_and_random_ones(trained):
    _, policy = trained("ppo", QUICK["ppo"])
    inputs, axes = share.observations(policy)
    obs = inputs["obs"]
    assert obs.shape == (1000, 4) and obs.dtype == np.float32 and axes == {"obs": 0}
    assert np.abs(obs[:8]).max() <= 0.05 < np.abs(obs[8:500]).max()  # CartPole begins near zero
    assert len(np.unique(obs, axis=0)) > 900 and obs[500:].std(0).min() > 2 * obs[:500].std(0).min()


# ---------------------------------------------------------------------- operations of JAX
@pytest.mark.slow
def test_operations_of_jax_are_written_as_they_are(tmp_path):
    """Each of the writer's rules against JAX, with batches of 1 and 5."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    from solorl.lab.share.onnx_jax import JaxPolicy
    from solorl.run.trainings import PolicyOfSeed

    def act(model, x):
        y = x @ model["w"] + model["b"]
        parts = jnp.split(y, 2, axis=1)
        z = jnp.concatenate([parts[1], parts[0] ** 3, jnp.square(parts[0]), y[:, 1:3]], 1)
        z = jnp.where(z > 0.3, z, jax.nn.sigmoid(z)) + jax.lax.clamp(-0.5, z, 0.5)
        z = z / jnp.sqrt((z**2).mean(1, keepdims=True)) + jax.lax.rsqrt(1 + z.max(1)[:, None] ** 2) - z.min(1)[:, None]
        cube = z.reshape(len(z), 2, 4)
        sums = jnp.einsum("nij,kj->nik", cube, model["k"]) + cube.transpose(0, 2, 1)[:, :2, :1]
        wide = jnp.broadcast_to(model["b"], (len(x), 4))
        wide = jnp.pad(wide, ((0, 0), (1, 2)), constant_values=7)[:, :6]
        return jnp.concatenate([sums.reshape(len(x), -1), wide, jax.nn.softmax(z), jnp.abs(-jnp.exp(z))], 1)

    rng = np.random.default_rng(0)
    model = {"w": rng.normal(size=(3, 4)), "b": rng.normal(size=4), "k": rng.normal(size=(3, 4))}
    model = {name: jnp.asarray(value, jnp.float32) for name, value in model.items()}
    exporter = JaxPolicy(PolicyOfSeed(act, jax.jit(act), lambda: model), "logits")
    obs = rng.normal(size=(5, 3)).astype(np.float32)
    onnx.save(exporter.graph({"obs": obs}, {"obs": 0}), tmp_path / "it.onnx")
    run = session(tmp_path / "it.onnx")
    for size in (1, 5):
        np.testing.assert_allclose(run(obs=obs[:size])["action"], act(model, obs[:size]), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_images_of_bytes_stay_bytes_and_keep_their_shape(tmp_path):
    """The network of a file in JAX for games of Atari, whose convolutions are products of matrices."""
    jax = pytest.importorskip("jax")
    from solorl.lab.share.onnx_jax import JaxPolicy
    from solorl.run.trainings import PolicyOfSeed

    names = definitions("ppo_atari_envpool_jax")
    shapes = jax.eval_shape(lambda: names["init_params"](jax.random.key(1), 6))
    params = jax.tree.map(lambda x: np.random.default_rng(1).normal(0, 0.05, x.shape).astype(np.float32), shapes)
    exporter = JaxPolicy(PolicyOfSeed(names["act"], jax.jit(names["act"]), lambda: params), "logits")
    obs = np.random.default_rng(0).integers(0, 255, (5, 4, 84, 84), np.uint8, endpoint=True)
    onnx.save(exporter.graph({"obs": obs}, {"obs": 0}), tmp_path / "it.onnx")
    assert share.types_of(onnx.load(tmp_path / "it.onnx").graph.input) == {"obs": "uint8 (batch, 4, 84, 84)"}
    run = session(tmp_path / "it.onnx")
    exact = exporter.exact({"obs": obs})["logits"]
    assert exact.dtype == np.float64
    for size in (1, 5):
        got = run(obs=obs[:size])
        logits = names["actor_critic"](params, obs[:size])[0]
        np.testing.assert_allclose(got["logits"], logits, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(got["logits"], exact[:size], rtol=1e-4, atol=1e-6)
        assert got["action"].tolist() == logits.argmax(1).tolist() and got["action"].dtype == np.int32


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8])
def test_observations_in_jax_keep_shape_and_type(dtype, tmp_path):
    """It is the script's `act` that flattens them."""
    jax = pytest.importorskip("jax")
    from solorl.lab.share.onnx_jax import JaxPolicy
    from solorl.run.trainings import PolicyOfSeed

    def act(params, obs):
        assert obs.shape[1:] == (2, 3) and obs.dtype == jax.dtypes.canonicalize_dtype(dtype)
        return (obs.reshape(len(obs), -1) @ params).argmax(1)

    params = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    params -= params.mean(0)  # so that not one action is the best everywhere
    policy = PolicyOfSeed(act, jax.jit(act), lambda: params)
    obs = (100 * np.random.default_rng(1).random((9, 2, 3))).astype(dtype)
    onnx.save(JaxPolicy(policy, "logits").graph({"obs": obs}, {"obs": 0}), tmp_path / "it.onnx")
    assert share.types_of(onnx.load(tmp_path / "it.onnx").graph.input) == {"obs": f"{np.dtype(dtype)} (batch, 2, 3)"}
    got = session(tmp_path / "it.onnx")(obs=obs)
    assert got["action"].tolist() == policy(obs).tolist() and len(set(policy(obs).tolist())) > 1
    np.testing.assert_allclose(got["logits"], obs.reshape(9, 6).astype(np.float32) @ params, rtol=1e-4)


def test_policies_in_jax_with_memory_or_actions_of_parts_are_refused():
    jax = pytest.importorskip("jax")
    from solorl.errors import UsageError
    from solorl.run.trainings import PolicyOfSeed

    def remembers(params, obs, state, first):
        return obs.argmax(1), state

    def two(params, obs):
        return obs.argmax(1), obs

    obs = np.ones((3, 2), np.float32)
    for act, words in ((remembers, "it is in JAX and has memory"), (two, "its action must be one array")):
        loaded = SimpleNamespace(policy=PolicyOfSeed(act, jax.jit(act), lambda: {}))
        with pytest.raises(UsageError, match=words):
            share.exporter_of(loaded, "logits").outputs({"obs": obs})


def test_an_operation_without_a_rule_is_named():
    jax = pytest.importorskip("jax")
    from solorl.errors import UsageError
    from solorl.lab.share.onnx_jax import JaxPolicy
    from solorl.run.trainings import PolicyOfSeed

    def act(model, obs):
        jax.lax.digamma(obs)  # not needed, and so not refused
        return jax.numpy.sort(obs, 1)

    exporter = JaxPolicy(PolicyOfSeed(act, jax.jit(act), lambda: {}), "logits")
    with pytest.raises(UsageError, match="JAX's operation sort has no rule"):
        exporter.graph({"obs": np.ones((3, 2), np.float32)}, {"obs": 0})


# ---------------------------------------------------------------------- bad input
def test_bad_input_is_one_sentence(trained, solo, tmp_path, monkeypatch):
    run_dir, _ = trained("ppo", QUICK["ppo"])
    path, name = tmp_path / "policy.onnx", run_dir.name[:-1]
    refused(solo("export", run_dir.with_name(name), path), "there is no run folder", f"did you mean {run_dir.name}?")
    refused(solo("export", tmp_path, path), "it has no config.json")
    refused(solo("export", run_dir, tmp_path / "policy.pt"), "whose name ends in .onnx", "policy.onnx")
    refused(solo("export", run_dir, tmp_path / "no" / "policy.onnx"), f"the folder {tmp_path / 'no'} does not exist")
    (tmp_path / "folder.onnx").mkdir()
    refused(solo("export", run_dir, tmp_path / "folder.onnx"), "is a folder")
    refused(solo("export", run_dir), "FILE.onnx")
    copy = run_dir / "ppo.py"
    copy.write_text(copy.read_text() + "\n# mine\n")
    refused(solo("export", run_dir, path), "neither an algorithm of this installation", "--trust-script")
    assert solo("export", run_dir, path, "--trust-script")[0] == 0
    path.unlink()
    monkeypatch.setattr(share, "find_spec", lambda name: None if name == "onnxruntime" else name)
    refused(solo("export", run_dir, path), "needs onnxruntime", "pip install 'solorl[onnx]'")
    assert not path.exists()


@pytest.mark.parametrize(("body", "said"), [
    pytest.param("obs = np.tanh(obs)", "must compute in torch", marks=pytest.mark.slow),
    ("if obs.sum() > 1e9: return np.zeros(len(obs), int)", "must compute in torch"),
    ("return np.zeros(len(obs), int)", "ndarray"),
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
def test_the_code_of_the_page_plays_without_the_libraries(trained, solo, tmp_path):
    """In a process that can import neither SoloRL nor torch."""
    text = section((ROOT / "docs/share.md").read_text(), "ONNX")
    [block] = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(block.split("\n\n")[0].splitlines() + block.split("\n\n")[1].splitlines()) == 6
    run_dir, policy = trained("ppo", QUICK["ppo"])
    assert solo("export", run_dir, tmp_path / "policy.onnx")[0] == 0
    forbid = "import sys\nsys.modules.update(torch=None, solorl=None, jax=None)\n"
    (tmp_path / "block.py").write_text(forbid + block)
    done = subprocess.run([sys.executable, "block.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    action, *logits = re.findall(r"-?[\d.]+(?:e-\d+)?", done.stdout)
    obs, _ = policy.make_env().reset(seed=1)
    assert int(action) == policy(obs[None])[0] == np.argmax([float(x) for x in logits]) and len(logits) == 2
