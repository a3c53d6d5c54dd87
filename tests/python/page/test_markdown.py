"""Markdown as elements, in a browser: what it makes, and that nothing in a text becomes more than text."""

from __future__ import annotations

import json
from typing import Any

import pytest

SHOW = """async (text) => {
  const { showMarkdown } = await import("/page/markdown.js");
  const element = document.createElement("div");
  showMarkdown(element, text);
  for (const each of element.querySelectorAll("*")) {
    each.removeAttribute("tabindex"); each.removeAttribute("rel"); each.removeAttribute("target");
  }
  return element.innerHTML;
}"""


@pytest.mark.parametrize(("text", "html"), [
    ("a\nb", "<p>a<br>b</p>"),
    ("a\n\nb", "<p>a</p><p>b</p>"),
    ("# a #\n### b", "<h2>a</h2><h4>b</h4>"),
    ("a **b** *c* ***d***", "<p>a <strong>b</strong> <em>c</em> <em><strong>d</strong></em></p>"),
    ("~~e~~ __f__ _g_", "<p><del>e</del> <strong>f</strong> <em>g</em></p>"),
    ("snake_case_name 2 * 3 * 4 **", "<p>snake_case_name 2 * 3 * 4 **</p>"),
    ("**a *b* c** *d **e** f*", "<p><strong>a <em>b</em> c</strong> <em>d <strong>e</strong> f</em></p>"),
    ("`a*b*` ``c`d`` `e", "<p><code>a*b*</code> <code>c`d</code> `e</p>"),
    (r"\*a\* \[b](c)", "<p>*a* [b](c)</p>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n\n   ```\n   x\n   ```\n2. b", None),
    ("- a\n\n- b", "<ul><li><p>a</p></li><li><p>b</p></li></ul>"),
    ("a\n- b\n\nc", "<p>a</p><ul><li>b</li></ul><p>c</p>"),
    ("- [x] a\n- [ ] b", '<ul><li class="task"><input type="checkbox" disabled="" checked="" aria-label="Task">a</li>'
                         '<li class="task"><input type="checkbox" disabled="" aria-label="Task">b</li></ul>'),
    ("> a\n> - b\n\nc", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote><p>c</p>"),
    ("---\na", "<hr><p>a</p>"),
    ("[a *b*](https://c.d/(e)?f=g)", '<p><a href="https://c.d/(e)?f=g">a <em>b</em></a></p>'),
    ("see https://a.b/c, (https://d.e).", '<p>see <a href="https://a.b/c">https://a.b/c</a>, '
                                         '(<a href="https://d.e/">https://d.e</a>).</p>'),
    ("![cat](https://a.b/c.png)", '<p><a href="https://a.b/c.png">cat</a></p>'),
    ("[a](b) [c] [d]", "<p>[a](b) [c] [d]</p>"),
])
def test_markdown_becomes_elements(lasting_page: Any, text: str, html: str | None) -> None:
    made = lasting_page.evaluate(SHOW, text)
    if html is None:
        assert "<ol><li>" in made and "<pre" in made and made.count("<li>") == 2
    else:
        assert made == html


def test_tables(lasting_page: Any) -> None:
    made = lasting_page.evaluate(SHOW, "| a | b |\n| --- | ---: |\n| `x` | 1 \\| 2 |\n| y |\n\nafter")
    assert "<th>a</th><th class=\"right\">b</th>" in made
    assert "<td><code>x</code></td><td class=\"right\">1 | 2</td>" in made
    assert "<td>y</td><td class=\"right\"></td>" in made
    assert made.endswith("<p>after</p>")


@pytest.mark.parametrize(("language", "code", "kinds"), [
    ("python", "def f(x):  # why\n    return 'a' + 1", {"keyword", "call", "comment", "string", "number"}),
    ("ts", "const a = `b` // c\n/* d */ f(2)", {"keyword", "string", "comment", "call", "number"}),
    ("cpp", "#include <a>\nint main() { return 0; }", {"name", "keyword", "call", "number"}),
    ("bash", "for f in $FILES; do ls --all; done # x", {"keyword", "name", "option", "comment"}),
    ("json", '{"a": [1, true, "b"]}', {"name", "number", "keyword", "string"}),
    ("sql", "SELECT count(*) FROM t -- all", {"keyword", "call", "comment"}),
    ("html", '<!-- a --><b class="c">', {"comment", "keyword", "name", "string"}),
    ("css", "a { color: #fff; /* b */ width: calc(1px) }", {"name", "number", "comment", "call"}),
    ("yaml", "a: true # b\nc: 'd'", {"name", "keyword", "comment", "string"}),
    ("diff", "@@ 1 @@\n+a\n-b", {"comment", "added", "removed"}),
    ("unknown", "if x", set()),
])
def test_code_is_coloured_and_stays_the_same_text(lasting_page: Any, language: str, code: str, kinds: set[str]) -> None:
    found = lasting_page.evaluate("""async ([language, code]) => {
      const { highlighted } = await import("/page/highlight.js");
      const element = document.createElement("code");
      element.append(...highlighted(code, language));
      return [element.textContent, [...element.children].map((each) => each.className.slice(5))];
    }""", [language, code])
    assert found[0] == code
    assert set(found[1]) == kinds


HOSTILE = [
    "<script>parent.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg/onload=window.hacked=1>",
    "<iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>",
    "<style>* { display: none }</style><link rel=stylesheet href=https://evil.test/a.css>",
    "<form action=https://evil.test><button>x</button></form><base href=https://evil.test>",
    "[a](javascript:window.hacked=1) [b](JaVaScRiPt:window.hacked=1) [c](<java\tscript:window.hacked=1>)",
    "[a](data:text/html,<script>window.hacked=1</script>) [b](vbscript:x) [c](file:///etc/passwd)",
    "[a](&#106;avascript:window.hacked=1) <javascript:window.hacked=1>",
    "![a](https://evil.test/track.png) ![b](javascript:window.hacked=1)",
    '[a](https://a.b/" onclick="window.hacked=1) [b](https://a.b "t\\" onmouseover=window.hacked=1")',
    "```\"><img src=x onerror=window.hacked=1>\n</code></pre><script>window.hacked=1</script>\n```",
    "```html\n<script>window.hacked = 1</script><img src=x onerror=window.hacked=1>\n```",
    "| <img src=x onerror=window.hacked=1> |\n| --- |\n| <script>window.hacked=1</script> |",
    "# <b onclick=window.hacked=1>x</b>\n> <i>y</i>\n- <u>z</u>",
    "`<img src=x onerror=window.hacked=1>` **<script>window.hacked=1</script>**",
]
ALLOWED = set("P BR H2 H3 H4 H5 H6 HR UL OL LI BLOCKQUOTE STRONG EM DEL CODE PRE A TABLE THEAD TBODY TR TH TD DIV"
              " FIGURE FIGCAPTION SPAN BUTTON SVG PATH INPUT".split())


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_in_a_text_becomes_more_than_text(lasting_page: Any, text: str) -> None:
    found = lasting_page.evaluate("""async (text) => {
      const { showMarkdown } = await import("/page/markdown.js");
      const element = document.createElement("div");
      document.body.append(element);
      showMarkdown(element, text);
      const all = [...element.querySelectorAll("*")];
      for (const each of all) { each.dispatchEvent(new MouseEvent("mouseover", { bubbles: true })); }
      await new Promise((resolve) => setTimeout(resolve, 20));
      return {
        tags: all.map((each) => each.tagName.toUpperCase()),
        names: all.flatMap((each) => each.getAttributeNames()),
        links: [...element.querySelectorAll("a")].map((each) => [each.protocol, each.rel, each.target]),
        own: [...element.querySelectorAll("button")].every((each) => each.closest("figcaption")),
        hacked: window.hacked ?? null,
        text: element.textContent,
      };
    }""", text)
    assert set(found["tags"]) <= ALLOWED
    assert not {"src", "srcdoc", "style", "action"}.intersection(found["names"])
    assert not [name for name in found["names"] if name.startswith("on")]
    assert all(link == ["https:", "noopener noreferrer nofollow", "_blank"] for link in found["links"])
    assert found["own"] and found["hacked"] is None
    assert "hacked" not in text or "hacked" in found["text"] or "https://a.b" in text


@pytest.mark.parametrize("text", [
    "*" * 30_000, "*a" * 20_000, "*a_" * 20_000 + "_a*" * 20_000, "[" * 30_000, "[a](" * 20_000, "`" * 30_000,
    "".join("`" * length + " " for length in range(1, 400)), "> " * 5_000 + "a", "- " * 5_000 + "a",
    "\n".join(" " * depth + "- a" for depth in range(300)), "|" * 20_000 + "\n" + "-|" * 20_000, "#" * 30_000,
    "https://a" + "." * 30_000 + "x", "h" * 30_000, "```" + "a" * 30_000 + "`", "-" * 30_000 + "x", " " * 30_000 + "x",
    "```css\n" + "a-" * 15_000 + "\n```", "```json\n" + '"a' * 10_000 + "\n```", "```py\n" + "1" * 40_000 + "x" * 9,
    "![" * 20_000, "\\" * 30_000, "a\n" * 10_000, "1. a\n" * 3_000, "|a|\n|-|\n" * 3_000,
], ids=lambda text: json.dumps(text[:12]))
def test_no_text_takes_long(lasting_page: Any, text: str) -> None:
    """Each is a text for which a careless reader takes quadratic time or exhausts the stack: then this does not end, or
    raises. The shown text loses nothing but marks."""
    length = lasting_page.evaluate("""async (text) => {
      const { showMarkdown } = await import("/page/markdown.js");
      const element = document.createElement("div");
      document.body.append(element);
      showMarkdown(element, text);
      const length = element.textContent.length;
      element.remove();
      return length;
    }""", text)
    assert length <= len(text) + 10


def test_a_growing_text_keeps_the_elements_of_finished_blocks(lasting_page: Any) -> None:
    kept = lasting_page.evaluate("""async () => {
      const { showMarkdown } = await import("/page/markdown.js");
      const element = document.createElement("div");
      const text = "# a\\n\\nb **c**\\n\\n```py\\nx = 1\\n```\\n\\n- d\\n- e\\n";
      let before = [];
      let kept = true;
      for (let end = 1; end <= text.length; end++) {
        showMarkdown(element, text.slice(0, end));
        const now = [...element.children];
        kept &&= before.slice(0, -1).every((each, index) => now[index] === each);
        before = now;
      }
      const whole = document.createElement("div");
      showMarkdown(whole, text);
      return [kept, whole.innerHTML === element.innerHTML];
    }""")
    assert kept == [True, True]
