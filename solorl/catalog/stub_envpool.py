"""What `solo copy --standalone` adds to the stub for scripts on EnvPool's environments."""

from typing import Any

from solorl.catalog.stub import quit_with
from solorl.envs.load_envpool import import_envpool

envpool = import_envpool()  # before the seeds are set, as in the library: importing it draws random numbers


def check_envpool_id(env_id: str) -> Any:
    """EnvPool, the module; ends with a sentence where it does not know the id."""
    if env_id not in envpool.list_all_envs():
        quit_with(f"EnvPool has no environment {env_id}")
    return envpool
