from __future__ import annotations

import logging

import pytest

from cacheloader.errors import ConfigError
from cacheloader.origin.options import (
    AZURE_OPTIONS,
    GS_OPTIONS,
    HTTP_OPTIONS,
    S3_OPTIONS,
    azure_options,
    http_options,
    recognised,
    s3_options,
)
from cacheloader.origin.stores import azure_store, gs_store, s3_store


@pytest.mark.parametrize(
    ("table", "store"), [(S3_OPTIONS, "s3"), (GS_OPTIONS, "gs"), (AZURE_OPTIONS, "az"), (HTTP_OPTIONS, "http")]
)
def test_an_unknown_name_is_refused_and_the_known_ones_are_named(table: dict[str, str], store: str):
    with pytest.raises(ConfigError, match=f"unknown name 'colour' for {store}; the known ones are .*") as raised:
        recognised({"colour": "red"}, table, store=store)
    assert all(name in str(raised.value) for name in table)


def test_an_unknown_name_in_a_nested_dict_is_refused_by_its_full_name():
    with pytest.raises(ConfigError, match=r"unknown name 'client_kwargs\.colour'"):
        s3_options({"client_kwargs": {"colour": "red"}})


def test_names_are_those_of_s3fs():
    chosen = s3_options(
        {
            "key": "k",
            "secret": "s",
            "token": "t",
            "client_kwargs": {"endpoint_url": "http://h", "region_name": "eu-west-1", "verify": False},
            "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            "requester_pays": True,
        }
    )
    assert (chosen.key, chosen.secret, chosen.token) == ("k", "s", "t")
    assert (chosen.endpoint_url, chosen.region, chosen.verify) == ("http://h", "eu-west-1", False)
    assert (chosen.addressing_style, chosen.requester_pays) == ("virtual", True)


def test_none_counts_as_not_given():
    assert s3_options({"key": None, "secret": None, "endpoint_url": None}) == s3_options({})


