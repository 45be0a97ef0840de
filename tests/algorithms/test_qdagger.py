"""qdagger_dqn_atari_impalacnn.py: its network and losses by hand, the three phases, and what may be a teacher; also
`run.keep`, which copies it."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from catch_teacher import scored, teacher_folder
from conftest import comparable, definitions, documented_keys, rows, run, script
from test_hub import hub  # noqa: F401 a fixture

import solorl
from solorl import Run
from solorl.compute.speed import GradientStep
from solorl.run.saving import Checkpoints

NAME = "qdagger_dqn_atari_impalacnn"
QDAGGER, DQN = definitions(NAME), definitions("dqn_atari")
SMALL = "--env-id pixel_probe:Catch-v0 --teacher-steps 40 --offline-steps 20 --total-timesteps 160".split()
SMALL += "--learning-starts 40 --batch-size 4 --buffer-size 200 --eval-every 0 --eval-episodes 1".split()


def short(train, *flags, teacher=None, name=NAME, **kwargs):
    """The variables of a short training with the perfect teacher, or another one."""
    return train(name, *SMALL, "--teacher", teacher or teacher_folder(), *flags, **kwargs)


def random_images(n, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, 4, 84, 84), dtype=np.uint8))


# ---------------------------------------------------------------------- network
def test_the_network_is_that_of_impala():
    """Fig. 3 of the paper, operation by operation: three times a convolution, a maximum, two residual blocks."""
    torch.manual_seed(0)
    net, x = QDAGGER["impala_cnn"](), random_images(2)
    weights = iter([layer for layer in net.modules() if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear))])
    want = x.float() / 255
    with torch.no_grad():
        for channels, size in ((16, 42), (32, 21), (32, 11)):
            conv = next(weights)
            want = F.pad(F.conv2d(want, conv.weight, conv.bias, padding=1), (1, 1, 1, 1), value=-torch.inf)
            want = want.unfold(2, 3, 2).unfold(3, 3, 2).amax((4, 5))
            assert want.shape == (2, channels, size, size)
            for _ in range(2):
                first, second = next(weights), next(weights)
                inner = F.conv2d(want.clamp(min=0), first.weight, first.bias, padding=1)
                want = want + F.conv2d(inner.clamp(min=0), second.weight, second.bias, padding=1)
        linear = next(weights)
        want = (want.clamp(min=0).reshape(2, -1) @ linear.weight.T + linear.bias).clamp(min=0)
        assert want.shape == (2, 256) and next(weights, None) is None
        torch.testing.assert_close(net(x), want, rtol=1e-4, atol=1e-5)


def test_the_student_acts_greedily():
    torch.manual_seed(0)
    net, image = QDAGGER["QNetwork"](3), random_images(20)
    with torch.no_grad():
        net.head.bias -= net(image).mean(0)  # on average no action is better than another
    q, action = net(image).detach().numpy(), net.act(image.numpy())
    assert q.shape == (20, 3) and len(set(action)) > 1
    np.testing.assert_array_equal(q[np.arange(20), action], q.max(1))


# ---------------------------------------------------------------------- losses
def test_distillation_by_hand():
    """Row by row, action by action: a sum over actions and a mean over the batch, at any temperature."""
    rng = np.random.default_rng(0)
    q, teacher_q = rng.normal(size=(2, 5, 4))
    for temperature in (0.3, 1.0, 7.0):
        rows = []
        for mine, theirs in zip(q / temperature, teacher_q / temperature, strict=True):
            p = [np.exp(x) / sum(np.exp(theirs)) for x in theirs]
            rows.append(-sum(p[a] * np.log(np.exp(mine[a]) / sum(np.exp(mine))) for a in range(4)))
        got = QDAGGER["distill_loss"](torch.tensor(q), torch.tensor(teacher_q), temperature)
        assert got.item() == pytest.approx(sum(rows) / 5, rel=1e-9)


def test_distillation_is_an_expectation():
    """A batch of 32 weighs as much as each of its rows; and it is least where the policies are equal, whatever the
    sum of the values."""
    torch.manual_seed(0)
    q, teacher_q = torch.randn(2, 1, 6, dtype=torch.float64)
    loss = QDAGGER["distill_loss"]
    one, many = loss(q, teacher_q, 1.0), loss(q.repeat(32, 1), teacher_q.repeat(32, 1), 1.0)
    assert many.item() == pytest.approx(one.item(), rel=1e-12)
    same = (teacher_q + 3).requires_grad_()
    [gradient] = torch.autograd.grad(loss(same, teacher_q, 1.0), same)
    assert gradient.abs().max() < 1e-12 and loss(same, teacher_q, 1.0) < one


def test_loss_by_hand():
    """The error of DQN, as dqn_atari.py has it, and the weighted distillation; only the student gets gradients."""
    torch.manual_seed(0)
    student, target, teacher = (QDAGGER["QNetwork"](3) for _ in range(3))
    obs, next_obs, done = random_images(6, 1), random_images(6, 2), torch.tensor([0.0, 1, 0, 0, 1, 0])
    batch = QDAGGER["Batch"](obs, torch.randint(3, (6,)), torch.randn(6), done, next_obs)
    td, td_metrics = DQN["td_loss"](student, target, batch, 0.9)
    distillation = QDAGGER["distill_loss"](student(obs), teacher(obs), 2.0)
    for weight in (0.0, 0.7):
        loss, metrics = QDAGGER["qdagger_loss"](student, target, teacher, batch, 0.9, 2.0, torch.tensor(weight))
        assert loss.item() == pytest.approx((td + weight * distillation).item(), rel=1e-5)
        assert metrics["losses/distill_loss"].item() == pytest.approx(distillation.item(), rel=1e-5)
        assert {key: metrics[key].item() for key in td_metrics} == pytest.approx(
            {key: value.item() for key, value in td_metrics.items()}, rel=1e-5
        )
    loss.backward()
    assert all(p.grad is not None for p in student.parameters())
    assert all(p.grad is None for net in (target, teacher) for p in net.parameters())


def test_returns_of_games_against_a_loop():
    rng = np.random.default_rng(0)
    for num_envs in (1, 3):
        unfinished, returns, games, naive = np.zeros(num_envs), np.zeros(4), [], [[] for _ in range(num_envs)]
        for _ in range(20):
            reward, over = rng.integers(-3, 4, (5, num_envs)).astype(np.float32), rng.random((5, num_envs)) < 0.2
            for t in range(5):
                for i in range(num_envs):
                    naive[i].append(reward[t, i])
                    if over[t, i]:
                        games.append(sum(naive[i]))
                        naive[i] = []
            unfinished, returns = QDAGGER["count_returns"](unfinished, returns, reward, over)
            assert returns.tolist() == ([0.0] * 4 + games)[-4:] and unfinished.tolist() == [sum(each) for each in naive]
        assert len(games) > 5


# ---------------------------------------------------------------------- the three phases
@pytest.fixture
def steps(monkeypatch):
    """The inputs of each gradient step from now on."""
    seen, step = [], GradientStep.__call__

    def note(self, *inputs):
        seen.append(inputs)
        return step(self, *inputs)

    monkeypatch.setattr(GradientStep, "__call__", note)
    return seen


@pytest.mark.parametrize("num_envs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_phases_one_after_the_other(num_envs, train, steps):
    """40 steps of the teacher, 20 updates on them, 100 steps of the student: an update every 4 after the first 40."""
    v = short(train, "--num-envs", num_envs, "--exploration-fraction", "1")
    games = [v[name].inserted - number for name, number in (("teacher_replay", 40), ("replay", 100))]
    ended = rows(v["run"].dir, "charts/episodic_return")
    assert games[0] >= num_envs and games[1] == 4 * num_envs + len(ended) > 4 * num_envs  # 4: the first stacks
    assert min(row["global_step"] - row["charts/episodic_length"] * num_envs for row in ended) >= 60
    assert len(steps) == 20 + 15
    of_teacher, of_student = (
        {bytes(image) for image in v[name].arrays["image"]} for name in ("teacher_replay", "replay")
    )
    for i, inputs in enumerate(steps):
        seen = {bytes(image) for image in inputs[2].next_obs[:, -1].numpy()}
        assert seen <= (of_teacher if i < 20 else of_student)
    first = v["replay"].arrays["image"][:num_envs]  # of new games: no ball yet, the paddle in the middle
    assert not first[:, :72].any() and (first[:, -1, 36:48] == 255).all()
    logged = rows(v["run"].dir, "charts/epsilon")
    epsilon = {row["global_step"]: row["charts/epsilon"] for row in logged}
    assert epsilon[4] == 1 and epsilon[64] == 1  # each player begins with the first epsilon
    assert epsilon[40] == pytest.approx(1 - 0.99 * 9 / 10) and epsilon[160] == pytest.approx(1 - 0.99 * 24 / 25)
    keys = {key for row in rows(v["run"].dir) for key in row} - {"global_step", "wall_time"}
    assert keys == documented_keys(NAME)
    # the teacher learns nothing, and is no part of the student's model
    gain = v["teacher"].models["q_network"].gain
    assert gain.item() == 1 and gain.grad is None
    assert {name.partition(".")[0] for name in weights_of(v["run"].dir)} == {"q_network", "target_network"}


def test_no_life_is_lost_where_the_next_game_begins_with_fewer(train):
    """A time limit after a bonus life does not end the task, though the next game begins with fewer lives; neither for
    the teacher nor for the student."""
    env = ["--env-id", "pixel_doubles:PixelBonus-v0"]
    v = short(train, *env, teacher=teacher_folder(*env))
    for replay, played in ((v["teacher_replay"], 40), (v["replay"], 100)):
        arrays = replay.arrays
        assert np.sum(arrays["back"][:played] == 0) > 1 and not arrays["done"].any()  # 0: the first image of a game


def test_a_life_lost_in_the_step_of_the_time_limit_ends_the_return(train):
    """For the teacher and for the student; each replay buffer holds the end of every game that it holds."""
    env = ["--env-id", "pixel_doubles:PixelLastLife-v0"]
    v = short(train, *env, teacher=teacher_folder(*env))
    for replay in (v["teacher_replay"], v["replay"]):
        row = np.arange(max(0, replay.inserted - replay.capacity), replay.inserted) % replay.capacity
        done, begins = replay.arrays["done"][row][:-1] == 1, replay.arrays["back"][row][1:] == 0
        assert begins.sum() > 1 and (done == begins).all()  # a game ends where the next one begins


@pytest.mark.slow
@pytest.mark.parametrize("step", [20, 120])
@pytest.mark.parametrize("saved", [True, False])
def test_stacks_after_a_resume_are_of_one_game(step, saved, train, monkeypatch):
    """Where games begin again, of teacher or student, and without the replay buffers where games go on: then the older
    images of their stacks are there. The student's return of a game that is gone is forgotten."""
    monkeypatch.setattr("solorl.checkpoints.checkpoint.KEEP", 100)
    env = ["--env-id", f"pixel_doubles:{'PixelFickle-v0' if saved else 'PixelDiary-v0'}"]
    flags = ["--num-envs", "2", "--save-every", "20", *(["--save-replay"] if saved else [])]
    run_dir = short(train, *env, *flags, teacher=teacher_folder(*env))["run"].dir
    back_to(step, run_dir)
    reset, begun, resume = Run.reset, [], Checkpoints.resume

    def noted_reset(self, envs):
        begun.append(reset(self, envs))
        return begun[-1]

    def changed_resume(self, *inputs):
        found = resume(self, *inputs)
        if found:  # the saved return, where games are gone
            self.parts["now"].unfinished[:] = 100
        return found

    monkeypatch.setattr(Run, "reset", noted_reset)
    monkeypatch.setattr(Checkpoints, "resume", changed_resume)
    v = train(NAME, "--resume", run_dir)
    assert v["now"].unfinished.max() < 100 > v["now"].returns.max()
    assert v["run"].restarted == ([0, 1] if saved else [])
    replay = v["teacher_replay"] if step == 20 else v["replay"]
    index, whole = replay.history(np.arange(replay.inserted))
    games = replay.arrays["image"][index[whole]][:, :, -1, -1]
    assert whole.sum() > 15 and (games == games[:, :1]).all()
    if not saved:
        first = replay.arrays["image"][index[whole]][:2, :4]
        np.testing.assert_array_equal(first, begun[0])
        assert len(np.unique(first[0, :, 0, 0])) == 4


