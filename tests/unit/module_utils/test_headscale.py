"""The client, where a real Headscale does not say on demand what it must understand."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler
from ssl import PROTOCOL_TLS_SERVER, SSLContext
from typing import Any

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible_collections.headcni.mesh.plugins.module_utils import headscale as client_module
from ansible_collections.headcni.mesh.plugins.module_utils.headscale import (
    Headscale,
    HeadscaleError,
)
from ansible_collections.headcni.mesh.plugins.module_utils.headscale_objects import Node, User
from ansible_module import Failed, run
from headscale_server import free_port
from stub_server import StubServer, says, stub_server

SECRET = "hskey-api-0123456789ab-verysecret"
ANN = User("1", "ann", "1")


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with stub_server() as made:
        yield made


@pytest.fixture
def server(stub) -> Headscale:
    return Headscale(stub.url, SECRET, timeout=5, pauses=(0.01, 0.02))


@pytest.mark.parametrize(
    ("url", "exposed"),
    [
        ("https://headscale.example.org", False),
        ("http://headscale.example.org", True),
        ("http://8.8.8.8:8080", True),
        ("http://[2001:4860:4860::8888]", True),
        ("http://localhost:8080", False),
        ("http://127.0.0.1:8080", False),
        ("http://10.1.2.3", False),
        ("http://100.64.0.1", False),
        ("http://[fd00::1]:8080", False),
        ("http://[", False),
    ],
)
def test_a_key_that_goes_over_http_to_who_knows_where_is_warned_about(monkeypatch, url, exposed):
    warned: list[str] = []
    monkeypatch.setattr(AnsibleModule, "warn", lambda _self, text: warned.append(text))
    with pytest.raises(Failed):  # nobody is asked: the time that is given is wrong
        run("headscale_info", url=url, api_key=SECRET, timeout=-1)
    assert [f"url: {url} is read over http" in one for one in warned] == [True] * exposed
    assert not any(SECRET in one for one in warned)


def raw_node(**changes: Any) -> dict[str, Any]:
    node = {"id": "1", "nodeKey": "nodekey:1", "name": "Node1", "givenName": "node1", "tags": []}
    routes = {"availableRoutes": [], "approvedRoutes": [], "subnetRoutes": []}
    return {**node, **routes, **changes}


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (500, {"code": 2, "message": "user not found", "details": []}, "json", "said: user not f"),
        (
            422,
            {
                "title": "Unprocessable Entity",
                "status": 422,
                "detail": "validation failed",
                "errors": [{"message": "expected a number", "location": "body.user", "value": "x"}],
            },
            "problem+json",
            r"Unprocessable Entity: validation failed: expected a number \(body.user\) "
            r"\(GET /api/v1/node, HTTP 422\); correct what it names",
        ),
        (404, {"title": "Not Found", "status": 404}, "problem+json", "said: Not Found .* as url"),
        (401, "Unauthorized", "plain", r"api_key: .* does not accept it \(HTTP 401\)"),
        (401, {"title": "Unauthorized", "status": 401}, "problem+json", "api_key: .* not accept"),
        (403, "<html>no</html>", "html", "api_key: .* does not accept"),
        (400, "", "plain", "it does not say why"),
        (400, "Client sent an HTTP request to an HTTPS server.", "plain", "to an HTTPS server"),
        (500, "<!doctype html><p>oops", "html", r"said: a web page \(GET"),
        (500, "a\nb\x1b[31m" + "x" * 1000, "plain", r"said: a b \[31mx+… \(GET"),
        (200, "<html>log in</html>", "html", "not Headscale's: a web page; give the address"),
        (200, "hello", "plain", "not Headscale's: hello; give"),
        (200, [], "json", "it is no JSON object"),
        (200, {}, "json", "there is no list of nodes in it"),
        (200, {"nodes": [1]}, "json", "there is no list of nodes in it"),
    ],
)
def test_each_shape_of_an_error_becomes_one_line(stub, server, status, body, kind, said):
    family = "text" if kind in ("plain", "html") else "application"
    stub.answers = [says(status, body, f"{family}/{kind}")]
    with pytest.raises(HeadscaleError, match=said) as raised:
        server.nodes()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    assert len(stub.requests) == 1


def problem(status: int, title: str, detail: str, *errors: str) -> dict[str, Any]:
    """An error as Headscale 0.30 sends it, with the content type application/problem+json."""
    found: dict[str, Any] = {"title": title, "status": status, "detail": detail}
    return {**found, "errors": [{"message": said} for said in errors]} if errors else found


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            problem(404, "Not Found", "setting approved routes", "node not found in NodeStore: 7"),
            "said: Not Found: setting approved routes: node not found in NodeStore: 7 (POST "
            "/api/v1/node/7/approve_routes, HTTP 404); it may be gone by now: run again",
        ),
        (
            problem(400, "Bad Request", "parsing route", "netip.ParsePrefix: no '/'"),
            "said: Bad Request: parsing route: netip.ParsePrefix: no '/' (POST "
            "/api/v1/node/7/approve_routes, HTTP 400); correct what it names",
        ),
        (
            problem(409, "Conflict", "node key in use"),
            "HTTP 409); another one has it: choose another name, or remove the other",
        ),
        (
            problem(500, "Internal Server Error", "setting policy", "database is locked"),
            "said: Internal Server Error: setting policy: database is locked (POST "
            "/api/v1/node/7/approve_routes, HTTP 500); correct what it names, or see the log of "
            "Headscale",
        ),
        (
            problem(503, "Service Unavailable", "too many requests wait"),
            "HTTP 503); see the log of Headscale, and run again when it is well",
        ),
        (
            problem(401, "Unauthorized", "Unauthorized"),
            "does not accept it (HTTP 401: Unauthorized): it may be expired, or another server's; "
            "make one with `headscale apikeys create`",
        ),
        (
            problem(403, "Forbidden", "this key may only read"),
            "does not accept it (HTTP 403: Forbidden: this key may only read): it may be",
        ),
    ],
)
def test_what_headscale_0_30_says_is_shown_with_its_reason_and_the_fix(stub, server, body, said):
    stub.answers = [says(body["status"], body, "application/problem+json")]
    with pytest.raises(HeadscaleError) as raised:
        server.approve(Node("7", "nodekey:1", "n", "n"), ["10.0.0.0/8"])
    assert said in str(raised.value)


MALFORMED = {
    "not JSON": '{"title": "Bad',
    "no text": "",
    "nested without end": '{"title": ' + "[" * 200_000,
    "a list": '["title", "detail"]',
    "nothing in it": "{}",
    "null": "null",
    "other types": '{"title": {"a": [1]}, "detail": 7, "errors": {"message": "x"}}',
    "errors of other types": '{"title": "Bad", "errors": [1, null, {"message": {"a": 1}}, {}]}',
    "half a character": '{"title": "\\ud800", "detail": "\\udfff\\u0000"}',
    "not UTF-8": "\udcff\udcfe",
    "a number of 10,000 digits": '{"title": ' + "9" * 10_000 + "}",
    "many reasons": json.dumps({"title": "T", "errors": [{"message": "m" * 99}] * 20_000}),
    "a long title": json.dumps({"title": "t" * (4 << 20)}),
    "several lines": json.dumps({"title": "a\nb", "detail": "c\x1b[31m\r\u2028d"}),
    "the key": json.dumps({"title": f"Bearer {SECRET}", "detail": f"x {SECRET}"}),
}


@pytest.mark.parametrize("status", [401, 404, 422, 500])
@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_problem_is_still_one_short_line(stub, server, body, status):
    stub.answers = [says(status, body, "application/problem+json")]
    began = time.monotonic()
    with pytest.raises(HeadscaleError, match=f"HTTP {status}") as raised:
        server.approve(Node("7", "nodekey:1", "n", "n"), ["10.0.0.0/8"])
    said = str(raised.value)
    assert said.isprintable()
    assert len(said) < 600
    assert SECRET not in said
    assert time.monotonic() - began < 5


def test_an_answer_that_is_nested_without_end_is_not_headscales(stub, server):
    stub.answers = [says(200, '{"nodes": ' + "[" * 200_000)]
    with pytest.raises(HeadscaleError, match="is not Headscale's"):
        server.nodes()


def test_never_expiring_is_asked_for_as_each_version_understands_it(stub, server):
    """0.29 reads the query; 0.30 reads the body, and without it expires the node at once."""
    stub.paths["GET /version"] = says(200, {"version": "v0.30.0"})
    stub.answers = [says(200, {"node": raw_node()})]
    server.never_expire_node(Node("7", "nodekey:1", "n", "n"))
    assert stub.requests[-1] == "POST /api/v1/node/7/expire?disableExpiry=true"
    assert stub.bodies[-1] == {"disableExpiry": True}


def test_0_30_gives_a_policy_that_is_in_a_file_the_year_one(stub, server):
    stub.answers = [says(200, {"policy": "{}", "updatedAt": "0001-01-01T00:00:00Z"})]
    assert server.policy().in_file
    stub.answers = [says(200, {"policy": "{}", "updatedAt": "2026-11-18T08:00:00Z"})]
    assert not server.policy().in_file


def test_0_30_without_a_policy_has_an_empty_one(stub, server):
    body = problem(
        500, "Internal Server Error", "loading ACL from database", "acl policy not found"
    )
    stub.answers = [says(500, body, "application/problem+json")]
    assert server.policy().text == ""


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_read_is_asked_again_while_the_server_is_not_well(stub, server, status):
    sick = says(status, "later", "text/plain")
    stub.answers = [sick, sick, says(200, {"nodes": []})]
    assert server.nodes() == []
    assert stub.requests == ["GET /api/v1/node"] * 3


def test_there_is_an_end_to_it(stub, server):
    stub.answers = [says(503, "later", "text/plain")]
    with pytest.raises(HeadscaleError, match="later"):
        server.nodes()
    assert len(stub.requests) == 3


def test_a_write_is_asked_once(stub, server):
    stub.answers = [says(503, "later", "text/plain")]
    with pytest.raises(HeadscaleError, match="later"):
        server.approve(Node("1", "nodekey:1", "n", "n"), ["10.0.0.0/8"])
    assert stub.requests == ["POST /api/v1/node/1/approve_routes"]


def test_a_connection_that_breaks_off_is_tried_again(stub, server):
    def breaks_off(request: BaseHTTPRequestHandler) -> None:
        request.connection.close()

    stub.answers = [breaks_off, says(200, {"nodes": []})]
    assert server.nodes() == []
    assert len(stub.requests) == 2


def test_a_server_that_is_not_there_is_said_to_be_so():
    server = Headscale(f"http://127.0.0.1:{free_port()}", SECRET, timeout=2, pauses=())
    with pytest.raises(HeadscaleError, match=r"url: .* cannot be reached: Connection refused; see"):
        server.nodes()
    nowhere = Headscale("http://nowhere.invalid", SECRET, timeout=5, pauses=())
    with pytest.raises(HeadscaleError, match=r"url: http://nowhere.invalid cannot be reached: "):
        nowhere.nodes()


def test_a_server_that_says_nothing_is_not_waited_for_long(stub):
    given_up = threading.Event()
    stub.answers = [lambda request: given_up.wait(10)]
    server = Headscale(stub.url, SECRET, timeout=0.2, pauses=())
    with pytest.raises(HeadscaleError, match=r"did not answer in 0\.2 s"):
        server.nodes()
    given_up.set()


def test_an_answer_that_drips_comes_to_an_end(stub):
    def drips(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(100):
            request.wfile.write(b" ")
            request.wfile.flush()
            time.sleep(0.05)

    stub.answers = [drips]
    server = Headscale(stub.url, SECRET, timeout=0.15, pauses=())
    began = time.monotonic()
    with pytest.raises(HeadscaleError, match="did not answer"):
        server.nodes()
    assert time.monotonic() - began < 3


def test_an_answer_without_end_is_not_read_to_the_end(stub, server, monkeypatch):
    monkeypatch.setattr(client_module, "LARGEST_ANSWER", 1 << 20)
    stub.answers = [says(200, " " * (2 << 20))]
    with pytest.raises(HeadscaleError, match="more than 1 MiB"):
        server.nodes()


def test_a_redirect_is_not_followed_with_the_key(stub, server):
    stub.answers = [says(302, "", Location="https://elsewhere.example/")]
    with pytest.raises(HeadscaleError, match=r"sends us to https://elsewhere.example/ \(HTTP 302"):
        server.nodes()
    assert len(stub.requests) == 1


def test_the_key_is_in_no_error_even_if_the_server_sends_it_back(stub, server):
    for answer in (
        says(500, {"message": f"bad header: Bearer {SECRET}"}),
        says(200, f"you said {SECRET}", "text/plain"),
        says(302, "", Location=f"https://elsewhere.example/?{SECRET}"),
    ):
        stub.answers = [answer]
        with pytest.raises(HeadscaleError, match=r"\[the key\]") as raised:
            server.nodes()
        assert "verysecret" not in f"{raised.value!r} {raised.value}"


def test_the_key_is_sent_whatever_the_netrc_says(stub, server, tmp_path, monkeypatch):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login me password mine\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    stub.answers = [says(200, {"nodes": []})]
    server.nodes()
    assert stub.headers[0]["Authorization"] == f"Bearer {SECRET}"


def test_a_certificate_that_is_not_trusted_gets_no_key_and_a_trusted_one_does(
    tmp_path, monkeypatch
):
    cert, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj "
        f"/CN=localhost -addext subjectAltName=DNS:localhost -keyout {private} -out {cert}".split(),
        check=True,
        capture_output=True,
        timeout=30,
    )
    tls = SSLContext(PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, private)
    with stub_server(tls) as stub:
        stub.answers = [says(200, {"nodes": []})]
        with pytest.raises(
            HeadscaleError, match=r"not trusted: self.signed certificate; give the CA"
        ):
            Headscale(stub.url, SECRET).nodes()
        assert stub.requests == []
        assert Headscale(stub.url, SECRET, ca_file=str(cert)).nodes() == []
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere")
        assert Headscale(stub.url, SECRET, validate_certs=False).nodes() == []
        plain = Headscale(stub.url.replace("https", "http"), SECRET, pauses=())
        with pytest.raises(HeadscaleError, match=r"url: .* cannot be reached|said"):
            plain.nodes()


def test_tls_to_a_server_that_speaks_none_is_said_to_be_so(stub):
    with pytest.raises(HeadscaleError, match=r"does not speak TLS as it should: is it http\?"):
        Headscale(stub.url.replace("http", "https"), SECRET, pauses=()).nodes()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "url: '', expected http:// or https://"),
        ("headscale.example.org", "expected http:// or https://"),
        ("ftp://headscale.example.org", "expected http:// or https://"),
        ("https://", "a host"),
        ("https://a:b", "an address such as"),
        ("https://[::1", "an address such as"),
        ("https://me:secret@h.example.org", r"'https://…@h.example.org', expected no user"),
        ("https://h.example.org/api/v1", "without /api/v1"),
        ("https://h.example.org/?a=b", "without /api/v1"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused(url, said):
    with pytest.raises(HeadscaleError, match=said) as raised:
        Headscale(url, SECRET)
    assert ":secret" not in str(raised.value)


@pytest.mark.parametrize("key", ["", " \n", "two words", "schlüssel", "a\r\nX-Other: b"])
def test_a_key_that_cannot_be_one_is_refused_unquoted(key):
    with pytest.raises(HeadscaleError, match=r"api_key: (empty|not one word)") as raised:
        Headscale("https://h.example.org", key)
    assert not key.strip() or key not in str(raised.value)


def test_what_cannot_go_together_is_refused(tmp_path):
    for how, said in (
        ({"timeout": 0}, "timeout: 0, expected"),
        ({"timeout": 9999}, "timeout: 9999, expected"),
        ({"ca_file": "/nowhere"}, "ca_file: '/nowhere', expected a file"),
        ({"ca_file": str(tmp_path)}, "expected a file"),
        ({"ca_file": "/etc/hosts", "validate_certs": False}, "leave one of them out"),
    ):
        with pytest.raises(HeadscaleError, match=said):
            Headscale("https://h.example.org", SECRET, **how)
    with pytest.raises(HeadscaleError, match="ca_file: given, and url is"):
        Headscale("http://h.example.org", SECRET, ca_file="/etc/hosts")


def api(*calls: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {"/api/v1/node": {"get": {}}}
    for call in calls:
        method, path = call.split()
        paths.setdefault(f"/api/v1/{path}", {})[method] = {}
    return {"paths": paths}


@pytest.mark.parametrize(
    ("said", "described", "number", "text"),
    [
        ({"version": "v0.29.2"}, {}, (0, 29), "0.29.2"),
        ({"version": "0.27.0-beta.1"}, {}, (0, 27), "0.27.0-beta.1"),
        ({"version": "v1.0.0"}, {}, (1, 0), "1.0.0"),
        ({"version": "dev"}, api("post policy/check", "delete preauthkey"), (0, 29), "0.29"),
        ({"version": "dev"}, api("delete preauthkey", "get health"), (0, 28), "0.28"),
        ({"version": "dev"}, api("get health", "post node/{nodeId}/approve_routes"), (0, 27), ""),
        (None, api("post node/{nodeId}/approve_routes", "delete user/{id}"), (0, 26), "0.26"),
        (None, api("delete user/{id}", "get routes"), (0, 24), "0.24"),
        (None, api("get user/{name}", "delete user/{name}", "get routes"), (0, 23), "0.23"),
        (None, None, (0, 29), "unknown"),
    ],
)
def test_the_version_is_what_the_server_says_or_what_its_api_has(
    stub, server, said, described, number, text
):
    nothing = says(404, "404 page not found", "text/plain")
    stub.paths["GET /version"] = nothing if said is None else says(200, said)
    stub.paths["GET /swagger/v1/openapiv2.json"] = (
        nothing if described is None else says(200, described)
    )
    assert server.version().number == number
    assert server.version().text.startswith(text)
    assert len(stub.requests) <= 2


def test_a_server_before_0_23_is_refused(stub, server):
    stub.paths["GET /version"] = says(404, "", "text/plain")
    stub.paths["GET /swagger/v1/openapiv2.json"] = says(200, {"paths": {"/api/v1/machine": {}}})
    with pytest.raises(HeadscaleError, match=r"older than 0.23"):
        server.version()


def test_nodes_of_0_26_on_carry_their_routes(stub, server):
    stub.answers = [
        says(
            200,
            {
                "nodes": [
                    raw_node(
                        user={"name": "ann"},
                        tags=["tag:k8s"],
                        online=True,
                        expiry="2026-11-16T06:23:49.994959936Z",
                        lastSeen="0001-01-01T00:00:00Z",
                        approvedRoutes=["10.0.0.0/8"],
                        preAuthKey={"key": "a secret"},
                    )
                ]
            },
        )
    ]
    (node,) = server.nodes()
    assert (node.name, node.hostname, node.user, node.tags) == (
        "node1",
        "Node1",
        "ann",
        ("tag:k8s",),
    )
    assert node.expiry == datetime(2026, 11, 16, 6, 23, 49, tzinfo=timezone.utc)
    assert node.last_seen is None
    assert (node.approved, node.switches) == (("10.0.0.0/8",), None)
    assert "secret" not in str(node.as_dict())


def test_nodes_up_to_0_25_get_theirs_from_the_list_of_routes(stub, server):
    old = {"id": "1", "nodeKey": "nodekey:1", "name": "n1", "givenName": "n1", "forcedTags": ["t"]}
    stub.paths["GET /api/v1/node"] = says(200, {"nodes": [old, {**old, "id": "2"}]})
    route = {"node": {"id": "1"}, "advertised": True, "enabled": False, "isPrimary": False}
    stub.paths["GET /api/v1/routes"] = says(
        200,
        {
            "routes": [
                {**route, "id": "7", "prefix": "10.1.0.0/24"},
                {**route, "id": "8", "prefix": "10.2.0.0/24", "enabled": True, "isPrimary": True},
                {**route, "id": "9", "prefix": "10.9.0.0/24", "node": None},
            ]
        },
    )
    one, two = server.nodes()
    assert one.available == ("10.1.0.0/24", "10.2.0.0/24")
    assert (one.approved, one.served) == (("10.2.0.0/24",), ("10.2.0.0/24",))
    assert (one.switches, two.switches) == ({"10.1.0.0/24": "7", "10.2.0.0/24": "8"}, {})
    stub.answers = [says(200, {})]
    stub.requests.clear()
    server.approve(one, ["10.1.0.0/24"])
    assert stub.requests == ["POST /api/v1/routes/7/enable", "POST /api/v1/routes/8/disable"]


def test_an_approval_that_headscale_does_not_keep_is_an_error(stub, server):
    stub.answers = [says(200, {"node": raw_node(approvedRoutes=["10.1.0.0/16"])})]
    with pytest.raises(HeadscaleError, match=r"did not keep the approval of 10\.2\.0\.0/16"):
        server.approve(Node("1", "nodekey:1", "n", "n"), ["10.1.0.0/16", "10.2.0.0/16"])


@pytest.mark.parametrize(
    ("version", "owner"), [("0.23.0", "ann"), ("0.25.1", "ann"), ("0.26.1", "1"), ("0.29.2", "1")]
)
def test_a_key_is_made_for_the_user_as_each_version_names_it(stub, server, version, owner):
    stub.paths["GET /version"] = says(200, {"version": version})
    stub.answers = [says(200, {"preAuthKey": {"id": "3", "key": "k", "user": "ann"}})]
    when = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    made = server.create_key(ANN, ["tag:k8s"], True, False, when)
    assert (made.id, made.key, made.user) == ("3", "k", "ann")
    assert stub.bodies[-1] == {
        "user": owner,
        "aclTags": ["tag:k8s"],
        "reusable": True,
        "ephemeral": False,
        "expiration": "2030-01-02T03:04:05Z",
    }
    assert "'k'" not in repr(made)


@pytest.mark.parametrize(
    ("version", "listing", "body"),
    [
        ("0.25.1", "GET /api/v1/preauthkey?user=ann", {"user": "ann", "key": "k"}),
        ("0.27.1", "GET /api/v1/preauthkey?user=1", {"user": "1", "key": "k"}),
        ("0.28.0", "GET /api/v1/preauthkey", {"id": "3"}),
    ],
)
def test_a_key_is_found_and_expired_as_each_version_wants_it(stub, server, version, listing, body):
    stub.paths["GET /version"] = says(200, {"version": version})
    stub.paths[listing] = says(200, {"preAuthKeys": [{"id": "3", "key": "k"}]})
    stub.answers = [says(200, {})]
    (key,) = server.keys(ANN)
    server.expire_key(key, ANN)
    assert (stub.requests[-1], stub.bodies[-1]) == ("POST /api/v1/preauthkey/expire", body)


@pytest.mark.parametrize(("shape", "end"), [({"displayName": ""}, "1"), ({}, "ann%2Fb")])
def test_a_user_is_named_by_its_id_from_0_24_on(stub, server, shape, end):
    stub.paths["GET /api/v1/user"] = says(200, {"users": [{"id": "1", "name": "ann/b", **shape}]})
    stub.answers = [says(200, {})]
    user = server.user("ann/b")
    assert user is not None
    server.rename_user(user, "bob")
    server.delete_user(user)
    assert stub.requests[1:] == [
        f"POST /api/v1/user/{end}/rename/bob",
        f"DELETE /api/v1/user/{end}",
    ]


def test_two_users_of_one_name_are_not_guessed_between(stub, server):
    twins = [{"id": "1", "name": "ann"}, {"id": "2", "name": "ann"}]
    stub.answers = [says(200, {"users": twins})]
    with pytest.raises(HeadscaleError, match=r"'ann' is ambiguous: .*\(ids 1, 2\)"):
        server.user("ann")


def test_an_expiry_is_not_taken_back_by_a_server_that_would_expire_the_node(stub, server):
    stub.paths["GET /version"] = says(200, {"version": "0.28.0"})
    with pytest.raises(HeadscaleError, match=r"expiry: never, and Headscale 0.28.0 cannot"):
        server.never_expire_node(Node("1", "nodekey:1", "n", "n"))
    assert stub.requests == ["GET /version"]


def test_a_policy_in_a_file_is_known_by_having_no_date(stub, server):
    stub.answers = [says(200, {"policy": "{}", "updatedAt": None})]
    assert server.policy().in_file
    stub.answers = [says(200, {"policy": "{}", "updatedAt": "2026-11-16T06:23:50Z"})]
    assert not server.policy().in_file
    stub.answers = [says(500, {"message": "loading ACL from database: acl policy not found"})]
    assert (server.policy().text, server.policy().in_file) == ("", False)


def test_the_servers_clock_counts(stub, server):
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response_only(200)
        request.send_header("Date", "Mon, 01 Jan 2035 00:00:00 GMT")
        request.end_headers()
        request.wfile.write(b'{"nodes": []}')

    assert abs((server.now() - datetime.now(timezone.utc)).total_seconds()) < 5
    stub.answers = [answer]
    server.nodes()
    assert server.now() == datetime(2035, 1, 1, tzinfo=timezone.utc)
