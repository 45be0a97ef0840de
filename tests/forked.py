"""Commands in processes that have imported torch already: three seconds less of CPU than `python -m` for each. They are
not children of the tests, so the table of `--costs` does not have them."""

import multiprocessing
import os
import runpy
import sys
from subprocess import CompletedProcess

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["gymnasium", "torch._dynamo"])


def python_m(module, words, folder, environment, output):
    """What `python -m MODULE WORDS` does in `folder`; both streams go to the file `output`. The modules of the project
    are imported here, as the environment's PYTHONPATH says."""
    streams = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(streams, 1), os.dup2(streams, 2)
    os.chdir(folder)
    os.environ.clear(), os.environ.update(environment)
    sys.path[:0] = [str(folder), *environment["PYTHONPATH"].split(os.pathsep)]
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run(module, words, folder, environment, output):
    """Run it to its end, at most 300 s, and return it as subprocess.run does, output as text."""
    process = SERVER.Process(target=python_m, args=(module, words, folder, environment, output))
    process.start()
    process.join(300)
    if process.is_alive():
        process.kill()
        process.join()
    return CompletedProcess(words, process.exitcode, output.read_text(errors="replace"), "")
