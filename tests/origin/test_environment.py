from __future__ import annotations

import os

import pytest

from cacheloader.origin.environment import effective_environment, forget_store_variables, store_variables


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in store_variables():
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "of the daemon")
    monkeypatch.setenv("HARMLESS", "1")


def test_only_the_variables_of_stores_are_sent():
    variables = {"AWS_PROFILE": "a", "GOOGLE_X": "b", "AZURE_Y": "c", "PATH": "d", "MY_AWS_KEY": "e"}
    assert store_variables(variables) == {"AWS_PROFILE": "a", "GOOGLE_X": "b", "AZURE_Y": "c"}


def test_without_a_client_the_process_has_its_own_variables():
    assert effective_environment(None) == dict(os.environ)


def test_a_clients_variables_replace_those_of_the_daemon_also_where_it_has_none():
    found = effective_environment({"AWS_ACCESS_KEY_ID": "mine", "PATH": "/tmp/evil"})
    assert store_variables(found) == {"AWS_ACCESS_KEY_ID": "mine"}
    assert found["HARMLESS"] == "1"
    assert found["PATH"] == os.environ["PATH"]
    assert store_variables(effective_environment({})) == {}


def test_a_private_daemon_can_forget_what_it_was_started_with():
    forget_store_variables()
    assert store_variables() == {}
    assert os.environ["HARMLESS"] == "1"
