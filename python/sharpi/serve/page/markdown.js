// Markdown as elements. A text is cut into blocks, and blocks into inline parts; each becomes an element by a DOM call.
// HTML in the text stays text, pictures become links (the page loads nothing from elsewhere), and links lead only to
// web and mail addresses. Every pass is linear, or nearly so, in the length of the text, whatever a model writes.

import { copyFrom, el, iconButton } from "./dom.js";
import { highlighted } from "./highlight.js";
import { inline } from "./inline.js";

const DEEPEST = 12; // quotes and lists inside each other; what is deeper is a paragraph

const FENCE = /^ {0,3}(`{3,}(?!.*`)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*))?$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:_\s*){3,}|(?:\*\s*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s+|$)/;

/**
 * Shows a text in an element. A block that is there already with the same text keeps its element, so an answer that
 * grows costs its last block at a time, and what the reader has selected above stays selected.
 */
export function showMarkdown(element, text) {
  const found = blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"));
  found.forEach((block, index) => {
    const old = element.children[index];
    const key = `${block.kind} ${block.raw}`;
    if (old?.markdown === key) return;
    const made = build(block, 0);
    made.markdown = key;
    if (old) old.replaceWith(made);
    else element.append(made);
  });
  while (element.children.length > found.length) element.lastElementChild.remove();
}

// --- blocks ----------------------------------------------------------------------------------------------------------

function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const block = fence(lines, at) ?? simple(lines, at) ?? quote(lines, at) ?? list(lines, at) ?? table(lines, at)
      ?? paragraph(lines, at);
    block.raw = lines.slice(at, block.end).join("\n");
    found.push(block);
    at = block.end;
  }
  return found;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, mark, information] = open;
  const [language] = information.trim().split(/\s/, 1);
  const indent = lines[at].search(/\S/);
  let end = at + 1;
  const closes = (line) => line.trim().length >= mark.length && !line.trim().replaceAll(mark[0], "");
  while (end < lines.length && !closes(lines[end])) end++;
  const inside = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  return { kind: "code", language, text: inside.join("\n"), end: Math.min(end + 1, lines.length) };
}

function simple(lines, at) {
  const heading = HEADING.exec(lines[at]);
  if (heading) {
    return { kind: "heading", level: heading[1].length, text: (heading[2] ?? "").replace(/\s#+\s*$/, ""), end: at + 1 };
  }
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at) {
  if (!QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !begins(lines, end)))) end++;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end };
}

/** A list is its items' lines, each without the indent of its item. Models indent by two, three or four: all count. */
function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first || first[1].length > 3) return null;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let loose = false;
  let blank = false;
  let width = 0;
  let end = at;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) {
      blank = true;
      items.at(-1).push("");
      continue;
    }
    const item = ITEM.exec(line);
    const inside = items.length > 0 && indentOf(line) >= first[1].length + 2;
    if (item && !inside) {
      if (/\d/.test(item[2]) !== ordered || RULE.test(line)) break;
      const marked = item[1].length + item[2].length;
      width = item[0].length > marked + 4 ? marked + 1 : item[0].length; // more spaces belong to indented code
      items.push([line.slice(width)]);
    } else if (inside) items.at(-1).push(line.slice(Math.min(width, indentOf(line))));
    else if (blank || begins(lines, end)) break;
    else items.at(-1).push(line);
    loose ||= blank && !inside;
    blank = false;
  }
  while (end > at && !lines[end - 1].trim()) end--;
  return { kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, items, loose, end };
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  const aligned = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  return { kind: "table", head, aligned, rows: lines.slice(at + 2, end).map(cells), end };
}

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/([^\\])\|$/, "$1");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end)) end++;
  return { kind: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n"), end };
}

/** Whether a line ends the paragraph before it. */
function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line)
    || table(lines, at) !== null;
}

function indentOf(line) {
  const found = line.search(/\S/);
  return found < 0 ? line.length : found;
}

// --- elements --------------------------------------------------------------------------------------------------------

const BUILDERS = {
  code: (block) => codeBlock(block),
  heading: (block) => el(`h${Math.min(block.level + 1, 6)}`, {}, inline(block.text)),
  rule: () => el("hr"),
  quote: (block, depth) => el("blockquote", {}, inner(block.lines, depth)),
  list: (block, depth) => el(block.ordered ? "ol" : "ul", { start: block.ordered && block.start !== 1 && block.start },
    block.items.map((lines) => listItem(lines, block.loose, depth))),
  table: (block) => tableElement(block),
  paragraph: (block) => el("p", {}, inline(block.text)),
};

function build(block, depth) {
  return BUILDERS[block.kind](block, depth);
}

function inner(lines, depth) {
  if (depth >= DEEPEST) return [el("p", {}, lines.join("\n"))];
  return blocks(lines).map((block) => build(block, depth + 1));
}

function listItem(lines, loose, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  if (task) lines = [lines[0].slice(task[0].length), ...lines.slice(1)];
  const children = inner(lines, depth);
  if (!loose && children[0]?.tagName === "P") children.splice(0, 1, ...children[0].childNodes);
  if (!task) return el("li", {}, children);
  const box = el("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "Task" });
  return el("li", { class: "task" }, box, children);
}

function tableElement({ head, aligned, rows }) {
  const row = (tag, texts) => el("tr", {}, head.map((_, column) =>
    el(tag, { class: aligned[column] !== "left" && aligned[column] }, inline(texts[column] ?? ""))));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, rows.map((texts) => row("td", texts)))));
}

function codeBlock({ language, text }) {
  const copy = iconButton("copy", "Copy the code", () => copyFrom(copy, text));
  return el("figure", { class: "code" },
    el("figcaption", {}, el("span", {}, language || "text"), copy),
    el("pre", { tabindex: "0" }, el("code", {}, highlighted(text, language))));
}
