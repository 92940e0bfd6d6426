"""Who is let in to the page: by key, cookie, host and origin."""

import asyncio

import pytest

from chronicals.ui.guard import HEADERS, Guard, is_loopback, lasting_key

KEY = "the-key"
HOST = "127.0.0.1:8321"


async def page(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


def guard(host="127.0.0.1"):
    return Guard(page, KEY, host, 8321)


def asked(path="/", query="", kind="http", of=None, **headers):
    """Status, headers and text of the guard's answer, or the close code of a websocket."""
    headers = {"host": HOST, **headers}
    scope = {
        "type": kind,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    said = []

    async def send(message):
        said.append(message)

    asyncio.run((of or guard())(scope, None, send))
    first = said[0]
    if first["type"] == "websocket.close":
        return first["code"], {}, ""
    found = {name.decode(): value.decode() for name, value in first["headers"]}
    return first["status"], found, said[-1]["body"].decode()


def cookie(**attributes):
    return {"cookie": f"chronicals-8321={guard().token}", **attributes}


def test_without_key_or_cookie_nothing_is_shown():
    for query in ("", "key=wrong", "key="):
        status, headers, text = asked(query=query)
        assert status == 401 and "secret" not in text and "set-cookie" not in headers


def test_the_key_is_exchanged_for_a_cookie_that_scripts_and_other_sites_do_not_have():
    status, headers, _ = asked("/run", f"key={KEY}&name=a")
    assert (status, headers["location"]) == (303, "/run?name=a")
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
    assert KEY not in headers["set-cookie"]
    sent = headers["set-cookie"].partition(";")[0]
    assert asked(cookie=sent)[0] == 200


@pytest.mark.parametrize("path", ["//evil.example/x", "/\\evil.example"])
def test_the_exchange_leads_to_no_other_host(path):
    assert asked(path, f"key={KEY}")[1]["location"] == "/evil.example" + path[14:]


@pytest.mark.parametrize(
    "host", ["evil.example:8321", "127.0.0.1:9999", "", "127.0.0.1.nip.io:8321"]
)
def test_a_foreign_host_name_is_refused(host):
    assert asked(**cookie(host=host))[0] == 403


def test_local_names_are_ours():
    for host in ("localhost:8321", "[::1]:8321"):
        assert asked(**cookie(host=host))[0] == 200


def test_where_it_listens_everywhere_addresses_are_ours_and_names_are_not():
    everywhere = guard("0.0.0.0")
    assert everywhere.is_own_host("192.168.1.7:8321")
    assert not everywhere.is_own_host("evil.example:8321")


@pytest.mark.parametrize("kind, refused", [("http", 403), ("websocket", 1008)])
def test_another_origin_is_refused_though_it_has_the_cookie(kind, refused):
    assert asked(kind=kind, **cookie(origin="http://evil.example"))[0] == refused
    if kind == "http":
        assert asked(**cookie(origin=f"http://{HOST}"))[0] == 200


def test_a_websocket_needs_the_cookie():
    assert asked(kind="websocket", query=f"key={KEY}")[0] == 1008


def test_each_answer_has_the_headers_that_keep_requests_here():
    _, headers, _ = asked(**cookie())
    assert headers == HEADERS
    assert "connect-src 'self'" in headers["content-security-policy"]


def test_the_key_lasts_and_is_its_owner_s(tmp_path):
    file = tmp_path / "key"
    key = lasting_key(file)
    assert len(key) >= 32 and lasting_key(file) == key
    assert file.stat().st_mode & 0o077 == 0
    assert lasting_key(tmp_path / "other") != key


def test_loopback():
    assert is_loopback("127.0.0.1") and not is_loopback("0.0.0.0")