def test_the_weight_falls_as_the_student_nears_its_teacher(train, steps):
    """1 - student / teacher and never less than 0, the student's score being the mean of its last ten games, each of
    which was 0 at first. Every game gives 5 here, however it is played."""
    env_id = ["--env-id", "pixel_doubles:PixelDiary-v0"]
    teacher = shutil.copytree(teacher_folder(*env_id), teacher_folder(*env_id).with_name("weak"), dirs_exist_ok=True)
    v = short(train, *env_id, "--total-timesteps", "280", teacher=scored(Path(teacher), 4.0))
    ends = [row["global_step"] for row in rows(v["run"].dir, "charts/episodic_return")]
    assert len(ends) > 10
    for row in rows(v["run"].dir, "charts/distill_coeff"):
        score = 5 * min(10, sum(end <= row["global_step"] for end in ends)) / 10
        assert row["charts/distill_coeff"] == pytest.approx(max(0, 1 - score / 4), abs=1e-6)
    weights = [inputs[-1].item() for inputs in steps]
    assert weights[:20] == [1.0] * 20 and weights == sorted(weights, reverse=True) and weights[-1] == 0


@pytest.mark.slow
def test_the_teacher_plays_its_own_policy(train):
    """Without random actions it catches every ball, and its clipped rewards are in its buffer."""
    v = short(train, "--start-e", "0", "--end-e", "0")
    arrays = v["teacher_replay"].arrays
    assert arrays["reward"][arrays["done"] == 1].tolist() == [1.0] * int(arrays["done"].sum())
    assert arrays["done"].sum() >= 2


