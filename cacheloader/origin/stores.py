"""obstore's stores, built from `storage_options` and the environment of one job."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from cacheloader.errors import ConfigError
from cacheloader.origin.aws_credentials import AwsChain, AwsKey
from cacheloader.origin.options import azure_options, gs_options, http_options, s3_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Credential

    from cacheloader.origin.options import S3Options

# The caller sets deadlines and retries; obstore's own would end a body that takes longer than 30 s, and would hide
# "slow down" answers from the other requests to the host.
_NO_DEADLINE = timedelta(days=7)
_NO_RETRY: RetryConfig = {"max_retries": 0}

_GS_VARIABLES = {
    "GOOGLE_APPLICATION_CREDENTIALS": "application_credentials",
    "GOOGLE_SERVICE_ACCOUNT": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_PATH": "service_account",
    "GOOGLE_SERVICE_ACCOUNT_KEY": "service_account_key",
}
_AZURE_VARIABLES = {
    "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_SAS_TOKEN": "sas_key",
    "AZURE_STORAGE_CLIENT_ID": "client_id",
    "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
    "AZURE_STORAGE_TENANT_ID": "tenant_id",
    "AZURE_CLIENT_ID": "client_id",
    "AZURE_CLIENT_SECRET": "client_secret",
    "AZURE_TENANT_ID": "tenant_id",
    "AZURE_AUTHORITY_HOST": "authority_host",
    "AZURE_FEDERATED_TOKEN_FILE": "federated_token_file",
}
_AZURE_CONNECTION = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}


def s3_store(
    url: str, options: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[str, Any, AwsChain | None]:
    """Identity of the bucket of ``url`` and what builds its store.

    Returns:
        The ``origin_id``, an asynchronous function that builds the store, and the credential chain that it asks, if it
        asks one.
    """
    chosen = s3_options(options)
    bucket = urlsplit(url).netloc
    chain = AwsChain(environment, profile=chosen.profile, uri=url)

    async def build() -> ObjectStore:
        endpoint, region = await s3_endpoint_and_region(chosen, environment, chain)
        return _build_s3(bucket, chosen, chain, endpoint=endpoint, region=region)

    asked = None if chosen.anonymous or chosen.key else chain
    return s3_origin_id(bucket, chosen, environment), build, asked


def s3_origin_id(bucket: str, options: S3Options, environment: Mapping[str, str]) -> str:
    """Which bucket on which endpoint, the same for every engine."""
    endpoint = s3_endpoint(options, environment)
    return f"s3+{endpoint or _amazon_or_profile(options.profile, environment)}/{bucket}"


def _amazon_or_profile(profile: str, environment: Mapping[str, str]) -> str:
    """`aws`, or the profile's name where configuration files can lead elsewhere; without asking the slow chain."""
    path = Path(environment.get("AWS_CONFIG_FILE") or Path(environment.get("HOME", "/")) / ".aws" / "config")
    try:
        redirects = "endpoint_url" in path.expanduser().read_text(errors="replace")
    except OSError:
        redirects = False
    return f"profile:{profile or environment.get('AWS_PROFILE') or 'default'}" if redirects else "aws"


def s3_endpoint(options: S3Options, environment: Mapping[str, str]) -> str:
    """Endpoint from the options or the environment, "" for that of the profile or Amazon's own."""
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    found = options.endpoint_url or next((environment[name] for name in variables if environment.get(name)), "")
    if found and "://" not in found:
        found = f"{'https' if options.use_ssl else 'http'}://{found}"
    return found.rstrip("/")


async def s3_endpoint_and_region(
    options: S3Options, environment: Mapping[str, str], chain: AwsChain
) -> tuple[str, str]:
    """Where the bucket is asked, from the options, the environment or the profile; "" for Amazon's own.

    Raises:
        OriginDenied: The chain is needed, and has no credentials or no answer.
    """
    endpoint = s3_endpoint(options, environment)
    region = options.region or environment.get("AWS_REGION", "") or environment.get("AWS_DEFAULT_REGION", "")
    if not (options.anonymous or options.key):
        await chain.key()  # fails here, and names the way out, if there is none
        answer = await chain.ask()
    elif not endpoint:
        answer = await chain.ask(credentials=False)
    else:
        return endpoint, region
    return endpoint or answer.endpoint_url, region or answer.region


def _build_s3(bucket: str, chosen: S3Options, chain: AwsChain, *, endpoint: str, region: str) -> ObjectStore:
    region = region or "us-east-1"
    if not endpoint:
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        endpoint = f"{'https' if chosen.use_ssl else 'http'}://s3.{region}.{domain}"
    virtual = chosen.addressing_style == "virtual"
    if virtual:
        scheme, _, host = endpoint.partition("://")
        endpoint = f"{scheme}://{bucket}.{host}"

    async def credentials() -> S3Credential:
        if chosen.key:
            found = AwsKey(key=chosen.key, secret=chosen.secret, token=chosen.token)
        else:
            found = await chain.key()
        return {
            "access_key_id": found.key,
            "secret_access_key": found.secret,
            "token": found.token or None,
            "expires_at": found.expires,
        }

    # Every value is given, also those at their default: what is left out, obstore takes from this process's
    # environment, which may be another job's.
    return S3Store(
        bucket,
        config={
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "region": region,
            "skip_signature": chosen.anonymous,
            "virtual_hosted_style_request": virtual,
            "request_payer": chosen.requester_pays,
        },
        client_options=_client(endpoint, verify=chosen.verify),
        retry_config=_NO_RETRY,
        credential_provider=None if chosen.anonymous else credentials,
    )


