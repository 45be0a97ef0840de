"""A Slurm cluster of one node on this machine, for tests: Debian's packages, unpacked into a cache, nothing installed.

`python tests/doubles/slurm_cluster.py` runs one until Ctrl+C and prints the environment that its commands need.
"""

import contextlib
import os
import platform
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from solorl.machine import dying_with_parent

PACKAGES = ("libhwloc15", "liblua5.1-0", "libmunge2", "munge", "slurm-wlm-basic-plugins", "slurm-client", "slurmctld",
            "slurmd")  # fmt: skip
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "solorl-tests/slurm"
# A job that is requeued waits `cred_expire` seconds, by default 120.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2
MpiDefault=none
ReturnToService=2
MessageTimeout=60
EnforcePartLimits=ALL
SlurmdTimeout=600
KillWait={kill_wait}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime={grace} MaxTime=INFINITE State=UP
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF MaxTime=60 State=UP
"""


def unpacked() -> Path:
    """The folder with Slurm's programs; downloaded once, by apt-get as any user."""
    root = CACHE / "root"
    if not root.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = ["apt-get", "download", *PACKAGES]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{done.stderr}\n`apt-get update` may help"
            for path in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg", "-x", path, f"{folder}/root"], check=True)
            with contextlib.suppress(OSError):  # another process was first
                Path(folder, "root").rename(root)
    return root


def free_ports(count):
    """Ports that nobody listens at."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def slurm_cluster(folder: Path, cpus=2, grace=30, kill_wait=30, user_signal=True):
    """A cluster whose files are in `folder`: partitions `low` and `high`, of which the second one preempts. Yields what
    the environment of its commands must have; ends all processes."""
    root, host = unpacked(), platform.node().partition(".")[0]
    libraries = root / "usr/lib/x86_64-linux-gnu"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    more = "SlurmctldParameters=preempt_send_user_signal" if user_signal else ""
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, user=user, plugins=libraries / "slurm-wlm", ports=free_ports(2), folder=folder,
                    cpus=cpus, grace=grace, kill_wait=kill_wait, more=more)
    )  # fmt: skip
    own = {
        "SLURM_CONF": str(folder / "slurm.conf"),
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm",
        "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
    }
    env, programs = os.environ | own, root / "usr/sbin"
    commands = (["slurmctld-wlm", "-D", "-c"], ["slurmd-wlm", "-D", "-d", f"{programs}/slurmstepd-wlm"])
    daemons = []
    try:
        for name, *words in commands:
            with (folder / f"{name}.txt").open("w") as output:
                daemons.append(
                    subprocess.Popen([*dying_with_parent(), str(programs / name), *words], env=env,
                                     stdin=subprocess.DEVNULL, stdout=output, stderr=output)
                )  # fmt: skip
        _wait_until_idle(env, daemons, folder)
        yield own
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["scancel", "--me", "--state=PENDING"], env=env, timeout=30, capture_output=True)
        for process in reversed(daemons):
            process.terminate()
        for process in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()
        for pid in _processes(own["SLURM_CONF"]):  # steps outlive slurmd
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _wait_until_idle(env, daemons, folder):
    """Wait until the node takes jobs."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert all(process.poll() is None for process in daemons), (folder / "slurmctld-wlm.txt").read_text()
        found = subprocess.run(["sinfo", "-h", "-o", "%T", "-p", "low"], env=env, capture_output=True, text=True)
        if found.stdout.strip() == "idle":
            return
        time.sleep(0.3)
    raise TimeoutError(f"Slurm's node is {found.stdout.strip()}: {found.stderr}")


def _processes(conf):
    """The processes that belong to the cluster of this configuration, by their environment."""
    mine = f"SLURM_CONF={conf}\0".encode()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mine in (path / "environ").read_bytes():
                    yield int(path.name)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as place, slurm_cluster(Path(place)) as extra:
        for key, value in extra.items():
            print(f"export {key}={shlex.quote(value)}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