def weights_of(run_dir):
    from safetensors.numpy import load_file

    return load_file(run_dir / "model.safetensors")


# ---------------------------------------------------------------------- resuming
@pytest.fixture
def whole(train, tmp_path, monkeypatch):
    """The variables of a training that has all its checkpoints, one every 20 steps, and whose teacher's folder is gone:
    40 steps of the teacher, 40 updates, 80 steps of the student."""
    monkeypatch.setattr("solorl.checkpoints.checkpoint.KEEP", 100)
    folder = shutil.copytree(teacher_folder(), tmp_path / "teacher")
    flags = "--num-envs 2 --offline-steps 40 --learning-starts 20 --save-every 20 --save-replay".split()
    v = short(train, *flags, teacher=folder)
    shutil.rmtree(folder)
    return v


def back_to(step, run_dir):
    """Throw away what came after this step."""
    later = [path for path in (run_dir / "checkpoint").iterdir() if int(path.name.removeprefix("step_")) > step]
    assert later
    for path in later:
        shutil.rmtree(path)


@pytest.mark.parametrize("step", [60, *(pytest.param(step, marks=pytest.mark.slow) for step in (20, 40, 80, 120))])
def test_resumed_in_any_phase_equals_uninterrupted(step, whole, train):
    """While the teacher plays, offline, online, and between two phases: weights, buffers, metrics."""
    expected, run_dir = comparable(whole["run"].dir), whole["run"].dir
    back_to(step, run_dir)
    v = train(NAME, "--resume", run_dir)
    assert v["run"].checkpoints.resumed["step"] == step and comparable(run_dir) == expected
    for what in ("q_network", "target_network"):
        for x, y in zip(v[what].parameters(), whole[what].parameters(), strict=True):
            assert torch.equal(x, y)
    for what in ("teacher_replay", "replay"):
        assert v[what].inserted == whole[what].inserted > 40
        expected = whole[what].arrays | vars(whole[what].state)
        for key, array in (v[what].arrays | vars(v[what].state)).items():
            assert np.array_equal(array, expected[key]), (what, key)
    for name, array in vars(whole["now"]).items():
        assert np.array_equal(getattr(v["now"], name), array)
    assert whole["now"].returns.any()


