// The list of kept chats: search, rename, delete with a way back.

import { matches } from "./conversation.js";
import { el, iconButton } from "./dom.js";

const DAY = 86_400_000;

export class Sidebar {
  #chats = [];
  #current = "";
  #running = () => false;
  #items = new Map();
  #renaming = false;

  /** actions: open(id), rename(chat, title), remove(chat). running(id): whether a chat is being answered. */
  constructor(element, search, actions, running) {
    this.element = element;
    this.search = search;
    this.actions = actions;
    this.#running = running;
    search.addEventListener("input", () => this.show(this.#chats, this.#current));
  }

  show(chats, current) {
    this.#chats = chats;
    this.#current = current;
    // An element that is moved loses the focus, and with it the name that the reader is writing.
    if (this.#renaming) return;
    const wanted = this.search.value;
    const found = wanted.trim() ? chats.filter((chat) => matches(chat, wanted)) : chats;
    const sections = [...grouped(found)].map(([name, members]) =>
      el("section", {}, el("h2", {}, name), el("ul", {}, members.map((chat) => this.#item(chat)))));
    const words = wanted.trim() ? "No chat has these words." : "No chats yet.";
    const focused = this.element.contains(document.activeElement) ? document.activeElement : null;
    this.element.replaceChildren(...(sections.length ? sections : [el("p", { class: "quiet small" }, words)]));
    if (focused?.isConnected) focused.focus();
  }

  // An item is kept while its title is the same: what the reader is about to press does not change below the pointer.
  #item(chat) {
    const title = chat.title || "New chat";
    const known = this.#items.get(chat.id);
    const item = known?.chat === chat && known.title === title ? known.element : this.#newItem(chat, title);
    this.#items.set(chat.id, { chat, title, element: item });
    const here = chat.id === this.#current;
    item.classList.toggle("here", here);
    item.classList.toggle("running", this.#running(chat.id));
    if (here) item.firstChild.setAttribute("aria-current", "page");
    else item.firstChild.removeAttribute("aria-current");
    return item;
  }

  #newItem(chat, title) {
    const name = el("button", { type: "button", class: "chat-name", title, onclick: () => this.actions.open(chat.id) },
      title);
    const item = el("li", {}, name, el("span", { class: "actions" },
      iconButton("pencil", "Rename", () => this.#rename(item, chat)),
      iconButton("bin", "Delete", () => this.actions.remove(chat))));
    name.addEventListener("dblclick", () => this.#rename(item, chat));
    return item;
  }

  #rename(item, chat) {
    const field = el("input", { type: "text", "aria-label": "Name of the chat", maxlength: 200 });
    field.value = chat.title;
    this.#renaming = true;
    const end = (keep) => {
      if (!this.#renaming) return;
      this.#renaming = false;
      if (keep && field.value.trim()) this.actions.rename(chat, field.value.trim());
      this.#items.delete(chat.id);
      this.show(this.#chats, this.#current);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      else if (event.key === "Escape") end(false);
      event.stopPropagation();
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.select();
  }
}

function age({ changed }) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (changed >= today) return "Today";
  if (changed >= today - DAY) return "Yesterday";
  return changed >= today - 7 * DAY ? "The last week" : "Earlier";
}

function grouped(chats) {
  const groups = new Map();
  for (const chat of chats) groups.set(age(chat), [...(groups.get(age(chat)) ?? []), chat]);
  return groups;
}
