"""The AsyncAPI document is current, and holds together."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from polymorph.events import asyncapi
from polymorph.events.registry import MESSAGE_TYPES
from polymorph.events.requests import ANSWERS, REQUESTS

COMMITTED = Path(__file__).parents[3] / "docs/events/asyncapi.yaml"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return yaml.safe_load(COMMITTED.read_text())


def resolve(document: Any, reference: str) -> Any:
    assert reference.startswith("#/"), reference
    found = document
    for step in reference[2:].split("/"):
        found = found[step]
    return found


def references(node: Any):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_committed_document_is_current():
    assert asyncapi.main([str(COMMITTED), "--check"]) == 0


def test_a_stale_document_is_noticed(tmp_path, capsys):
    path = tmp_path / "asyncapi.yaml"
    assert asyncapi.main([str(path), "--check"]) == 1
    assert asyncapi.main([str(path)]) == 0
    assert asyncapi.main([str(path), "--check"]) == 0
    path.write_text(path.read_text() + "# edited\n")
    assert asyncapi.main([str(path), "--check"]) == 1
    assert "is not current" in capsys.readouterr().err


def test_it_is_an_asyncapi_3_document(document):
    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= set(document["info"])
    allowed = {
        "asyncapi",
        "id",
        "info",
        "servers",
        "defaultContentType",
        "channels",
        "operations",
        "components",
    }
    assert set(document) <= allowed
    for server in document["servers"].values():
        assert {"host", "protocol"} <= set(server)
        assert set(re.findall(r"{(\w+)}", server["host"])) == set(server.get("variables", {}))


def test_it_names_no_port_that_is_chosen_at_the_start_and_tells_how_http_goes_on(document):
    assert "4222" not in COMMITTED.read_text()
    gateway = document["servers"]["gateway"]
    assert gateway["pathname"] == "/v1/events"
    for told in ("Last-Event-ID", "since", "event: gap", "resumes_at"):
        assert told in gateway["description"]
    by_http = {
        channel["address"].split(".")[1]
        for channel in document["channels"].values()
        if {"$ref": "#/servers/gateway"} in channel.get("servers", ())
    }
    assert by_http == {"evt"}
    assert all(
        {"$ref": "#/servers/embedded"} in channel["servers"]
        for channel in document["channels"].values()
        if channel["address"]
    )


def test_every_reference_leads_somewhere(document):
    found = list(references(document))
    assert len(found) > 100
    for reference in found:
        resolve(document, reference)


def test_channels_name_their_parameters_and_messages(document):
    for name, channel in document["channels"].items():
        address = channel["address"]
        parameters = set(re.findall(r"{(\w+)}", address or ""))
        assert parameters == set(channel.get("parameters", {})), name
        assert channel["messages"], name
        for message in channel["messages"].values():
            assert message["$ref"].startswith("#/components/messages/")


def test_operations_use_messages_of_their_channel(document):
    for name, operation in document["operations"].items():
        assert operation["action"] in ("send", "receive"), name
        assert operation["channel"]["$ref"].startswith("#/channels/")
        used = [operation, operation["reply"]] if "reply" in operation else [operation]
        for part in used:
            for message in part["messages"]:
                assert message["$ref"].startswith(f"{part['channel']['$ref']}/messages/"), name


def test_every_message_has_a_channel_an_operation_and_a_payload(document):
    addresses = {channel["address"] for channel in document["channels"].values()}
    assert {f"{name}.{{id}}" for name in MESSAGE_TYPES} | {None} == addresses
    operated = {operation["channel"]["$ref"] for operation in document["operations"].values()}
    assert operated == {f"#/channels/{n}" for n, c in document["channels"].items() if c["address"]}
    for name, message in document["components"]["messages"].items():
        assert {"name", "contentType", "payload"} <= set(message), name


def test_kept_messages_come_in_an_envelope(document):
    loaded = document["components"]["messages"]["WorkerLoaded"]
    assert loaded["contentType"] == "application/cloudevents+json"
    envelope, own = loaded["payload"]["allOf"]
    assert set(resolve(document, envelope["$ref"])["required"]) >= {"id", "source", "type", "time", "data"}
    assert own["properties"]["type"] == {"const": "polymorph.evt.worker.loaded.v1"}
    assert own["properties"]["data"] == {"$ref": "#/components/schemas/WorkerLoaded"}


def test_every_request_has_its_answers(document):
    assert set(ANSWERS) == set(REQUESTS)
    reply = document["operations"]["sendPlaceRequest"]["reply"]
    answers = [resolve(document, message["$ref"]) for message in reply["messages"]]
    assert [a["$ref"].rsplit("/", 1)[1] for a in answers] == ["Placed", "Held", "Unplaceable"]