@pytest.mark.slow
def test_without_its_replay_a_resumed_run_skips_what_is_left_offline(train, steps, monkeypatch):
    """It has nothing to learn from there; what the student plays afterwards is learned from as always."""
    monkeypatch.setattr("solorl.checkpoints.checkpoint.KEEP", 100)
    run_dir = short(train, "--save-every", "20", "--offline-steps", "40")["run"].dir
    for step, offline in ((60, 0), (20, 40)):
        back_to(step, run_dir)
        steps.clear()
        v = train(NAME, "--resume", run_dir)
        assert "the part teacher_replay was not saved" in train.out and len(steps) == offline + 10
        assert v["replay"].inserted > 80


# ---------------------------------------------------------------------- the teacher
@pytest.mark.slow
def test_a_student_is_played_without_its_teacher(train, solo, tmp_path):
    run_dir = short(train, teacher=shutil.copytree(teacher_folder(), tmp_path / "teacher"))["run"].dir
    shutil.rmtree(tmp_path / "teacher")
    shutil.rmtree(run_dir / "kept")
    code, out, err = solo("play", run_dir, "--episodes", "2")
    assert (code, err) == (0, "") and "over 2 greedy episodes" in out
    policy, obs = solorl.load(run_dir), random_images(9)
    assert policy.models.keys() == {"q_network", "target_network"} and policy.score in (-1.0, 1.0)
    assert policy(obs.numpy()).tolist() == policy.models["q_network"](obs).argmax(1).tolist()


