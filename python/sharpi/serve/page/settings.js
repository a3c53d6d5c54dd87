// The panel: what the model is doing, how answers are drawn, the key, and what becomes of the chats. A field that is
// left empty is not sent, so the server's own default counts.

import { el, iconButton } from "./dom.js";
import { meter, planBar, ring } from "./pictures.js";
import { remember, remembered } from "./storage.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 10, step: "any",
    help: "0 always takes the most likely token." },
  { name: "top_k", label: "Top k", min: 0, step: 1, help: "Choose among the k most likely tokens; 0 keeps all." },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any", help: "Keep the likeliest tokens up to this sum." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", help: "Drop tokens below this part of the likeliest." },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1, help: "The answer's limit, thoughts included." },
  { name: "seed", label: "Seed", min: 0, step: 1, help: "The same seed gives the same answer." },
];

const KEYS = [["Enter", "send"], ["Shift Enter", "new line"], ["Esc", "stop the answer"], ["Ctrl K", "new chat"],
  ["Ctrl ,", "settings"], ["Ctrl B", "list of chats"], ["/", "to the message field"], ["↑", "edit the last message"]];

export function settings() {
  return remembered("settings", {});
}

function change(name, value) {
  const now = { ...settings(), [name]: value };
  if (value === "" || value === null) delete now[name];
  remember("settings", now);
}

/** The sampling fields of a request. */
export function requestFields() {
  const kept = settings();
  const fields = Object.fromEntries(NUMBERS.filter(({ name }) => Number.isFinite(kept[name]))
    .map(({ name }) => [name, kept[name]]));
  if (kept.thinking) fields.chat_template_kwargs = { enable_thinking: kept.thinking === "on" };
  return fields;
}

export function bindThinking(select) {
  select.value = settings().thinking ?? "";
  select.addEventListener("change", () => change("thinking", select.value));
}

export class Panel {
  #facts = el("div", { class: "facts" });

  /** actions: close, exportChat(type), exportAll, importFile(file), keyChanged. */
  constructor(element, actions) {
    this.element = element;
    this.actions = actions;
    element.append(
      el("div", { class: "bar" }, el("h2", {}, "Settings"), iconButton("close", "Close the settings", actions.close)),
      el("div", { class: "sections" },
        section("Model", this.#facts), answers(), this.#key(), this.#chats(), keyboard()));
  }

  focusKey() {
    this.element.querySelector("#key").focus();
  }

  /** properties: of /props; slots: of /slots. Either may be missing, and so may each of their fields. */
  show(model, properties, slots) {
    const parts = [el("p", { class: "model-name" }, model || properties?.model || "No model")];
    if (Array.isArray(properties?.plan)) parts.push(planBar(properties.plan));
    const rate = properties?.experts?.hit_rate;
    if (Number.isFinite(rate)) {
      parts.push(ring(rate, "expert hit rate",
                      "since it was loaded: of the experts that tokens needed, found in VRAM"));
    }
    if (Array.isArray(slots) && slots.length) {
      parts.push(meter("Answers under way", slots.filter((slot) => slot.is_processing).length, slots.length));
    }
    if (properties?.loaded === false) {
      parts.push(el("p", { class: "quiet small" }, "It is loaded when it is first asked something."));
    }
    this.#facts.replaceChildren(...parts.filter(Boolean));
    const defaults = properties?.default_generation_settings?.params ?? {};
    for (const { name } of NUMBERS) this.element.querySelector(`#${name}`).placeholder = defaults[name] ?? "default";
  }

  #key() {
    const field = el("input", { id: "key", type: "password", autocomplete: "off", spellcheck: "false",
      "aria-label": "API key" });
    field.value = remembered("key", "");
    field.addEventListener("change", () => {
      remember("key", field.value.trim());
      this.actions.keyChanged();
    });
    // A form of its own lets the browser's keeper of passwords see what the field is.
    const form = el("form", { onsubmit: (event) => event.preventDefault() }, field);
    return section("API key", form, el("p", { class: "quiet small" },
      "Only if the server was started with one. It is kept in this browser and sent to this server alone."));
  }

  #chats() {
    const button = (label, onclick) => el("button", { type: "button", onclick }, label);
    const file = el("input", { type: "file", accept: "application/json,.json", hidden: true });
    file.addEventListener("change", () => {
      if (file.files.length) this.actions.importFile(file.files[0]);
      file.value = "";
    });
    return section("Chats", el("div", { class: "buttons" },
      button("This chat as Markdown", () => this.actions.exportChat("markdown")),
      button("This chat as JSON", () => this.actions.exportChat("json")),
      button("All chats as JSON", this.actions.exportAll),
      button("Import JSON", () => file.click()), file));
  }
}

function section(title, ...children) {
  return el("section", {}, el("h3", {}, title), children);
}

function answers() {
  const system = el("textarea", { id: "system", rows: 3, placeholder: "None" });
  system.value = settings().system ?? "";
  system.addEventListener("input", () => change("system", system.value.trim()));
  return section("Answers", el("label", { class: "field wide" }, el("span", {}, "System prompt"), system),
    el("div", { class: "numbers" }, NUMBERS.map(numberField)));
}

function numberField({ name, label, help, ...bounds }) {
  const note = el("small", { class: "quiet", id: `${name}-help` }, help);
  const field = el("input", { id: name, type: "number", inputmode: "decimal", placeholder: "default", ...bounds,
    "aria-describedby": note.id });
  field.value = settings()[name] ?? "";
  field.addEventListener("input", () => {
    const bad = !field.checkValidity();
    field.setAttribute("aria-invalid", String(bad));
    note.textContent = bad ? field.validationMessage : help;
    if (!bad) change(name, field.value === "" ? "" : Number(field.value));
  });
  return el("label", { class: "field" }, el("span", {}, label), field, note);
}

function keyboard() {
  return section("Keyboard", el("dl", { class: "keys" }, KEYS.map(([keys, does]) =>
    [el("dt", {}, keys.split(" ").map((key) => el("kbd", {}, key))), el("dd", {}, does)])));
}