def gs_store(
    url: str, options: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[str, Any, AwsChain | None]:
    """As ``s3_store``, for Google Cloud Storage. Without credentials, obstore asks gcloud's files and the instance."""
    chosen = gs_options(options)
    bucket = urlsplit(url).netloc
    config: dict[str, Any] = {
        field: environment[name] for name, field in _GS_VARIABLES.items() if environment.get(name)
    }
    config |= _gs_token(chosen.token)
    endpoint = chosen.endpoint_url.rstrip("/") or environment.get("GOOGLE_BASE_URL", "")
    if endpoint:
        config["base_url"] = endpoint

    async def build() -> ObjectStore:
        return GCSStore(bucket, config=config, client_options=_client(endpoint), retry_config=_NO_RETRY)  # type: ignore[arg-type]

    return f"gs+{endpoint or 'google'}/{bucket}", build, None


def _gs_token(token: object) -> dict[str, Any]:
    if token in (None, "google_default", "cloud", "cache"):  # a set would hash the dict
        return {}
    if token == "anon":  # noqa: S105
        return {"skip_signature": True}
    if isinstance(token, dict):
        if token.get("type") != "service_account":
            raise ConfigError(
                "the storage option token holds a key that is no service account's; "
                "pass the path of the file, or set GOOGLE_APPLICATION_CREDENTIALS"
            )
        return {"service_account_key": json.dumps(token)}
    assert isinstance(token, str)
    if not Path(token).is_absolute():
        raise ConfigError(
            'the storage option token is neither "anon", "google_default", "cloud", a service account\'s key nor an '
            "absolute path; pass one of these"
        )
    return {"application_credentials": token}


def azure_store(
    url: str, options: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[str, Any, AwsChain | None]:
    """As ``s3_store``, for Azure Blob Storage: `az://container/…` or `abfs://container@account.host/…`."""
    chosen = azure_options(options)
    container, _, host = urlsplit(url).netloc.partition("@")
    config: dict[str, Any] = {
        field: environment[name] for name, field in _AZURE_VARIABLES.items() if environment.get(name)
    }
    connection = chosen.connection_string or environment.get("AZURE_STORAGE_CONNECTION_STRING", "")
    config |= _azure_connection(connection)
    given = {
        "account_name": chosen.account_name or host.partition(".")[0],
        "account_key": chosen.account_key,
        "sas_key": chosen.sas_token.removeprefix("?"),
        "client_id": chosen.client_id,
        "client_secret": chosen.client_secret,
        "tenant_id": chosen.tenant_id,
    }
    config |= {name: value for name, value in given.items() if value}
    if chosen.account_host:
        config["endpoint"] = (
            chosen.account_host if "://" in chosen.account_host else f"https://{chosen.account_host}"
        ).rstrip("/")
    if chosen.anonymous:
        config["skip_signature"] = True
    if "account_name" not in config:
        raise ConfigError(f"{url} names no storage account; pass account_name or connection_string in storage_options")
    endpoint = config.get("endpoint", "")

    async def build() -> ObjectStore:
        return AzureStore(container, config=config, client_options=_client(endpoint), retry_config=_NO_RETRY)  # type: ignore[arg-type]

    return f"az+{endpoint or 'azure'}/{config['account_name']}/{container}", build, None


def _azure_connection(text: str) -> dict[str, str]:
    fields = dict(part.partition("=")[::2] for part in text.split(";") if part)
    found = {field: fields[name] for name, field in _AZURE_CONNECTION.items() if fields.get(name)}
    if text and "account_name" not in found and "endpoint" not in found:
        raise ConfigError("the storage option connection_string names neither AccountName nor BlobEndpoint")
    if fields.get("EndpointSuffix") and "endpoint" not in found:
        scheme = fields.get("DefaultEndpointsProtocol", "https")
        found["endpoint"] = f"{scheme}://{fields['AccountName']}.blob.{fields['EndpointSuffix']}"
    return found


def http_store(
    url: str, options: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[str, Any, AwsChain | None]:
    """As ``s3_store``, for one HTTP server."""
    del environment
    chosen = http_options(options)
    parts = urlsplit(url)
    root = f"{parts.scheme}://{parts.netloc}"

    async def build() -> ObjectStore:
        client = _client(root, verify=chosen.verify)
        if chosen.headers:
            client["default_headers"] = chosen.headers
        return HTTPStore(root, client_options=client, retry_config=_NO_RETRY)

    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", build, None


def _client(endpoint: str, *, verify: bool | str = True) -> ClientConfig:
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=5),
        "timeout": _NO_DEADLINE,
        "user_agent": "cacheloader",
    }
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        try:
            client["root_certificate"] = Path(verify).read_bytes()
        except OSError as error:
            raise ConfigError(f"the certificates in {verify} cannot be read ({error.strerror})") from error
    return client
