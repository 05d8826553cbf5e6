"""What the AWS credential chain says, asked in a process of its own: ``python -m cacheloader.origin.aws_chain``.

botocore knows the whole chain (profiles, SSO, web identity, processes, containers, instance metadata) but reads the
environment of its process. A daemon serves jobs with different environments, so each question gets a process that has
the job's environment, and that can be killed if the chain hangs. The answer is one line of JSON.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Read ``{"profile": …, "credentials": …}`` from stdin and write the answer to stdout."""
    question = json.load(sys.stdin)
    sys.stdout.write(json.dumps(_answer(question["profile"] or None, credentials=question["credentials"])))


def _answer(profile: str | None, *, credentials: bool) -> dict[str, str | None]:
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.session import Session

    try:
        session = Session(profile=profile)
        answer = {"region": session.get_config_variable("region"), "endpoint_url": _endpoint_url(session)}
        if not credentials:
            return answer
        found = session.get_credentials()
        if found is None:
            return answer
        frozen = found.get_frozen_credentials()
        expires = getattr(found, "_expiry_time", None)
        return {
            **answer,
            "key": frozen.access_key,
            "secret": frozen.secret_key,
            "token": frozen.token,
            "expires": expires.isoformat() if expires else None,
        }
    except (BotoCoreError, ClientError) as error:
        return {"error": str(error)}


def _endpoint_url(session: object) -> str | None:
    from botocore.configprovider import ConfiguredEndpointProvider

    provider = ConfiguredEndpointProvider(
        full_config=session.full_config,  # type: ignore[attr-defined]
        scoped_config=session.get_scoped_config(),  # type: ignore[attr-defined]
        client_name="s3",
    )
    found: str | None = provider.provide()
    return found


if __name__ == "__main__":
    main()
