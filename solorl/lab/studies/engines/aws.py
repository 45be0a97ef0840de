"""Clients of AWS, and what it refuses in one sentence."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from solorl.errors import UsageError, missing_extra

HINTS = {
    "NoRegionError": "no region is set; give --engine-option region=eu-central-1, or set AWS_DEFAULT_REGION",
    "NoCredentialsError": "there are no credentials; run `aws configure`, or set AWS_ACCESS_KEY_ID and its secret",
}


def clients(names: Sequence[str], region: str | None, endpoint: str | None) -> list[Any]:
    """Clients of these services. UsageError without boto3 or a region."""
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError as error:
        raise UsageError(missing_extra("AWS", error)) from None
    most = 2 if endpoint else 5  # a named server that does not answer is told within seconds
    config = Config(retries={"mode": "standard", "total_max_attempts": most}, connect_timeout=5, read_timeout=60)
    with told("it cannot be used"):
        return [boto3.client(name, region_name=region, endpoint_url=endpoint, config=config) for name in names]


@contextlib.contextmanager
def told(what: str, silent: bool = False) -> Iterator[None]:
    """What AWS refuses inside becomes a UsageError in one sentence; with `silent`, no answer an OSError."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, ValueError) as error:
        answer = getattr(error, "response", None) or {}  # None where a server has hung up
        code, status = answer.get("Error", {}).get("Code", ""), answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        why = HINTS.get(type(error).__name__) or answer.get("Error", {}).get("Message") or str(error)
        why = " ".join(f"{code} {why}".split())
        if silent and (not code or "Throttling" in code or status in (429, 500, 502, 503, 504)):
            raise OSError(0, why) from error
        raise UsageError(f"AWS: {what}: {why}") from None
