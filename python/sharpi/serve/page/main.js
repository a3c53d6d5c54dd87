// Puts the page together: which chat is open, what a press of a key does, and who is told when something changes.

import { models, properties, slots } from "./api.js";
import { Answers } from "./answers.js";
import { add, asMarkdown, choose, fromExport, newChat, path } from "./conversation.js";
import { download, el, iconButton, replaceIcon, whole } from "./dom.js";
import { Panel, bindThinking, requestFields, settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { allChats, deleteChat, onOtherTabs, remember, remembered, saveChat } from "./storage.js";
import { Thread } from "./thread.js";

const at = (id) => document.getElementById(id);
const input = at("input");
const model = at("model");
const narrow = matchMedia("(max-width: 800px)");

let chats = [];
let chat = null; // the open one; it is stored with its first message
let facts = null; // what the server says of the model

// --- the parts -------------------------------------------------------------------------------------------------------

const answers = new Answers((changed, message) => {
  const running = answers.message(changed.id) === message;
  if (changed === chat) frame(() => thread.update(message, running));
  if (running && message.state !== "reading") return;
  if (changed === chat) frame(showChat);
  if (!running) ended(message);
  showChats();
});

const toEnd = iconButton("down", "To the end", () => thread.toEnd());
const thread = new Thread(at("scroll"), at("thread"), {
  edit, again, show: (message) => {
    choose(chat, message);
    keep();
    showChat();
  }, settings: () => {
    togglePanel(true);
    panel.focusKey();
  },
}, (follows) => at("to-end").classList.toggle("shown", !follows));

const sidebar = new Sidebar(at("chats"), at("search"), {
  open: (id) => {
    location.hash = id;
    if (narrow.matches) toggleSidebar(false);
  },
  rename: async (renamed, title) => {
    const own = answers.chat(renamed.id) ?? (renamed.id === chat.id ? chat : renamed);
    own.title = title;
    await store(own);
  },
  remove,
}, (id) => Boolean(answers.chat(id)));

const panel = new Panel(at("panel"), {
  close: () => togglePanel(false),
  exportChat: (type) => {
    if (!chat.messages.length) return say("This chat is empty.");
    if (type === "json") exportJson(fileName(chat.title), [chat]);
    else download(`${fileName(chat.title)}.md`, "text/markdown", asMarkdown(chat));
  },
  exportAll: () => exportJson("sharpi-chats", chats),
  importFile: async (file) => {
    try {
      const found = fromExport(await file.text());
      for (const each of found) await saveChat(each);
      await reload();
      say(`${whole(found.length)} ${found.length === 1 ? "chat was" : "chats were"} imported.`);
    } catch (error) {
      say(`Nothing was imported: ${error.message}.`);
    }
  },
  keyChanged: connect,
});

const send = iconButton("send", "Send", null, { id: "send", type: "submit", class: "icon-button main" });
const stop = iconButton("stop", "Stop", () => answers.stop(chat.id), { id: "stop", class: "icon-button main" });
const theme = iconButton("moon", "Dark", changeTheme, { id: "theme" });

at("to-end").append(toEnd);
at("composer-buttons").append(stop, send);
at("sidebar-buttons").append(iconButton("plus", "New chat (Ctrl+K)", openNew, { id: "new" }),
  iconButton("close", "Hide the chats", () => toggleSidebar(false), { class: "icon-button narrow" }));
at("bar-left").append(iconButton("menu", "Chats (Ctrl+B)", () => toggleSidebar(), { id: "menu" }));
at("bar-right").append(iconButton("plus", "New chat", openNew, { class: "icon-button narrow" }), theme,
  iconButton("sliders", "Settings (Ctrl+,)", () => togglePanel(), { id: "settings" }));
at("shade").addEventListener("click", () => {
  toggleSidebar(false);
  togglePanel(false);
});
bindThinking(at("thinking"));

// --- showing ---------------------------------------------------------------------------------------------------------

// A burst of pieces is drawn once, before the next picture of the screen.
const waiting = new Map();

function frame(work) {
  if (!waiting.size) requestAnimationFrame(draw);
  waiting.set(work === showChat ? "chat" : "message", work);
}

function draw() {
  const works = [...waiting.values()];
  waiting.clear();
  for (const work of works) work();
}

function showChat() {
  const running = answers.message(chat.id);
  thread.show(chat, running, welcome());
  stop.hidden = !running;
  send.hidden = Boolean(running);
  const shown = path(chat);
  const last = shown.findLast((message) => message.counts?.prompt)?.counts;
  // The last token of an answer that fills the context is not in it.
  const used = Math.min(last?.prompt + (last?.tokens ?? 0), facts?.n_ctx);
  at("context").textContent = used >= 0 ? `${whole(used)} of ${whole(facts.n_ctx)} tokens` : "";
  document.title = chat.title ? `${chat.title} · Sharpi` : "Sharpi";
}

function welcome() {
  return el("div", { class: "welcome" }, el("h1", {}, "What is on your mind?"),
    el("p", { class: "quiet" }, model.value ? `${model.value} answers on your own machine.`
      : "The model answers on your own machine."));
}

function showChats() {
  sidebar.show(chats, chat.id);
}

let toastTimer = 0;

function say(words, action = null) {
  const toast = at("toast");
  toast.replaceChildren(el("span", {}, words), ...(action ? [action] : []));
  toast.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (toast.hidden = true), 6000);
}

