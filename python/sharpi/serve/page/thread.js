// Shows the messages of a chat. A message keeps its view while it is on the shown path, so an answer that grows changes
// its own elements alone.

import { path, siblings } from "./conversation.js";
import { copyFrom, el, iconButton, seconds, whole } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { line } from "./pictures.js";

const NEAR = 60; // pixels from the end at which the view follows the answer

export class Thread {
  #views = new Map();
  #chat = null;
  #follows = true;

  /** actions: edit(message, text), again(message), show(message), and settings() for a key that is missing. */
  constructor(scroll, element, actions, following) {
    this.scroll = scroll;
    this.element = element;
    this.actions = actions;
    scroll.addEventListener("scroll", () => {
      this.#follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
      following(this.#follows);
    }, { passive: true });
    new ResizeObserver(() => this.toEnd(this.#follows)).observe(scroll);
  }

  /** running: the message of this chat that is being answered, if one is. */
  show(chat, running, empty) {
    if (chat?.id !== this.#chat?.id) {
      this.#views.clear();
      this.#follows = true;
    }
    this.#chat = chat;
    const shown = chat ? path(chat) : [];
    const views = shown.map((message) => this.#view(message));
    this.#views = new Map(views.map((view) => [view.message.id, view]));
    const elements = views.length ? views.map((view) => view.element) : [empty];
    const same = elements.length === this.element.children.length
      && elements.every((element, index) => element === this.element.children[index]);
    if (!same) this.element.replaceChildren(...elements);
    for (const view of views) view.update(chat, view.message === running);
    this.toEnd(this.#follows);
  }

  /** Shows what has changed in one message. */
  update(message, running) {
    this.#views.get(message.id)?.update(this.#chat, running);
    this.toEnd(this.#follows);
  }

  toEnd(wanted = true) {
    if (!wanted) return;
    this.#follows = true;
    this.scroll.scrollTop = this.scroll.scrollHeight;
  }

  /** Opens the last message of the reader's for editing. */
  editLast() {
    [...this.#views.values()].findLast(({ message }) => message.role === "user")?.edit();
  }

  #view(message) {
    const known = this.#views.get(message.id);
    return known?.message === message ? known : new MessageView(message, this.actions);
  }
}

class MessageView {
  #shown = "";
  #handled = false;

  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    const own = message.role === "user";
    this.body = el("div", { class: own ? "said" : "markdown" });
    this.folded = el("details", { class: "thoughts", hidden: true },
      el("summary", { onclick: () => (this.#handled = true) }, el("span")), el("div", { class: "markdown" }));
    this.status = el("div", { class: "status", hidden: true });
    this.problem = el("div", { class: "problem", role: "alert", hidden: true });
    this.footer = el("footer");
    this.element = el("article", { class: `message ${own ? "own" : "answer"}`, "aria-label": own ? "You" : "Answer" },
      !own && this.folded, !own && this.status, this.body, !own && this.problem, this.footer);
  }

  update(chat, running) {
    const { message } = this;
    if (message.role === "user") this.body.textContent = message.text;
    else this.#showAnswer(running);
    const family = siblings(chat, message);
    // A footer that is replaced loses the focus, so it is made anew only if it says something else.
    const figures = running ? message.counts?.rate : message.counts;
    const says = JSON.stringify([running, family.length, message.state, figures]);
    if (says !== this.#shown) this.footer.replaceChildren(...this.#foot(family, running));
    this.#shown = says;
  }

  #showAnswer(running) {
    const { message } = this;
    showMarkdown(this.body, message.text);
    this.element.classList.toggle("running", running);
    this.folded.hidden = !message.thoughts;
    const thinking = running && message.state === "thinking";
    if (message.thoughts) {
      const [summary, inside] = this.folded.children;
      const time = message.thoughtMs >= 100 ? ` for ${seconds(message.thoughtMs)}` : "";
      summary.firstChild.textContent = `${thinking ? "Thinking" : "Thought"}${time}`;
      summary.classList.toggle("pulse", thinking);
      showMarkdown(inside, message.thoughts);
      if (!this.#handled) this.folded.open = thinking;
    }
    this.#showStatus(running && message.state === "reading");
    this.#showProblem(running);
  }

  #showStatus(reading) {
    this.status.hidden = !reading;
    if (!reading) return;
    const { processed, total } = this.message.progress ?? {};
    if (total > 0) {
      const words = `Reading the prompt: ${whole(processed)} of ${whole(total)} tokens`;
      this.status.replaceChildren(el("span", {}, words), line(processed / total, words));
    } else if (!this.status.firstChild) {
      this.status.append(el("span", { class: "pulse" }, "Waiting for the first token"));
    }
  }

  #showProblem(running) {
    const { message } = this;
    const words = running ? "" : { failed: message.error, length: "The answer reached its limit of tokens.",
      stopped: message.text || message.thoughts ? "" : "Stopped.", reading: "Interrupted.", thinking: "Interrupted.",
      writing: "Interrupted." }[message.state] ?? "";
    this.problem.hidden = !words;
    this.problem.classList.toggle("mild", message.state !== "failed");
    if (!words) return;
    const failed = message.state === "failed";
    const keyless = failed && message.status === 401;
    const button = (label, onclick) => el("button", { type: "button", onclick }, label);
    this.problem.replaceChildren(el("span", {}, words),
      ...(keyless ? [button("Enter the key", () => this.actions.settings())] : []),
      ...(failed ? [button("Try again", () => this.actions.again(message))] : []));
  }

  #foot(family, running) {
    const { message, actions } = this;
    if (running) return message.counts?.rate ? [el("span", { class: "counts" }, this.#counts())] : [];
    const at = family.indexOf(message);
    const version = `Version ${at + 1} of ${family.length}`;
    const go = (index) => () => actions.show(family[index]);
    const copy = iconButton("copy", "Copy", () => copyFrom(copy, message.text));
    return [
      family.length > 1 && el("span", { class: "branches" },
        iconButton("left", "Previous version", go(at - 1), { disabled: at === 0 }),
        el("span", { class: "figure", "aria-label": version }, `${at + 1}/${family.length}`),
        iconButton("right", "Next version", go(at + 1), { disabled: at === family.length - 1 })),
      el("span", { class: "actions" }, copy,
        iconButton("pencil", "Edit", () => this.edit()),
        message.role === "assistant" && iconButton("again", "Answer again", () => actions.again(message))),
      message.role === "assistant" && el("span", { class: "counts" }, this.#counts()),
    ].filter(Boolean);
  }

  #counts() {
    const { counts = {}, firstMs, model } = this.message;
    const cached = counts.cached ? ` (${whole(counts.cached)} cached)` : "";
    const parts = [
      model,
      counts.rate && `${counts.rate.toFixed(1)} tokens/s`,
      counts.tokens && `${whole(counts.tokens)} tokens`,
      counts.prompt && `prompt ${whole(counts.prompt)}${cached}`,
      firstMs && `first token after ${seconds(firstMs)}`,
    ];
    return parts.filter(Boolean).map((part) => el("span", {}, part));
  }

  /** A reader's message is sent anew as a branch; an answer is kept as a branch that the reader has worded. */
  edit() {
    const own = this.message.role === "user";
    const label = own ? "Edit the message" : "Edit the answer";
    const area = el("textarea", { class: "editor", "aria-label": label, rows: 2 });
    area.value = this.message.text;
    const close = () => {
      form.replaceWith(this.body);
      this.footer.hidden = false;
    };
    const form = el("form", { class: "editing", onsubmit: (event) => {
      event.preventDefault();
      const text = area.value.trim();
      close();
      if (text && text !== this.message.text) this.actions.edit(this.message, text);
    } }, area, el("div", { class: "row" },
      el("button", { type: "button", onclick: close }, "Cancel"),
      el("button", { type: "submit", class: "main" }, own ? "Send" : "Save")));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && own) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.body.replaceWith(form);
    this.footer.hidden = true;
    area.focus();
  }
}
