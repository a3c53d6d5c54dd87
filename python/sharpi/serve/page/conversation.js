// A chat is a tree of messages. Editing a message or answering again adds a sibling, so nothing is lost; what is shown
// is the path that takes the chosen child at each message. Nothing here knows of the page or of the server.

export function newChat() {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", created: now, changed: now, messages: [],
    chosen: {} };
}

/** Adds a message below `parent` (an id, or "" for the first of a chat) and chooses it. */
export function add(chat, parent, message) {
  const made = { id: String(chat.messages.length + 1), parent, made: Date.now(), text: "", ...message };
  chat.messages.push(made);
  chat.chosen[parent] = made.id;
  chat.changed = made.made;
  if (!chat.title && made.role === "user") chat.title = titleOf(made.text);
  return made;
}

export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

export function siblings(chat, message) {
  return chat.messages.filter(({ parent }) => parent === message.parent);
}

export function choose(chat, message) {
  chat.chosen[message.parent] = message.id;
}

/** The messages that are shown. */
export function path(chat) {
  const shown = [];
  for (let at = child(chat, ""); at; at = child(chat, at.id)) shown.push(at);
  return shown;
}

function child(chat, parent) {
  return chat.messages.find((message) => message.parent === parent && message.id === chat.chosen[parent]);
}

/** The messages from the first to this one, which may be off the shown path. */
export function ancestry(chat, message) {
  const byId = new Map(chat.messages.map((each) => [each.id, each]));
  const found = [];
  for (let at = message; at; at = byId.get(at.parent)) found.unshift(at);
  return found;
}

/** What the server is sent: earlier thoughts stay here, as templates leave them out too. */
export function asPrompt(messages, system) {
  const said = messages.filter(({ role, text }) => role === "user" || text)
    .map(({ role, text }) => ({ role, content: text }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

export function matches(chat, words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [chat.title, ...chat.messages.map((message) => message.text)].join("\n").toLowerCase();
  return wanted.every((word) => text.includes(word));
}

export function asMarkdown(chat) {
  const parts = path(chat).map(({ role, text, thoughts, model }) => {
    const name = role === "user" ? "You" : model || "Assistant";
    const folded = thoughts ? `<details>\n<summary>Thoughts</summary>\n\n${thoughts.trim()}\n\n</details>\n\n` : "";
    return `## ${name}\n\n${folded}${text.trim()}\n`;
  });
  return `# ${chat.title || "Chat"}\n\n${parts.join("\n")}`;
}

/** The chats of a file that was exported here; an error that says what is wrong with it. */
export function fromExport(text) {
  const chats = JSON.parse(text)?.chats;
  if (!Array.isArray(chats) || !chats.every(isChat)) throw new Error("the file holds no chats that were exported here");
  return chats.map(({ id, title, created, changed, messages, chosen }) => ({ id, title: String(title ?? ""),
    created: Number(created) || 0, changed: Number(changed) || 0, chosen, messages: messages.map(known) }));
}

function isChat(chat) {
  return /^[\w.-]{1,100}$/.test(chat?.id) && Array.isArray(chat.messages) && chat.messages.every(isMessage)
    && typeof chat.chosen === "object" && chat.chosen !== null;
}

// A message comes after the one that it answers, so no path goes in a circle.
function isMessage(message, index) {
  const after = message?.parent === "" || (Number(message?.parent) >= 1 && Number(message?.parent) <= index);
  return after && message.id === String(index + 1) && typeof message.parent === "string"
    && typeof message.text === "string" && ["user", "assistant"].includes(message.role);
}

/** The fields that the page knows, each of its type. */
function known(message) {
  const { id, parent, role, text, thoughts, model, state, made, thoughtMs, counts } = message;
  const numbers = Object.entries(counts ?? {}).filter(([, value]) => Number.isFinite(value));
  return { id, parent, role, text, thoughts: String(thoughts ?? ""), model: String(model ?? ""),
    state: String(state ?? "done"), made: Number(made) || 0, thoughtMs: Number(thoughtMs) || 0,
    counts: Object.fromEntries(numbers) };
}
