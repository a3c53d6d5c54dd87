// What stands inside a line of Markdown: emphasis, code, links and addresses. Texts are read once, from left to right;
// brackets and emphasis marks wait on stacks until their partners come, as in CommonMark's own procedure.

import { el } from "./dom.js";

const PLAIN = /[^\\`*_~[\]!<h\n]+/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const TARGET = /\(\s*(<[^<>\n]*>|[^\s()<]*(?:\([^\s()]*\)[^\s()]*)*)(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]*)>/y;
const BARE = /https?:\/\/[^\s<>"'`]+/y;
const SPACE = /^\s*$/;
const PUNCTUATION = /[\p{P}\p{S}]/u;

/** The nodes of a text. */
export function inline(text) {
  const reader = new Reader(text);
  while (reader.at < text.length) reader.step();
  return emphasised(reader.parts).map(node);
}

/** Where a link may lead, or nothing. What is relative or of another kind, such as javascript:, stays text. */
export function address(text) {
  try {
    const found = new URL(text);
    return ["http:", "https:", "mailto:"].includes(found.protocol) ? found.href : null;
  } catch {
    return null;
  }
}

function link(text, children) {
  const href = address(text);
  return href ? el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, children) : null;
}

// A part is a text, a node, or a run of emphasis marks that may open or close.
function node(part) {
  if (typeof part === "string" || part instanceof Node) return part;
  return part.mark.repeat(part.count);
}

class Reader {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = [];
    this.brackets = [];
    this.ticks = null;
  }

  step() {
    const plain = this.match(PLAIN);
    if (plain) return this.push(plain[0]);
    const sign = this.text[this.at];
    const found = { "\\": this.escape, "`": this.code, "[": this.open, "!": this.picture, "]": this.close,
      "<": this.angled, "h": this.bare, "\n": this.newLine, "*": this.run, "_": this.run, "~": this.run }[sign];
    if (!found.call(this, sign)) {
      this.push(sign);
      this.at++;
    }
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text);
    if (found && pattern === PLAIN) this.at += found[0].length;
    return found;
  }

  push(part) {
    this.parts.push(part);
    return true;
  }

  take(length, part) {
    this.at += length;
    return this.push(part);
  }

  escape() {
    const found = this.match(ESCAPED);
    return found && this.take(2, found[1]);
  }

  newLine() {
    return this.take(1, el("br"));
  }

  code() {
    this.ticks ??= tickRuns(this.text);
    const run = this.ticks.get(this.at);
    if (!run?.partner) return this.take(run?.length ?? 1, "`".repeat(run?.length ?? 1));
    const inside = this.text.slice(this.at + run.length, run.partner).replaceAll("\n", " ");
    const trimmed = /^ .*[^ ].* $/.test(inside) ? inside.slice(1, -1) : inside;
    this.at = run.partner + run.length;
    return this.push(el("code", {}, trimmed));
  }

  open() {
    this.brackets.push(this.parts.length);
    return this.take(1, "[");
  }

  picture() {
    if (this.text[this.at + 1] !== "[") return false;
    this.brackets.push(this.parts.length);
    return this.take(2, "![");
  }

  close() {
    const start = this.brackets.pop();
    if (start === undefined) return false;
    this.at++;
    const target = this.match(TARGET);
    const made = target && link(target[1].replace(/^<|>$/g, ""), []);
    if (!made) return this.push("]");
    made.append(...emphasised(this.parts.splice(start).slice(1)).map(node));
    if (!made.textContent) made.textContent = target[1];
    // A link holds no links: brackets around it are brackets.
    this.brackets.length = 0;
    return this.take(target[0].length, made);
  }

  angled() {
    const found = this.match(ANGLED);
    const made = found && link(found[1], [found[1]]);
    return made && this.take(found[0].length, made);
  }

  bare() {
    const before = this.parts.at(-1);
    const found = this.match(BARE);
    if (!found || (typeof before === "string" && /\w$/.test(before))) return false;
    const text = withoutEnd(found[0]);
    const made = link(text, [text]);
    return made && this.take(text.length, made);
  }

  run(mark) {
    let count = 1;
    while (this.text[this.at + count] === mark) count++;
    const [before, after] = [this.text[this.at - 1] ?? "", this.text[this.at + count] ?? ""];
    const left = !SPACE.test(after) && (!PUNCTUATION.test(after) || SPACE.test(before) || PUNCTUATION.test(before));
    const right = !SPACE.test(before) && (!PUNCTUATION.test(before) || SPACE.test(after) || PUNCTUATION.test(after));
    const word = mark === "_"; // snake_case is no emphasis
    const opens = left && (!word || !right || PUNCTUATION.test(before));
    const closes = right && (!word || !left || PUNCTUATION.test(after));
    if (mark === "~" && count !== 2) return this.take(count, mark.repeat(count));
    return this.take(count, opens || closes ? { mark, count, opens, closes } : mark.repeat(count));
  }
}

/** An address without the punctuation of the sentence that it stands in. */
function withoutEnd(text) {
  const signs = text.includes("(") ? ".,;:!?*_~]" : ".,;:!?*_~])";
  let end = text.length;
  while (signs.includes(text[end - 1])) end--;
  return text.slice(0, end);
}

/** Each run of backticks by its place, with the place of the next run that is as long. */
function tickRuns(text) {
  const runs = new Map();
  const last = new Map();
  for (const { index, 0: { length } } of text.matchAll(/`+/g)) {
    const run = { length, partner: 0 };
    const before = last.get(length);
    if (before) before.partner = index;
    last.set(length, run);
    runs.set(index, run);
  }
  return runs;
}

/** Pairs the marks. A closing run takes the nearest opening one of its kind; marks between them are texts. */
function emphasised(parts) {
  const out = [];
  const openers = { "*": [], "_": [], "~": [] };
  for (const part of parts) {
    const run = part.mark ? { ...part } : null;
    while (run?.closes && run.count && openers[run.mark].length) wrap(out, openers, run);
    if (!run) out.push(part);
    else if (run.count) {
      if (run.opens) openers[run.mark].push(out.length);
      out.push(run);
    }
  }
  return out;
}

const DEEPEST = 20; // elements inside each other; a browser's layout recurses

function wrap(out, openers, run) {
  const start = openers[run.mark].at(-1);
  const depth = 1 + out.slice(start + 1).reduce((most, part) => Math.max(most, part.depth ?? 0), 0);
  if (depth > DEEPEST) {
    openers[run.mark].length = 0;
    return;
  }
  const opener = out[start];
  const used = Math.min(opener.count, run.count, 2);
  const inside = out.splice(start + 1).map(node);
  for (const stack of Object.values(openers)) while (stack.length && stack.at(-1) > start) stack.pop();
  const made = el(run.mark === "~" ? "del" : used === 2 ? "strong" : "em", {}, inside);
  made.depth = depth;
  out.push(made);
  run.count -= used;
  opener.count -= used;
  if (!opener.count) {
    openers[run.mark].pop();
    out.splice(start, 1);
  }
}