@pytest.mark.slow
def test_a_student_teaches_the_next_one(train):
    first = scored(short(train)["run"].dir, 0.5)
    v = short(train, teacher=first)
    assert v["teacher"].score == 0.5 and v["run"].step == 160
    assert sorted(path.name for path in (v["run"].dir / "kept").glob("*/*")) == sorted(
        [f"{NAME}.py", "config.json", "model.safetensors"]
    )


OTHERS = "--env-id pixel_probe:Catch-v0 --total-timesteps 32 --learning-starts 20 --batch-size 4 --buffer-size 100"


@pytest.mark.parametrize("name", ["dqn_atari", pytest.param("c51_atari", marks=pytest.mark.slow)])
def test_files_with_a_q_network_are_teachers(name, train, steps):
    """C51 by the means of its distributions. The values that the loss sees are those of the trained network."""
    trained = train(name, *OTHERS.split(), "--eval-every", "0", "--eval-episodes", "1")
    steps.clear()
    v = short(train, teacher=scored(trained["run"].dir, 1.0))
    obs = random_images(4)
    with torch.no_grad():
        assert torch.equal(steps[0][1](obs), trained["q_network"](obs)) and v["run"].step == 160
    assert v["teacher"](obs.numpy()).tolist() == trained["q_network"].act(obs.numpy()).tolist()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: "", ["there is no teacher: --teacher must name a run folder"]),
        (lambda folder: folder.with_name("nowhere"), ["there is no run folder", "nowhere"]),
        (lambda folder: folder.parent, ["is not a run folder: it has no config.json"]),
        (lambda folder: scored(folder, None), ["does not say what its model scored"]),
        (lambda folder: scored(folder, -0.2), ["must have scored more than 0"]),
        (lambda folder: lose(folder, "model.safetensors"), ["model.safetensors cannot be read"]),
        (lambda folder: lose(folder, "catch_teacher.py"), ["has lost its script catch_teacher.py"]),
        (lambda folder: change(folder), ["is neither an algorithm of this installation", "then add --trust-script"]),
    ],
    ids="none missing no-run no-score negative-score no-model no-script untrusted".split(),
)
def test_what_is_no_teacher_is_refused(spoil, words, train, tmp_path):
    folder = shutil.copytree(teacher_folder(), tmp_path / "teachers" / "teacher")
    given = spoil(folder)
    train(NAME, *SMALL, f"--teacher={given}", code=2)
    for word in words:
        assert word in train.out
    assert train.out.startswith("error: ") and train.out.count("\n") == 1 and not (tmp_path / "runs").exists()


def lose(folder, name):
    (folder / name).unlink()
    return folder


def change(folder):
    """Another script in the folder, with observations of three images."""
    script = folder / "catch_teacher.py"
    script.write_text(script.read_text().replace("skip=4), 4)", "skip=4), 3)"))
    return folder


