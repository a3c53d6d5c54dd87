"""The page in a browser, against a server whose answers the tests write. Every test also fails if the page raises,
breaks its policy, or asks another server than its own: see conftest.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import Watch
from page_server import WAIT, FakeServer, ended, progress, said, speed, thought
from starlette.responses import JSONResponse

LAST = ".answer:last-child"


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Any, text: str) -> None:
    """Waits until the last answer says this and has ended."""
    page.wait_for_function("""(text) => !document.getElementById("send").hidden
      && document.querySelector(".answer:last-child:not(.running) > .markdown")?.innerText === text""", arg=text)


def shown(page: Any) -> list[str]:
    return [text.strip() for text in page.locator(".message > .said, .message > .markdown").all_inner_texts()]


def asked(server: FakeServer) -> list[str]:
    """What the last request asked, as "role: text"."""
    return [f"{message['role']}: {message['content']}" for message in server.requests[-1]["messages"]]


def until(true: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + 5
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_streams_and_is_still_there_after_a_reload(page: Any, server: FakeServer) -> None:
    server.answers = [[said("One "), said("**two**"), WAIT, said(" three"), *ended()]]
    ask(page, "Count")
    page.wait_for_selector(f"{LAST}.running strong:text-is('two')")
    assert shown(page) == ["Count", "One two"]
    assert page.is_visible("#stop") and not page.is_visible("#send")
    server.resume()
    answered(page, "One two three")
    counts = page.inner_text(f"{LAST} .counts")
    for part in ("48.3 tokens/s", "312 tokens", "prompt 1,204 (1,024 cached)"):
        assert part in counts
    assert page.inner_text("#context") == "1,516 of 32,768 tokens"
    page.reload()
    page.wait_for_selector(f"{LAST} strong")
    assert shown(page) == ["Count", "One two three"]
    assert page.inner_text(".chat-name") == "Count"
    assert page.title() == "Count · Sharpi"


def test_a_conversation_is_sent_whole_and_thoughts_are_not(page: Any, server: FakeServer) -> None:
    server.answers = [[thought("Hm."), said("Yes."), *ended()]]
    ask(page, "First")
    answered(page, "Yes.")
    ask(page, "Second")
    until(lambda: len(server.requests) == 2, "the second request")
    assert asked(server) == ["user: First", "assistant: Yes.", "user: Second"]
    assert server.requests[-1]["model"] == "Qwen3-30B-A3B-Q4_K_M"
    assert server.requests[-1]["stream"] is True


@pytest.mark.parametrize("how", ["key", "button"])
def test_stopping_keeps_what_is_there_and_hangs_up(page: Any, server: FakeServer, how: str) -> None:
    server.answers = [[said("Partly"), WAIT]]
    ask(page, "Go")
    page.wait_for_selector(f"{LAST}.running p:text-is('Partly')")
    page.keyboard.press("Escape") if how == "key" else page.click("#stop")
    answered(page, "Partly")
    until(lambda: server.given_up == 1, "the server learns that the reader has gone")
    page.reload()
    page.wait_for_selector(f"{LAST} p:text-is('Partly')")


def test_a_page_closed_in_mid_answer_has_kept_the_question(context: Any, page: Any, server: FakeServer) -> None:
    server.answers = [[said("Partly"), WAIT]]
    ask(page, "Go")
    page.wait_for_selector(f"{LAST}.running p:text-is('Partly')")
    other = context.new_page()
    other.goto(page.url)
    other.wait_for_selector(".said:text-is('Go')")
    page.close(run_before_unload=False)
    until(lambda: server.given_up == 1, "the server learns that the reader has gone")


def test_editing_a_message_makes_a_branch(page: Any, server: FakeServer) -> None:
    server.answers = [[said(text), *ended()] for text in ("A1", "A2", "B1")]
    ask(page, "One")
    answered(page, "A1")
    ask(page, "Two")
    answered(page, "A2")
    page.locator(".own").first.hover()
    page.locator(".own").first.get_by_label("Edit").click()
    assert page.input_value(".editor") == "One"
    page.fill(".editor", "Other")
    page.press(".editor", "Enter")
    answered(page, "B1")
    assert asked(server) == ["user: Other"]
    assert shown(page) == ["Other", "B1"]
    assert page.inner_text(".own .branches") == "2/2"
    page.click(".own [aria-label='Previous version']")
    page.wait_for_selector(".own .branches:has-text('1/2')")
    assert shown(page) == ["One", "A1", "Two", "A2"]
    page.reload()
    page.wait_for_selector(".own .branches:has-text('1/2')")
    assert shown(page) == ["One", "A1", "Two", "A2"]


def test_answering_again_makes_a_branch_that_goes_on_from_its_own_answer(page: Any, server: FakeServer) -> None:
    server.answers = [[said(text), *ended()] for text in ("A", "B", "C")]
    ask(page, "Q")
    answered(page, "A")
    page.click(f"{LAST} [aria-label='Answer again']")
    answered(page, "B")
    assert asked(server) == ["user: Q"]
    assert page.inner_text(f"{LAST} .branches") == "2/2"
    page.click(f"{LAST} [aria-label='Previous version']")
    page.wait_for_selector(f"{LAST} p:text-is('A')")
    ask(page, "More")
    answered(page, "C")
    assert asked(server) == ["user: Q", "assistant: A", "user: More"]


def test_an_edited_answer_is_what_the_model_is_shown(page: Any, server: FakeServer) -> None:
    ask(page, "Q")
    answered(page, "Hello.")
    page.click(f"{LAST} [aria-label='Edit']")
    page.fill(".editor", "My words.")
    page.click("text=Save")
    page.wait_for_selector(f"{LAST} p:text-is('My words.')")
    ask(page, "More")
    until(lambda: len(server.requests) == 2, "the second request")
    assert asked(server) == ["user: Q", "assistant: My words.", "user: More"]


def test_thoughts_are_open_while_they_come_and_fold_then(page: Any, server: FakeServer) -> None:
    server.answers = [[thought("Let me *see*."), WAIT, said("Done."), *ended()]]
    ask(page, "Q")
    page.wait_for_selector(".thoughts[open] em:text-is('see')")
    assert page.inner_text(".thoughts summary").startswith("Thinking")
    page.wait_for_timeout(150)
    server.resume()
    answered(page, "Done.")
    page.wait_for_selector(".thoughts:not([open])")
    assert page.inner_text(".thoughts summary").startswith("Thought for ")
    page.click(".thoughts summary")
    page.wait_for_selector(".thoughts em:visible")


def test_the_prompts_progress_is_shown(page: Any, server: FakeServer) -> None:
    server.answers = [[progress(2048, 8192), WAIT, said("Done."), *ended()]]
    ask(page, "Q")
    page.wait_for_selector(".status:has-text('Reading the prompt: 2,048 of 8,192 tokens')")
    assert page.get_attribute(".status .line-part", "width") == "250"
    server.resume()
    answered(page, "Done.")
    assert not page.is_visible(".status")


def test_a_running_answer_shows_its_speed(page: Any, server: FakeServer) -> None:
    server.answers = [[said("Slow"), speed(12, 3.5), WAIT, said("ly."), *ended()]]
    ask(page, "Q")
    page.wait_for_selector(f"{LAST}.running footer .counts:has-text('3.5 tokens/s'):has-text('12 tokens')")
    assert page.evaluate(f"getComputedStyle(document.querySelector('{LAST} footer .counts')).opacity") == "1"
    server.resume()
    answered(page, "Slowly.")
    assert "48.3 tokens/s" in page.inner_text(f"{LAST} footer .counts")


def test_two_chats_are_answered_at_once(page: Any, server: FakeServer) -> None:
    server.answers = [[said("Slow"), WAIT, said("ly."), *ended()], [said("Quick."), *ended()]]
    ask(page, "First")
    page.wait_for_selector(f"{LAST}.running p:text-is('Slow')")
    page.keyboard.press("Control+k")
    ask(page, "Second")
    answered(page, "Quick.")
    page.click(".chat-name:text-is('First')")
    page.wait_for_selector(f"{LAST}.running p:text-is('Slow')")
    server.resume()
    answered(page, "Slowly.")


def test_the_view_follows_the_answer_unless_the_reader_scrolls(page: Any, server: FakeServer) -> None:
    long = "\n\n".join(f"Line {i}" for i in range(60))
    server.answers = [[said(long), WAIT, said(f"\n\n{long}\n\nmiddle"), WAIT, said(f"\n\n{long}\n\nend"), *ended()]]
    at_end = """() => { const scroll = document.getElementById("scroll");
      return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 2; }"""
    ask(page, "Q")
    page.wait_for_selector("p:text-is('Line 59')")
    page.wait_for_function(at_end)
    server.resume()
    page.wait_for_selector("p:text-is('middle')")
    page.wait_for_function(at_end)
    page.hover("#thread")
    page.mouse.wheel(0, -800)
    page.wait_for_selector("#to-end.shown")
    before = page.evaluate("document.getElementById('scroll').scrollTop")
    server.resume()
    page.wait_for_selector("p:text-is('end')")
    page.wait_for_selector("#send:visible")
    assert page.evaluate("document.getElementById('scroll').scrollTop") == before
    page.click("#to-end button")
    page.wait_for_function(at_end)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_refusal_is_shown_in_the_servers_words_and_can_be_tried_again(page: Any, server: FakeServer) -> None:
    words = "the prompt has 40,000 tokens, and the context 32,768"
    server.answers = [JSONResponse({"error": {"message": words, "type": "invalid_request_error"}}, 400),
                      [said("Now."), *ended()]]
    ask(page, "Q")
    page.wait_for_selector(f".problem:has-text('{words}')")
    page.click("text=Try again")
    answered(page, "Now.")


@pytest.mark.parametrize(("piece", "words"), [
    ({"error": {"message": "the model file is gone"}}, "the model file is gone"),
    ("data: {broken\n\n", "The page failed"),
])
def test_an_error_in_mid_answer_keeps_the_text(page: Any, server: FakeServer, piece: Any, words: str) -> None:
    server.answers = [[said("So far"), piece]]
    ask(page, "Q")
    page.wait_for_selector(f".problem:has-text('{words}')")
    assert shown(page) == ["Q", "So far"]
    page.reload()
    page.wait_for_selector(f".problem:has-text('{words}')")


def test_a_limit_is_named(page: Any, server: FakeServer) -> None:
    server.answers = [[said("Cut"), *ended("length")]]
    ask(page, "Q")
    page.wait_for_selector(".problem.mild:has-text('The answer reached its limit of tokens.')")


def test_a_server_that_is_gone(page: Any, context: Any) -> None:
    context.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "Q")
    page.wait_for_selector(".problem:has-text('The server does not answer')")


def test_a_key_is_asked_for_kept_and_sent(context: Any, server: FakeServer, address: str) -> None:
    server.key = "secret"
    page = context.new_page()
    page.goto(address)
    page.click("#toast button:text-is('Enter the key')")
    page.keyboard.type("secret")
    page.keyboard.press("Tab")
    page.wait_for_selector("#model option", state="attached")
    ask(page, "Q")
    answered(page, "Hello.")
    assert server.keys[-1] == "Bearer secret"
    page.reload()
    page.wait_for_selector("#model option", state="attached")


def test_a_server_that_tells_less_is_enough(page: Any, server: FakeServer) -> None:
    server.answers = [[said("Fine."), {"choices": [{"delta": {}, "finish_reason": "stop"}]}]]
    for properties in (None, {}, {"plan": None, "experts": None, "n_ctx": None, "loaded": False},
                       {"plan": [{}], "experts": {}}, {"default_generation_settings": {"n_ctx": 100}}):
        server.properties = properties
        page.goto(page.url.partition("#")[0])
        page.reload()
        page.click("#settings")
        ask(page, "Q")
        answered(page, "Fine.")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_sent_if_they_are_given(page: Any, server: FakeServer) -> None:
    ask(page, "Q")
    answered(page, "Hello.")
    names = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed", "chat_template_kwargs")
    assert not any(name in server.requests[-1] for name in names)
    page.keyboard.press("Control+,")
    for name, value in (("temperature", "0.5"), ("top_k", "40"), ("top_p", "1.5"), ("max_tokens", "7"), ("seed", "3")):
        page.fill(f"#{name}", value)
    page.fill("#system", "Be brief.")
    page.select_option("#thinking", "off")
    assert page.get_attribute("#top_p", "aria-invalid") == "true"
    page.reload()
    page.select_option("#model", "SmolLM2-135M")
    ask(page, "More")
    answered(page, "Hello.")
    sent = server.requests[-1]
    assert (sent["temperature"], sent["top_k"], sent["max_tokens"], sent["seed"]) == (0.5, 40, 7, 3)
    assert "top_p" not in sent and "min_p" not in sent
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert asked(server)[0] == "system: Be brief."
    assert sent["model"] == "SmolLM2-135M"


def test_the_models_pictures(page: Any) -> None:
    page.click("#settings")
    bar = page.wait_for_selector(".plan-bar")
    assert bar.get_attribute("aria-label") == (
        "Where the model is: in VRAM 11.2 GiB, in RAM, with slots in VRAM 5.1 GiB, in RAM, computed by the CPU 1.4 GiB")
    widths = [round(rect.bounding_box()["width"]) for rect in bar.query_selector_all("rect")]
    assert widths == sorted(widths, reverse=True) and len(widths) == 3
    assert page.get_attribute(".ring svg", "aria-label") == "expert hit rate: 94 %"
    assert page.get_attribute(".meter svg", "aria-label") == "Answers under way: 1 of 4"
    assert page.get_attribute("#top_k", "placeholder") == "40"
    assert page.get_attribute("#seed", "placeholder") == "default"


# --- chats ------------------------------------------------------------------------------------------------------------


def names(page: Any) -> list[str]:
    return [name.strip() for name in page.locator(".chat-name").all_inner_texts()]


def test_chats_are_searched_renamed_and_deleted(page: Any, server: FakeServer) -> None:
    server.answers = [[said("Paris."), *ended()], [said("Berlin."), *ended()]]
    ask(page, "France")
    answered(page, "Paris.")
    page.click("#new")
    assert page.is_visible(".welcome")
    ask(page, "Germany")
    answered(page, "Berlin.")
    assert names(page) == ["Germany", "France"]
    page.fill("#search", "paris")
    assert names(page) == ["France"]
    page.fill("#search", "")
    page.dblclick(".chat-name:text-is('France')")
    page.fill("#chats input", "Capitals")
    page.press("#chats input", "Enter")
    assert sorted(names(page)) == ["Capitals", "Germany"]
    page.hover(".chat-name:text-is('Germany')")
    page.locator("#chats li", has_text="Germany").get_by_label("Delete").click()
    assert names(page) == ["Capitals"]
    page.click("#toast button:text-is('Undo')")
    page.hover(".chat-name:text-is('Germany')")
    page.locator("#chats li", has_text="Germany").get_by_label("Delete").click()
    page.reload()
    page.wait_for_selector(".chat-name:text-is('Capitals')")
    assert names(page) == ["Capitals"]


def test_a_chat_deleted_in_mid_answer_does_not_come_back(page: Any, server: FakeServer) -> None:
    server.answers = [[said("Partly"), WAIT]]
    ask(page, "Gone")
    page.wait_for_selector(f"{LAST}.running p:text-is('Partly')")
    page.hover(".chat-name")
    page.locator("#chats li").get_by_label("Delete").click()
    until(lambda: server.given_up == 1, "the server learns that the reader has gone")
    page.wait_for_selector(".welcome")
    page.reload()
    page.wait_for_selector("#chats p")
    assert names(page) == []


def test_another_tab_sees_the_chats(context: Any, page: Any, address: str) -> None:
    other = context.new_page()
    other.goto(address)
    ask(page, "Here")
    answered(page, "Hello.")
    other.wait_for_selector(".chat-name:text-is('Here')")


def exported(page: Any, button: str, folder: Path) -> str:
    with page.expect_download() as download:
        page.click(f"text={button}")
    download.value.save_as(folder / download.value.suggested_filename)
    return (folder / download.value.suggested_filename).read_text(encoding="utf-8")


def test_chats_are_exported_and_imported(context: Any, page: Any, server: FakeServer, tmp_path: Path) -> None:
    server.answers = [[thought("Hm."), said("# A\n\n`b`"), *ended()]]
    ask(page, "What is this?")
    page.wait_for_selector("#send:visible")
    page.wait_for_selector(f"{LAST}:not(.running) h2")
    page.click("#settings")
    assert exported(page, "This chat as Markdown", tmp_path) == (
        "# What is this?\n\n## You\n\nWhat is this?\n\n## Qwen3-30B-A3B-Q4_K_M\n\n"
        "<details>\n<summary>Thoughts</summary>\n\nHm.\n\n</details>\n\n# A\n\n`b`\n")
    text = exported(page, "All chats as JSON", tmp_path)
    page.hover(".chat-name")
    page.locator("#chats li").get_by_label("Delete").click()
    page.wait_for_selector(".welcome")
    with page.expect_file_chooser() as chooser:
        page.click("text=Import JSON")
    chooser.value.set_files(tmp_path / "sharpi-chats.json")
    page.click(".chat-name:text-is('What is this?')")
    page.wait_for_selector(f"{LAST} h2:text-is('A')")
    [before], [after] = (json.loads(each)["chats"] for each in (text, exported(page, "All chats as JSON", tmp_path)))
    assert (after["id"], after["title"]) == (before["id"], before["title"])
    assert [each["text"] for each in after["messages"]] == [each["text"] for each in before["messages"]]


def message(**fields: Any) -> dict[str, Any]:
    return {"id": "1", "parent": "", "role": "user", "text": "a", **fields}


@pytest.mark.parametrize("chats", [
    "no JSON", {}, [1], [{"id": "a b", "messages": [], "chosen": {}}], [{"id": "a", "messages": [], "chosen": None}],
    [{"id": "a", "messages": [message(text=1)], "chosen": {}}],
    [{"id": "a", "messages": [message(role="system")], "chosen": {}}],
    [{"id": "a", "messages": [message(parent="1")], "chosen": {"": "1", "1": "1"}}],
    [{"id": "a", "messages": [message(), message()], "chosen": {}}],
])
def test_a_file_that_is_no_export_is_refused(lasting_page: Any, tmp_path: Path, chats: Any) -> None:
    page = lasting_page
    page.reload()
    file = tmp_path / "chats.json"
    file.write_text(chats if isinstance(chats, str) else json.dumps({"chats": chats}), encoding="utf-8")
    page.click("#settings")
    page.set_input_files("#panel input[type=file]", file)
    page.wait_for_selector("#toast:has-text('Nothing was imported')")
    assert names(page) == []


# --- the page itself --------------------------------------------------------------------------------------------------


PARSE = """() => {
  try { document.body.insertAdjacentHTML("beforeend", "<b>x</b>"); } catch (error) { return error.name; }
  return "parsed";
}"""


def test_the_policy_holds_and_the_watch_sees_what_leaves_the_origin(browser: Any, address: str) -> None:
    """The watch of every other test fails a test in which something is wrong."""
    watch = Watch(address)
    page = browser.new_page()
    watch.on(page)
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")
    assert not watch.wrong
    page.evaluate("fetch('http://127.0.0.2:9/').catch(() => {})")
    page.evaluate("document.body.append(Object.assign(document.createElement('style'), {textContent: 'a {}'}))")
    assert page.evaluate(PARSE) == "TypeError"
    until(lambda: page.wait_for_timeout(10) or len(watch.wrong) >= 3, "all three are seen")
    assert all("Content Security Policy" in found or "TrustedHTML" in found for found in watch.wrong)
    page.close()


def test_dark_and_light(page: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    assert light == "rgb(253, 252, 250)"
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => {colour} === 'rgb(25, 26, 25)'")
    page.click("#theme")
    assert page.evaluate(colour) == light
    page.reload()
    assert page.evaluate(colour) == light
    page.click("#theme")
    assert page.evaluate(colour) != light
    page.emulate_media(color_scheme="light")  # and the page follows it again
    page.wait_for_function(f"() => {colour} === '{light}'")


def test_a_phone(page: Any, server: FakeServer) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    code = "```py\n" + "x" * 200 + "\n```\n\n| " + " | ".join("column" for _ in range(12)) + " |\n|" + "---|" * 12
    server.answers = [[said(f"{'long' * 60}\n\n{code}"), *ended()]]
    assert not page.is_visible("#sidebar")
    ask(page, "w" * 300)
    page.wait_for_selector(f"{LAST}:not(.running) .table")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.evaluate("document.getElementById('scroll').scrollWidth <= 360")
    page.click("#menu")
    assert page.is_visible("#sidebar")
    page.click(".chat-name")
    page.wait_for_selector("#sidebar", state="hidden")
    page.click("#settings")
    page.wait_for_selector("#panel:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#panel", state="hidden")


def test_keys(page: Any, server: FakeServer) -> None:
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert not server.requests
    page.dispatch_event("#input", "keydown", {"key": "Enter", "isComposing": True})
    assert not server.requests and page.input_value("#input") == "one\ntwo"
    page.keyboard.press("Enter")
    answered(page, "Hello.")
    assert asked(server) == ["user: one\ntwo"]
    assert page.input_value("#input") == ""
    page.keyboard.press("ArrowUp")
    assert page.input_value(".editor") == "one\ntwo"
    page.keyboard.press("Escape")
    page.wait_for_selector(".editor", state="detached")
    page.keyboard.press("Control+b")
    assert not page.is_visible("#sidebar")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    page.keyboard.type("x")
    assert page.input_value("#input") == "x"


def test_everything_that_can_be_pressed_has_a_name_and_can_be_reached(page: Any) -> None:
    ask(page, "Q")
    answered(page, "Hello.")
    page.click("#settings")
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")]
      .filter((each) => each.checkVisibility())
      .filter((each) => !each.getAttribute("aria-label") && !each.textContent.trim() && !each.labels?.length)
      .map((each) => each.outerHTML)""")
    assert nameless == []
    page.focus("#search")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.id"))
    assert {"Rename", "Delete", "Copy", "Edit", "Answer again", "thinking", "Send"} <= reached


def test_what_is_written_and_not_sent_survives_a_reload(page: Any) -> None:
    page.fill("#input", "half a thought")
    page.reload()
    assert page.input_value("#input") == "half a thought"


def test_copying(page: Any, context: Any, server: FakeServer) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    server.answers = [[said("See:\n\n```py\nx = 1\n```"), *ended()]]
    ask(page, "Q")
    page.wait_for_selector(f"{LAST}:not(.running) figure")
    page.click("figure [aria-label='Copy the code']")
    page.wait_for_selector("figure [aria-label='Copied']")
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.click(f"{LAST} footer [aria-label='Copy']")
    page.wait_for_selector(f"{LAST} footer [aria-label='Copied']")
    assert page.evaluate("navigator.clipboard.readText()") == "See:\n\n```py\nx = 1\n```"
