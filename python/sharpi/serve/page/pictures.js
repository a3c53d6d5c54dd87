// Figures as small pictures: where the weights are, how often an expert was where it is quick to reach, and how full a
// thing is. Each says the same in words to a screen reader.

import { el, size, svg, whole } from "./dom.js";

const ROLES = ["vram", "ram", "cpu", "disk"];

function role(part) {
  const named = String(part.role ?? part.name ?? "").toLowerCase();
  return ROLES.includes(named) ? named : "other";
}

/** The classes of a part: its role's colour, paler if a part before it has the same. */
function look(parts, index) {
  const own = role(parts[index]);
  return `part-${own}${parts.findIndex((part) => role(part) === own) < index ? " part-again" : ""}`;
}

/** plan: [{name, bytes, role}], in the order of the bar. */
export function planBar(plan) {
  const parts = plan.filter(({ bytes }) => bytes > 0);
  const total = parts.reduce((sum, { bytes }) => sum + bytes, 0);
  if (!total) return null;
  const words = parts.map(({ name, bytes }) => `${name} ${size(bytes)}`).join(", ");
  let at = 0;
  const rects = parts.map((part, index) => {
    const width = (part.bytes / total) * 1000;
    at += width;
    return svg("rect", { class: look(parts, index), x: at - width, width: Math.max(width - 4, 2), height: 24 });
  });
  const rows = parts.map((part, index) => el("li", {}, dot(look(parts, index)), el("span", {}, part.name),
    el("span", { class: "figure" }, size(part.bytes)),
    el("span", { class: "figure quiet" }, `${Math.round((part.bytes / total) * 100)} %`)));
  return el("div", { class: "plan" },
    svg("svg", { class: "plan-bar", viewBox: "0 0 1000 24", preserveAspectRatio: "none", role: "img",
      "aria-label": `Where the model is: ${words}` }, rects),
    el("ul", { class: "legend" }, rows));
}

function dot(look) {
  return svg("svg", { class: "dot", viewBox: "0 0 10 10", "aria-hidden": "true" },
    svg("rect", { class: look, width: 10, height: 10, rx: 3 }));
}

/** A ring that is filled to a rate of 0 to 1, with a label beside it. */
export function ring(rate, label, note) {
  const around = 2 * Math.PI * 16;
  const percent = `${(rate * 100).toFixed(rate > 0.995 || rate < 0.1 ? 1 : 0)} %`;
  const circle = (properties) => svg("circle", { cx: 20, cy: 20, r: 16, ...properties });
  return el("div", { class: "ring" },
    svg("svg", { viewBox: "0 0 40 40", role: "img", "aria-label": `${label}: ${percent}` },
      circle({ class: "ring-all" }),
      circle({ class: "ring-part", "stroke-dasharray": `${rate * around} ${around}`, transform: "rotate(-90 20 20)" })),
    el("div", {}, el("strong", { class: "figure" }, percent), el("span", {}, label),
      note && el("span", { class: "quiet small" }, note)));
}

/** How much of a whole is used, as a line that fills. */
export function meter(label, used, all, unit = "") {
  const share = all > 0 ? Math.min(used / all, 1) : 0;
  return el("div", { class: "meter" },
    el("div", { class: "row" }, el("span", {}, label),
      el("span", { class: "figure quiet" }, `${whole(used)} of ${whole(all)}${unit}`)),
    line(share, `${label}: ${whole(used)} of ${whole(all)}${unit}`));
}

export function line(share, label) {
  const frame = { class: "line", viewBox: "0 0 1000 6", preserveAspectRatio: "none", role: "img", "aria-label": label };
  return svg("svg", frame, svg("rect", { class: "line-all", width: 1000, height: 6 }),
    svg("rect", { class: "line-part", width: 1000 * share, height: 6 }));
}