function ended(message) {
  at("spoken").textContent = { failed: `The answer failed: ${message.error}`, stopped: "The answer was stopped." }[
    message.state] ?? "The answer is complete.";
  refreshFacts();
}

// --- chats -----------------------------------------------------------------------------------------------------------

async function reload() {
  const stored = await allChats().catch(() => {
    say("This browser keeps no data for this page, so chats are lost when it closes.");
    return chats;
  });
  chats = stored.map((each) => answers.chat(each.id) ?? (isOpen(each) ? chat : each));
  const again = chats.find(({ id }) => id === chat?.id);
  if (again) chat = again;
  if (chat) {
    showChats();
    showChat();
  }
}

/** Whether this is the open chat, unless another tab has written to it since. */
function isOpen(stored) {
  return stored.id === chat?.id && stored.changed <= chat.changed;
}

async function store(changed) {
  if (!chats.includes(changed)) chats.unshift(changed);
  chats.sort((a, b) => b.changed - a.changed);
  showChats();
  if (changed === chat) showChat();
  await saveChat(changed).catch(() => say("This browser could not keep the chat."));
}

function keep() {
  return store(chat);
}

function openNew() {
  if (location.hash.length > 1) location.hash = "";
  else open("");
  if (narrow.matches) toggleSidebar(false);
  input.focus();
}

function open(id) {
  chat = chats.find((each) => each.id === id) ?? newChat();
  showChat();
  thread.toEnd();
  showChats();
}

async function remove(gone) {
  answers.drop(gone.id);
  chats = chats.filter(({ id }) => id !== gone.id);
  if (gone.id === chat.id) openNew();
  showChats();
  await deleteChat(gone.id).catch(() => {});
  say(`“${gone.title || "New chat"}” was deleted.`, el("button", { type: "button", onclick: async () => {
    at("toast").hidden = true;
    await store(gone);
    location.hash = gone.id;
  } }, "Undo"));
}

function exportJson(name, exported) {
  download(`${name}.json`, "application/json", JSON.stringify({ chats: exported }, null, 1));
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}

// --- asking ----------------------------------------------------------------------------------------------------------

async function ask(text, parent) {
  const asked = add(chat, parent, { role: "user", text });
  await keep();
  // The chat has an address once it has a message. Replaced, so that going back does not lead to an empty chat.
  if (location.hash !== `#${chat.id}`) history.replaceState(null, "", `#${chat.id}`);
  answer(asked);
}

function answer(asked) {
  thread.toEnd();
  answers.start(chat, asked, { model: model.value, system: settings().system, fields: requestFields() });
}

function edit(message, text) {
  if (answers.chat(chat.id)) return say("Wait for the answer, or stop it first.");
  if (message.role === "user") return ask(text, message.parent);
  const { model: by, thoughts } = message;
  add(chat, message.parent, { role: "assistant", text, model: by, thoughts, state: "done" });
  return keep();
}

function again(message) {
  if (answers.chat(chat.id)) return say("Wait for the answer, or stop it first.");
  const asked = chat.messages.find(({ id }) => id === message.parent);
  return answer(asked);
}

