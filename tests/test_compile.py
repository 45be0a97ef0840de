"""`--compile`: the gradient of every torch file is traced as one piece of code, and the training is the same."""

import sys
import sysconfig

import pytest
import torch
from test_golden import FLAGS

import solorl.run.verbs
from solorl.run import onednn as products

CXX = "clang++" if sys.platform == "darwin" else "g++"
SCRIPTS = [name for name in FLAGS if not name.endswith("_jax")]


def weights(variables):
    """The vector that the optimiser steps: of the agent, the Q-network or the actor."""
    return variables["parameters" if "parameters" in variables else "actor_vector"].detach()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_compiled_gradient_is_one_graph_and_the_same(name, train, monkeypatch):
    flags = [*FLAGS[name].split(), "--eval-every", 0, "--save-every", 0]
    eager, calls, compiler = train(name, *flags), [], torch.compile

    def compile_whole(function, dynamic, options):  # without generating C++, which takes half a minute
        calls.append((function.__name__, dynamic, options))
        return compiler(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", compile_whole)
    monkeypatch.setattr(solorl.run.verbs, "_compile_problem", lambda folder: None)  # wherever the tests run
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)  # on every machine
    compiled = train(name, *flags, "--compile")
    assert calls == [("gradient", False, {"cpp_wrapper": True})]
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=1e-3, atol=1e-5)


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
    train("ppo", *FLAGS["ppo"].split(), "--compile", code=2)
    last = train.out.splitlines()[-1]
    assert "--compile " in last and last.endswith(f"{sentence}; train without --compile")
    assert "Traceback" not in train.out