def test_what_a_script_does_not_catch_is_one_sentence(tmp_path):
    """As a process of its own: `solorl.load` raises, and the run that asked for it ends with exit code 2."""
    words = [sys.executable, script(NAME), *SMALL, "--teacher", tmp_path / "nowhere", "--runs-dir", tmp_path]
    done = run(*words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    folder = shutil.copytree(teacher_folder(), tmp_path / "teacher")
    lose(folder, "model.safetensors")
    done = run(*words[:-3], folder, *words[-2:])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "cannot be read" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_script_that_is_trusted_may_teach_if_its_spaces_fit(train, tmp_path):
    folder = shutil.copytree(teacher_folder(), tmp_path / "teacher")
    script = folder / "catch_teacher.py"
    script.write_text(script.read_text() + "\n# mine\n")
    run_dir = short(train, "--trust-script", "--save-every", "60", teacher=folder)["run"].dir
    back_to(120, run_dir)
    train(NAME, "--resume", run_dir)
    [copy], mark = (run_dir / "kept").glob(f"*/{script.name}"), tmp_path / "executed"
    copy.write_text(copy.read_text() + f"open({str(mark)!r}, 'w')\n")
    train(NAME, "--resume", run_dir, code=2)  # although config.json says that the script was to be trusted
    assert "then add --trust-script" in train.out and not mark.exists()
    short(train, "--trust-script", teacher=change(folder), code=2)
    spaces = [f"Box(0, 255, ({images}, 84, 84), uint8) and Discrete(3)" for images in (3, 4)]
    assert f"has the spaces {spaces[0]}, not {spaces[1]}" in train.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        (
            "dqn_atari",
            "--env-id pixel_doubles:PixelDiary-v0",
            "was trained on pixel_doubles:PixelDiary-v0, not on pixel_",
        ),
        ("sac_atari", "--env-id pixel_probe:Catch-v0", "has no q_network, but actor and"),
    ],
)
def test_runs_of_another_kind_are_refused(name, flags, words, train):
    flags = f"{flags} --total-timesteps 8 --learning-starts 4 --batch-size 2 --buffer-size 40 --eval-episodes 1".split()
    run_dir = train(name, *flags)["run"].dir
    short(train, teacher=run_dir, code=2)
    assert words in train.out and str(run_dir) in train.out and train.out.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--temperature 0", "--temperature must be more than 0"),
        ("--teacher-steps 12 --train-frequency 16", "--teacher-steps 12 is less than one iteration of 16"),
        ("--teacher-steps 9", "--teacher-steps and --buffer-size must be at least 10, the images of a transition"),
        ("--num-envs 3 --buffer-size 29", "--teacher-steps and --buffer-size must be at least 30"),
        ("--total-timesteps 60", "--total-timesteps 60 leaves no iteration of"),
        ("--offline-steps -1", "--offline-steps is -1, but must be at least 0"),
    ],
)
def test_phases_that_cannot_be_are_refused(flags, words, train):
    short(train, *flags.split(), code=2)
    assert words in train.out and "Traceback" not in train.out


@pytest.mark.slow
def test_there_may_be_no_offline_phase(train, steps):
    v = short(train, "--offline-steps", "0")
    assert len(steps) == 20 and v["offline_iterations"] == 0


@pytest.mark.slow
def test_a_teacher_on_the_hub(hub, train, solo, tmp_path):  # noqa: F811
    """Pulled for the training; the copy of it needs no hub when the run goes on. Without a network: one sentence."""
    trained = train("dqn_atari", *OTHERS.split(), "--eval-every", "0", "--eval-episodes", "1")
    assert solo("push", scored(trained["run"].dir, 1.0), "ann/teacher")[0] == 0
    shutil.rmtree(trained["run"].dir)
    v = short(train, "--save-every", "80", teacher="hf://ann/teacher")
    assert len(list((v["run"].dir / "kept").glob("*/dqn_atari.py"))) == 1
    short(train, teacher="hf://ann/nobody", code=2)
    assert "ann/nobody cannot be pulled: there is no such repository" in train.out
    hub.repos.clear()
    shutil.rmtree(max((v["run"].dir / "checkpoint").iterdir()))
    assert train(NAME, "--resume", v["run"].dir)["teacher"].score == 1.0


# ---------------------------------------------------------------------- learning
@pytest.mark.slow
def test_it_learns_catch_from_its_teacher(train):
    """Most of it offline: 600 updates, then 800 steps of its own. Seeds 2 and 3 reach 0.9."""
    flags = "--env-id pixel_probe:Catch-v0 --teacher-steps 1000 --offline-steps 600 --total-timesteps 2400".split()
    flags += "--learning-starts 100 --buffer-size 2000 --learning-rate 0.0005 --gamma 0.9".split()
    flags += "--target-network-frequency 100 --start-e 0.5 --end-e 0.05 --eval-every 0 --save-every 0".split()
    run_dir = train(NAME, *flags, "--teacher", teacher_folder())["run"].dir
    assert rows(run_dir, "eval/episodic_return")[-1]["eval/episodic_return"] >= 0.8
