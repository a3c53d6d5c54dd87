// Elements from calls. Text is only ever text: nothing here takes HTML, so nothing has to be sanitised.

const SVG = "http://www.w3.org/2000/svg";

/** el("button", {class: "quiet", onclick: copy}, "Copy"): children are nodes, texts or nothing. */
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Lines on a grid of 20, drawn with the colour of the text.
const ICONS = {
  menu: "M3 5.5h14M3 10h14M3 14.5h9",
  plus: "M10 4v12M4 10h12",
  sliders: "M3 6h7M14 6h3M3 14h3M10 14h7M12 4v4M8 12v4",
  sun: "M10 6.5a3.5 3.5 0 1 0 0 7 3.5 3.5 0 0 0 0-7M10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18"
    + "M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M4.3 15.7l1.1-1.1M14.6 5.4l1.1-1.1",
  moon: "M16.5 11.8A6.8 6.8 0 0 1 8.2 3.5a6.8 6.8 0 1 0 8.3 8.3z",
  send: "M10 16V4.5M5 9.5l5-5 5 5",
  stop: "M6 6h8v8H6z",
  copy: "M7.5 7.5V4h8.5v8.5h-3.5M4 7.5h8.5V16H4z",
  check: "M4 10.5l4 4 8-9",
  pencil: "M4 16l.8-3.4L13.5 4 16 6.5 7.4 15.200z",
  again: "M15.5 6.5A6.5 6.5 0 1 0 16.5 11M16 3v4h-4",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  down: "M10 4v11M5 10.5l5 5 5-5",
  bin: "M4 6h12M8 6V4h4v2M5.5 6l.7 10h7.6l.7-10",
  close: "M5 5l10 10M15 5L5 15",
};

export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 20 20", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** A button that is a picture; its name is what a screen reader says and what the pointer shows. */
export function iconButton(name, label, onclick, properties = {}) {
  const own = { type: "button", class: "icon-button", "aria-label": label, title: label, onclick };
  return el("button", { ...own, ...properties }, icon(name));
}

export function replaceIcon(button, name, label) {
  button.replaceChildren(icon(name));
  button.title = label;
  button.setAttribute("aria-label", label);
}

/** Copies a text and says so on the button for a moment. */
export async function copyFrom(button, text) {
  const label = button.title;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text);
  }
  replaceIcon(button, "check", "Copied");
  setTimeout(() => replaceIcon(button, "copy", label), 1500);
}

// Browsers have no clipboard object on a page that came over plain HTTP from another machine.
function copyBySelection(text) {
  const area = el("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

/** Saves a text as a file of the reader's. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

const WHOLE = new Intl.NumberFormat("en");

export function whole(number) {
  return WHOLE.format(Math.round(number));
}

export function seconds(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 9950) return `${(ms / 1000).toFixed(1)} s`;
  const total = Math.round(ms / 1000);
  return total < 60 ? `${total} s` : `${Math.floor(total / 60)} min ${total % 60} s`;
}

export function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${unit && bytes < 100 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
