// The list of kept chats: search, rename, delete with a way back.

import { matches } from "./conversation.js";
import { el, iconButton } from "./dom.js";

const DAY = 86_400_000;

export class Sidebar {
  #chats = [];
  #current = "";
  #running = () => false;

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
    const wanted = this.search.value;
    const found = wanted.trim() ? chats.filter((chat) => matches(chat, wanted)) : chats;
    const groups = grouped(found);
    this.element.replaceChildren(...[...groups].map(([name, members]) =>
      el("section", {}, el("h2", {}, name), el("ul", {}, members.map((chat) => this.#item(chat))))));
    if (!found.length) {
      const words = wanted.trim() ? "No chat has these words." : "No chats yet.";
      this.element.append(el("p", { class: "quiet small" }, words));
    }
  }

  #item(chat) {
    const here = chat.id === this.#current;
    const title = chat.title || "New chat";
    const name = el("button", { type: "button", class: "chat-name", "aria-current": here && "page", title,
      onclick: () => this.actions.open(chat.id) }, title);
    const item = el("li", { class: `${here ? "here" : ""} ${this.#running(chat.id) ? "running" : ""}` }, name,
      el("span", { class: "actions" },
        iconButton("pencil", "Rename", () => this.#rename(item, chat)),
        iconButton("bin", "Delete", () => this.actions.remove(chat))));
    name.addEventListener("dblclick", () => this.#rename(item, chat));
    return item;
  }

  #rename(item, chat) {
    const field = el("input", { type: "text", "aria-label": "Name of the chat", maxlength: 200 });
    field.value = chat.title;
    let open = true;
    const end = (keep) => {
      if (!open) return;
      open = false;
      if (keep && field.value.trim()) this.actions.rename(chat, field.value.trim());
      else this.show(this.#chats, this.#current);
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
