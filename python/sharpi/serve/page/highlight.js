// Colours for code: one pattern for each family of languages, whose groups say what a piece is. It looks at words, not
// at grammar, so it is wrong now and then, and never slow.

import { el } from "./dom.js";

const LONGEST = 50_000; // characters; longer code stays plain

const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w{0,3}\b`;
const DOUBLE = String.raw`"(?:\\[^]|[^"\\\n])*"?`;
const SINGLE = String.raw`'(?:\\[^]|[^'\\\n])*'?`;
const BACKTICK = "`(?:\\\\[^]|[^`\\\\])*`?";
const BLOCK = String.raw`\/\*[^]*?(?:\*\/|$(?![^]))`;
const SLASHES = String.raw`\/\/.*`;
const HASH = String.raw`#.*`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$(?![^]))|'''[^]*?(?:'''|$(?![^]))`;

const WORDS = {
  python: "False None True and as assert async await break case class continue def del elif else except "
    + "finally for from global if import in is lambda match nonlocal not or pass raise return self try "
    + "while with yield",
  script: "abstract any as async await boolean break case catch class const constructor continue debugger "
    + "declare default delete do else enum export extends false finally for from function get if "
    + "implements import in instanceof interface is keyof let namespace never new null number of private "
    + "protected public readonly return satisfies set static string super switch this throw true try type "
    + "typeof undefined unknown var void while with yield",
  c: "abstract alignas auto bool boolean break byte case catch char class const constexpr continue "
    + "decltype default defer delete do double else enum explicit export extends extern false final "
    + "finally float fn for foreach func go goto if implements import in inline int interface internal "
    + "let long loop map match mod mut namespace new nil noexcept null nullptr object operator override "
    + "package private protected pub public range readonly record register return self short signed "
    + "sizeof static struct super switch template this throw throws trait true try type typedef typename "
    + "union unsafe unsigned use using val var virtual void volatile when where while yield impl dyn "
    + "async await string usize u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 size_t guard protocol extension fun "
    + "data __global__ __device__ __shared__ __syncthreads chan select",
  shell: "case do done elif else esac export fi for function if in local return set then unset until while",
  sql: "add all alter and as asc begin between by case check column commit constraint create cross default "
    + "delete desc distinct drop else end exists foreign from full group having if in index inner insert "
    + "into is join key left like limit not null offset on or order outer over partition primary "
    + "references returning right rollback select set table then union unique update using values view "
    + "when where window with",
  ruby: "and begin break case class def do else elsif end ensure false for if in local module next nil not "
    + "or redo repeat require rescue return self super then true unless until when while yield function",
  data: "true false null yes no on off",
};

function rules(words, comments, strings, { flags = "", more = {} } = {}) {
  const groups = {
    comment: comments.join("|"),
    string: strings.join("|"),
    ...more,
    number: NUMBER,
    keyword: `\\b(?:${WORDS[words].replaceAll(" ", "|")})\\b`,
    call: String.raw`\b[A-Za-z_]\w*(?=\()`,
  };
  return pattern(groups, flags);
}

function pattern(groups, flags = "") {
  const parts = Object.entries(groups).filter(([, part]) => part).map(([name, part]) => `(?<${name}>${part})`);
  return new RegExp(parts.join("|"), `gm${flags}`);
}

// Made when a language is first asked for.
const FAMILIES = {
  python: () => rules("python", [HASH], [`[rbfuRBFU]{0,2}(?:${TRIPLE}|${DOUBLE}|${SINGLE})`],
    { more: { name: String.raw`@[\w.]+` } }),
  script: () => rules("script", [BLOCK, SLASHES], [DOUBLE, SINGLE, BACKTICK]),
  c: () => rules("c", [BLOCK, SLASHES], [DOUBLE, String.raw`'(?:\\[^]|[^'\\\n])[^'\n]{0,8}'`, BACKTICK],
    { more: { name: String.raw`^\s*#\s*\w+|@\w+` } }),
  shell: () => rules("shell", [String.raw`(?<![\w$])#.*`], [DOUBLE, SINGLE],
    { more: { name: String.raw`\$\{[^}\n]*\}|\$[\w@#?!*]+`, option: String.raw`(?<=\s)--?[A-Za-z][\w-]*` } }),
  sql: () => rules("sql", [BLOCK, "--.*"], [DOUBLE, SINGLE], { flags: "i" }),
  ruby: () => rules("ruby", [HASH, "--.*"], [DOUBLE, SINGLE], { more: { name: String.raw`(?<!:):\w+|@\w+` } }),
  data: () => rules("data", [HASH], [DOUBLE, SINGLE],
    { more: { name: String.raw`^[ \t]*(?:- +)?[\w."'-]+(?=[ \t]*[:=])|^[ \t]*\[.*\]` } }),
  json: () => pattern({ name: String.raw`"(?:\\.|[^"\\\n])*"(?=\s*:)`, string: DOUBLE, number: `-?${NUMBER}`,
    keyword: String.raw`\b(?:true|false|null)\b` }),
  css: () => pattern({ comment: BLOCK, string: `${DOUBLE}|${SINGLE}`,
    name: String.raw`(?<![\w-])[\w-]+(?![\w-])(?=\s*:\s)|@[\w-]+`,
    number: String.raw`#[\da-fA-F]{3,8}\b|-?\d+(?:\.\d+)?(?:[a-z]+|%)?`, call: String.raw`(?<![\w-])[\w-]+(?=\()` }),
  markup: () => pattern({ comment: String.raw`<!--[^]*?(?:-->|$(?![^]))`,
    keyword: String.raw`<\/?[A-Za-z][\w:.-]*|\/?>`,
    name: String.raw`(?<![\w:-])[\w:-]+(?==["'])`, string: String.raw`(?<==)(?:${DOUBLE}|${SINGLE})` }),
  diff: () => pattern({ comment: String.raw`^(?:@@.*|diff .*|index .*)`,
    added: String.raw`^\+.*`, removed: String.raw`^-.*` }),
};

const NAMES = {
  python: "py python python3 pyi", script: "js javascript mjs jsx ts typescript tsx",
  c: "c h cpp c++ cc cxx hpp cu cuda java kotlin kt cs csharp c# "
    + "go golang rust rs swift scala dart php zig glsl objc proto",
  shell: "sh bash shell zsh fish console dockerfile makefile powershell", sql: "sql postgresql mysql sqlite",
  ruby: "rb ruby lua elixir haskell", data: "yaml yml toml ini conf cfg properties env", json: "json jsonc json5 jsonl",
  css: "css scss less", markup: "html xml svg vue xhtml svelte", diff: "diff patch",
};

const FAMILY = new Map(Object.entries(NAMES).flatMap(([family, names]) =>
  names.split(" ").map((name) => [name, family])));

/** The code as texts and coloured pieces. */
export function highlighted(text, language) {
  const family = FAMILY.get(language.toLowerCase());
  if (!family || text.length > LONGEST) return [text];
  if (typeof FAMILIES[family] === "function") FAMILIES[family] = FAMILIES[family]();
  const pieces = [];
  let at = 0;
  for (const found of text.matchAll(FAMILIES[family])) {
    if (!found[0]) continue;
    const kind = Object.keys(found.groups).find((name) => found.groups[name] !== undefined);
    pieces.push(text.slice(at, found.index), el("span", { class: `code-${kind}` }, found[0]));
    at = found.index + found[0].length;
  }
  return [...pieces, text.slice(at)];
}
