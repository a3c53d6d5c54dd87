"""The page's files over HTTP. No browser is needed."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from sharpi.serve import page_routes

FOLDER = Path(page_routes.__file__).parent / "page"


@pytest.fixture
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes.routes()))


def test_the_page_and_its_parts_are_served(client: TestClient) -> None:
    types = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for file in FOLDER.iterdir():
        answer = client.get(f"/page/{file.name}")
        assert answer.status_code == 200, file.name
        assert answer.content == file.read_bytes()
        assert answer.headers["content-type"].startswith(types[file.suffix])
    assert client.get("/").content == (FOLDER / "index.html").read_bytes()
    assert client.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/page/none.js"])
def test_every_answer_has_the_policy(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    policy = {part.split()[0]: part.split()[1:] for part in headers["content-security-policy"].split(";")}
    assert policy["default-src"] == ["'self'"]
    for name in ("frame-ancestors", "object-src", "base-uri", "form-action"):
        assert policy[name] == ["'none'"]
    assert policy["require-trusted-types-for"] == ["'script'"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-cache"


def test_a_version_that_the_browser_has_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/page/main.js").headers["etag"]
    assert client.get("/page/page.css").headers["etag"] != tag
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = client.get("/page/main.js", headers={"If-None-Match": known})
        assert (answer.status_code, answer.content) == (304, b""), known
        assert answer.headers["etag"] == tag
    assert client.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page/", "/page/none.js", "/page/../turns.py", "/page/..%2Fturns.py",
                                  "/page/%2e%2e/turns.py", "/page//etc/passwd", "/page/main.js/", "/page/main.js%00"])
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    assert client.get(path, follow_redirects=False).status_code in (404, 307)
    assert client.get(path).status_code == 404 or path == "/page/main.js/"


def test_a_key_is_not_asked_of_the_page_alone() -> None:
    assert page_routes.is_page("/") and page_routes.is_page("/page/main.js")
    assert not any(map(page_routes.is_page, ("/props", "/v1/models", "/pages", "/page", "")))


class _References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = dict(attributes)
        self.found += [value for name in ("src", "href") if (value := named.get(name))]
        self.inline += [name for name in named if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in named):
            self.inline.append(tag)


def test_the_page_refers_to_its_own_files_alone() -> None:
    """Relative to where it is, so that it works below a path of a proxy, too."""
    parser = _References()
    parser.feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    parts = [name for name in parser.found if not name.startswith("#")]
    assert parts and all((FOLDER.parent / name).is_file() for name in parts)
    assert not parser.inline
    for module in FOLDER.glob("*.js"):
        names = re.findall(r'from "\./([^"]+)"', module.read_text(encoding="utf-8"))
        assert all((FOLDER / name).is_file() for name in names), module.name


def test_no_module_parses_html() -> None:
    parsing = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b"
                         r"|new Function|setHTML|createContextualFragment")
    for module in FOLDER.glob("*.js"):
        assert not parsing.search(module.read_text(encoding="utf-8")), module.name


def test_the_pages_lines_are_short() -> None:
    for file in FOLDER.iterdir():
        longest = max(file.read_text(encoding="utf-8").splitlines(), key=len)
        assert len(longest) <= 120, f"{file.name}: {longest}"