function submit(event) {
  event?.preventDefault();
  const text = input.value.trim();
  if (!text || answers.chat(chat.id)) return;
  input.value = "";
  grow();
  ask(text, path(chat).at(-1)?.id ?? "");
}

// --- the server ------------------------------------------------------------------------------------------------------

async function connect() {
  try {
    const names = await models();
    const wanted = remembered("model", "");
    model.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
    if (names.includes(wanted)) model.value = wanted;
    model.hidden = !names.length;
  } catch (error) {
    model.hidden = true;
    say(error.message, error.status === 401 ? el("button", { type: "button", onclick: () => {
      togglePanel(true);
      panel.focusKey();
    } }, "Enter the key") : el("button", { type: "button", onclick: connect }, "Try again"));
  }
  await refreshFacts();
}

async function refreshFacts() {
  const name = model.value;
  const found = await Promise.all([properties(name), slots(name)]).catch(() => [null, null]);
  facts = found[0] && { ...found[0], n_ctx: found[0].n_ctx ?? found[0].default_generation_settings?.n_ctx };
  panel.show(name, facts, found[1]);
  showChat();
}

// --- settings, colours, keys -----------------------------------------------------------------------------------------

let panelTimer = 0;

function togglePanel(shown = at("panel").hidden) {
  at("panel").hidden = !shown;
  clearInterval(panelTimer);
  if (shown) {
    refreshFacts();
    panelTimer = setInterval(() => document.hidden || refreshFacts(), 3000);
  }
  shade();
}

function toggleSidebar(shown = at("sidebar").hidden) {
  at("sidebar").hidden = !shown;
  if (!narrow.matches) remember("sidebar", shown);
  shade();
}

function shade() {
  at("shade").hidden = !narrow.matches || (at("sidebar").hidden && at("panel").hidden);
}

const dark = matchMedia("(prefers-color-scheme: dark)");

function showTheme() {
  const chosen = remembered("theme", "");
  const isDark = chosen ? chosen === "dark" : dark.matches;
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  replaceIcon(theme, isDark ? "sun" : "moon", isDark ? "Light" : "Dark");
}

function changeTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  // What the system says anyway is not kept, so the page follows the system again.
  remember("theme", (next === "dark") === dark.matches ? "" : next);
  showTheme();
}

function grow() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
  remember("draft", input.value);
}

function onKey(event) {
  const writing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
  const control = event.ctrlKey || event.metaKey;
  const does = control ? { k: openNew, ",": () => togglePanel(), b: () => toggleSidebar() }[event.key.toLowerCase()]
    : event.key === "Escape" ? escape : event.key === "/" && !writing ? () => input.focus() : null;
  if (!does) return;
  event.preventDefault();
  does();
}

function escape() {
  if (answers.chat(chat.id)) answers.stop(chat.id);
  else if (!at("panel").hidden) togglePanel(false);
  else if (narrow.matches && !at("sidebar").hidden) toggleSidebar(false);
  else if (document.activeElement === at("search")) {
    at("search").value = "";
    showChats();
  }
}

function onInputKey(event) {
  // A key that ends a composition (of Chinese, say) does not send.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  else if (event.key === "ArrowUp" && !input.value) {
    event.preventDefault();
    thread.editLast();
  }
}

async function start() {
  showTheme();
  dark.addEventListener("change", showTheme);
  narrow.addEventListener("change", () => toggleSidebar(narrow.matches ? false : remembered("sidebar", true)));
  at("sidebar").hidden = narrow.matches || !remembered("sidebar", true);
  input.value = remembered("draft", "");
  grow();
  input.addEventListener("input", grow);
  input.addEventListener("keydown", onInputKey);
  at("composer").addEventListener("submit", submit);
  document.addEventListener("keydown", onKey);
  model.addEventListener("change", () => {
    remember("model", model.value);
    refreshFacts();
  });
  await reload();
  open(location.hash.slice(1));
  addEventListener("hashchange", () => open(location.hash.slice(1)));
  addEventListener("beforeunload", (event) => answers.count && event.preventDefault());
  onOtherTabs(reload);
  input.focus();
  await connect();
}

start();
