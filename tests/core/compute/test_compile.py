"""`--compile`: the gradient of every torch file is traced as one piece of code, and the training is the same."""

import sys
import sysconfig

import pytest
import torch
from pixel_probe import use_fake_envpool
from test_golden import FLAGS, flags_of

from solorl.compute import speed
from solorl.scripts import script_paths

CXX = "clang++" if sys.platform == "darwin" else "g++"
# The rest takes its gradients in another way, or none: files in JAX, streaming agents, random search.
SCRIPTS = [name for name, path in script_paths().items() if "run.gradient_step(" in path.read_text()]


def forget_the_last_script():
    """For the compiler, `__main__` is the first script that it met in this process."""
    torch._dynamo.reset()
    vars(speed).pop("__import___main__", None)
    if hasattr(torch._dynamo.symbolic_convert, "_import_module"):
        torch._dynamo.symbolic_convert._import_module.cache_clear()


# each takes 2 to 12 seconds
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name not in ("ppo", "dqn") else name for name in SCRIPTS],
)
def test_the_compiled_gradient_is_one_graph_and_the_same(name, train, monkeypatch):
    """The first gradient of each loss in a training, compiled and not."""
    options, losses, compiler = [], [], torch.compile

    def compile_whole(function, **settings):  # without generating C++, which takes half a minute
        options.append((function.__name__, settings))
        whole = compiler(function, backend="aot_eager", fullgraph=True, dynamic=settings["dynamic"])

        def compare(flat, parameters, loss_of, *inputs):
            random = torch.get_rng_state()
            gradients, *rest = function(flat, parameters, loss_of, *inputs)
            if loss_of.__name__ not in losses:
                losses.append(loss_of.__name__)
                after = torch.get_rng_state()
                torch.set_rng_state(random)  # dropout draws the same
                again = whole(flat, parameters, loss_of, *inputs)
                torch.set_rng_state(after)
                torch.testing.assert_close(again, (gradients, *rest), rtol=1e-3, atol=1e-5)
                # two optimisers have PPG's parameters, and one the vector; GRPO's second loss begins later
                assert flat or name in ("ppg_procgen", "grpo")
                if torch.is_tensor(gradients):
                    assert flat and gradients.ndim == 1
                else:  # GRPO's critic takes no part in most of its losses
                    assert len(gradients) == len(parameters) and (not flat or any(x is None for x in gradients))
                assert all(key.startswith("losses/") for key in rest[0])
            return gradients, *rest

        return compare

    forget_the_last_script()
    monkeypatch.setattr(torch, "compile", compile_whole)
    monkeypatch.setattr("solorl.compute.speed.compile_problem", lambda folder: None)  # wherever the tests run
    if "Catch" in FLAGS[name]:
        use_fake_envpool(monkeypatch)
    train(name, *flags_of(name), "--eval-every", 0, "--save-every", 0, "--compile")
    assert losses and all("_loss" in name for name in losses)
    settings = {"dynamic": False, "options": {"cpp_wrapper": True, "fallback_random": True}}
    assert options == [("gradients_of", settings)] * len(losses)


def hide_the_compiler(monkeypatch, folder):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(folder))


def name_another_compiler(monkeypatch, folder):
    monkeypatch.setenv("CXX", "my-c++")


def hide_the_headers(monkeypatch, folder):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))


def put_a_space_in_the_path(monkeypatch, folder):  # which torch's compiler hands to g++ unquoted
    monkeypatch.setattr(torch, "__file__", "/my environment/torch/__init__.py")


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (hide_the_compiler, f"needs a C++ compiler, but there is no {CXX} (Debian: apt install g++)"),
        (name_another_compiler, "needs a C++ compiler, but there is no my-c++ (Debian: apt install g++)"),
        (hide_the_headers, "lacks Python.h (Debian: apt install python3-dev)"),
        (put_a_space_in_the_path, "fails where the path of torch has a space, as /my environment/torch has"),
    ],
)
def test_where_torch_cannot_compile_a_sentence_says_why(train, monkeypatch, tmp_path, spoil, sentence):
    monkeypatch.setattr(torch, "__file__", "/environment/torch/__init__.py")  # no space, wherever the tests run
    spoil(monkeypatch, tmp_path)
    train("ppo", *flags_of("ppo"), "--compile", code=2)
    last = train.out.splitlines()[-1]
    assert "--compile " in last and last.endswith(f"{sentence}; train without --compile")
    assert "Traceback" not in train.out


@pytest.mark.slow
@pytest.mark.skipif(" " in torch.__file__, reason="torch's compiler fails below a folder with a space")
def test_compiled_code_draws_the_random_numbers_of_plain_pytorch():
    """Noise and dropout: the same seed gives the same numbers, in the same order."""

    def loss(x):
        return (torch.nn.functional.dropout(x, 0.3) * torch.randn_like(x)).sum()

    found = []
    for function in (loss, speed.compiled(loss, torch.device("cpu"))):
        torch.manual_seed(3)
        x = torch.arange(1.0, 301.0, requires_grad=True)
        found.append(torch.autograd.grad(function(x), x)[0])
    assert (found[0] == 0).float().mean() > 0.2 and found[0].std() > 0.5
    torch.testing.assert_close(*found)
