"""`--compile`: the gradient of every torch file is traced as one piece of code, and the training is the same."""

import pytest
import torch
from test_golden import FLAGS

from solorl import products

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
    monkeypatch.setattr(torch, "__file__", "/environment/torch/__init__.py")  # no space, wherever the tests run
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)  # on every machine
    compiled = train(name, *flags, "--compile")
    assert calls == [("gradient", False, {"cpp_wrapper": True})]
    torch.testing.assert_close(weights(compiled), weights(eager), rtol=1e-3, atol=1e-5)


def test_a_space_in_the_path_of_torch_is_refused_in_a_sentence(train, monkeypatch):
    """torch's compiler hands the path to g++ unquoted."""
    monkeypatch.setattr(torch, "__file__", "/my environment/torch/__init__.py")
    train("ppo", *FLAGS["ppo"].split(), "--compile", code=2)
    assert train.out.splitlines()[-1].endswith(
        "--compile fails where the path of torch has a space, as /my environment/torch has; train without --compile"
    )
    assert "Traceback" not in train.out