def test_two_names_for_one_thing_may_agree_and_may_not_differ():
    agreeing = {"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://a"}}
    assert s3_options(agreeing).endpoint_url == "http://a"
    with pytest.raises(ConfigError, match="contradicts"):
        s3_options({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "http://b"}})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "k"}, "key without secret"),
        ({"secret": "s"}, "secret without key"),
        ({"anon": "yes"}, "anon has a value of type str"),
        ({"key": 1, "secret": "s"}, "key has a value of type int"),
        ({"config_kwargs": {"s3": {"addressing_style": "odd"}}}, "addressing_style='odd' is unknown"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        s3_options(options)


def test_a_name_without_effect_is_accepted_and_said_to_have_none(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        s3_options({"default_block_size": 5})
    assert "default_block_size has no effect" in caplog.text


def test_secrets_stay_out_of_the_repr():
    assert "hidden-1" not in repr(s3_options({"key": "k", "secret": "hidden-1", "token": "hidden-1"}))
    assert "hidden-2" not in repr(azure_options({"account_key": "hidden-2", "sas_token": "hidden-2"}))
    assert "hidden-3" not in repr(http_options({"headers": {"Authorization": "hidden-3"}}))


async def test_an_s3_store_takes_nothing_from_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "other",
        "AWS_SECRET_ACCESS_KEY": "other",
        "AWS_SESSION_TOKEN": "other",
        "AWS_ENDPOINT_URL_S3": "http://other",
        "AWS_REGION": "other",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
    }.items():
        monkeypatch.setenv(name, value)
    _, build, _ = s3_store("s3://bucket/", {"key": "k", "secret": "s", "endpoint_url": "http://mine"}, {})
    store = await build()
    assert "other" not in str(store.config.values())
    assert (store.config["endpoint"], store.config["region"]) == ("http://mine", "us-east-1")
    assert await store.credential_provider() == {
        "access_key_id": "k",
        "secret_access_key": "s",
        "token": None,
        "expires_at": None,
    }
    assert str(store.config["skip_signature"]).lower() == "false"
    assert str(store.config["virtual_hosted_style_request"]).lower() == "false"


async def test_s3_addresses_follow_region_endpoint_and_style():
    async def endpoint(**options: object) -> str:
        _, build, _ = s3_store("s3://bucket/", {"key": "k", "secret": "s", **options}, {})
        return str((await build()).config["endpoint"])

    assert await endpoint(client_kwargs={"region_name": "eu-west-1"}) == "https://s3.eu-west-1.amazonaws.com"
    assert await endpoint(client_kwargs={"region_name": "cn-north-1"}) == "https://s3.cn-north-1.amazonaws.com.cn"
    assert await endpoint(endpoint_url="storage.local:9000", use_ssl=False) == "http://storage.local:9000"
    virtual = {"s3": {"addressing_style": "virtual"}}
    assert await endpoint(endpoint_url="https://oss.example", config_kwargs=virtual) == "https://bucket.oss.example"


def test_s3_buckets_on_two_endpoints_are_two_stores_and_identities_hold_no_secret():
    def identity(**options: object) -> str:
        return str(s3_store("s3://bucket/", {"key": "kkkkkkk", "secret": "sssssss", **options}, {})[0])

    assert len({identity(), identity(endpoint_url="http://a"), identity(endpoint_url="http://b")}) == 3
    assert "sssssss" not in identity()
    assert identity(endpoint_url="http://a/") == identity(endpoint_url="http://a")


def test_a_profile_that_may_lead_to_another_endpoint_is_part_of_the_identity(tmp_path):
    config = tmp_path / "config"
    config.write_text("[profile one]\nendpoint_url = http://one\n")
    redirected = {"AWS_CONFIG_FILE": str(config)}
    plain = {"AWS_CONFIG_FILE": str(tmp_path / "missing")}
    assert s3_store("s3://bucket/", {"profile": "one"}, redirected)[0] == "s3+profile:one/bucket"
    assert s3_store("s3://bucket/", {"profile": "one"}, plain)[0] == "s3+aws/bucket"


async def test_google_tokens_are_those_of_gcsfs():
    async def config(token: object) -> dict[str, object]:
        return dict((await gs_store("gs://bucket/", {"token": token}, {})[1]()).config)

    assert str((await config("anon"))["skip_signature"]).lower() == "true"
    with pytest.raises(ConfigError, match="no service account"):
        gs_store("gs://bucket/", {"token": {"type": "authorized_user"}}, {})
    with pytest.raises(ConfigError, match="absolute path"):
        gs_store("gs://bucket/", {"token": "key.json"}, {})


async def test_an_azure_account_is_found_in_options_url_connection_string_and_environment():
    async def config(url: str, environment: dict[str, str] | None = None, **options: object) -> dict[str, object]:
        return dict((await azure_store(url, {"anon": True, **options}, environment or {})[1]()).config)

    assert (await config("az://box/", account_name="one"))["account_name"] == "one"
    assert (await config("abfs://box@two.dfs.core.windows.net/"))["account_name"] == "two"
    connection = "DefaultEndpointsProtocol=http;AccountName=three;BlobEndpoint=http://h:1/three;"
    assert (await config("az://box/", connection_string=connection))["endpoint"] == "http://h:1/three"
    assert (await config("az://box/", {"AZURE_STORAGE_ACCOUNT_NAME": "four"}))["account_name"] == "four"
    with pytest.raises(ConfigError, match="names no storage account"):
        azure_store("az://box/", {}, {})
    with pytest.raises(ConfigError, match="neither AccountName nor BlobEndpoint"):
        azure_store("az://box/", {"connection_string": "nonsense"}, {})


async def test_the_options_of_obstore_that_would_interfere_are_off():
    _, build, _ = s3_store("s3://bucket/", {"key": "k", "secret": "s"}, {})
    store = await build()
    assert store.retry_config["max_retries"] == 0
    assert store.client_options["timeout"] == "7days"
