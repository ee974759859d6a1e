"use strict";
// What pages of a generation share: one step's token tree as SVG and in words, and the theme. The page's own script has the drafters
// as `names` and the tokens' texts as `texts`. All text goes in as text nodes.

const SVG = "http://www.w3.org/2000/svg";

function make(space, tag, attributes, children) {
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "style" && value) element.style.cssText = value;  // which a policy without inline styles allows
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child !== null && child !== undefined) element.append(child);
  return element;
}
const html = (tag, attributes, ...children) => make(null, tag, attributes, children);
const svg = (tag, attributes, ...children) => make(SVG, tag, attributes, children);

const at = (id) => document.getElementById(id);
const plural = (number, noun, nouns) => `${number} ${number === 1 ? noun : nouns || noun + "s"}`;
const fill = (element, ...children) => { element.replaceChildren(...children.filter((child) => child !== null && child !== "")); return element; };
const named = (source) => html("span", {}, html("span", { class: "swatch", style: `--c:${colour(source)}` }), source === null ? "target" : names[source]);
const quoted = (token) => html("b", { class: "token" }, "\u201c" + visible(texts[token] || "#" + token) + "\u201d");
const share = (part, whole) => (whole > 0 ? Math.round((100 * part) / whole) + "\u00a0%" : "\u2013");
const STATUS = {
  accepted: "accepted", ended: "accepted, but the output ended before it", rejected: "rejected by the target",
  untried: "not tried, another draw was accepted first", unreached: "below a rejected token", cut: "cut by selection, not scored",
  probe: "an extra input of the drafter",
};

// The colour of a drafter; null is the target itself.
function colour(source) {
  if (source === null) return "var(--target)";
  return source < 8 ? `var(--d${source})` : `hsl(${(source * 137.5) % 360} 60% var(--extra))`;
}

// Characters that would be invisible or could disturb a line, made visible.
function visible(text) {
  let found = "";
  for (const sign of text) {
    const code = sign.codePointAt(0);
    if (code === 10 || code === 0x2028 || code === 0x2029) found += "\u21b5";
    else if (code === 9) found += "\u21e5";
    else if (code < 32) found += String.fromCodePoint(0x2400 + code);
    else if (code === 127) found += "\u2421";
    else if ((code >= 0x80 && code < 0xa0) || (code >= 0x200b && code <= 0x200f) || (code >= 0x202a && code <= 0x202e) ||
             (code >= 0x2066 && code <= 0x2069) || code === 0xfeff) found += "\u2039" + code.toString(16) + "\u203a";
    else found += sign;
  }
  return found.replace(/^ +| +$/g, (spaces) => "\u00b7".repeat(spaces.length));
}

// Width of a text in cells of a monospaced font.
function cells(text) {
  let width = 0;
  for (const sign of text) width += sign.codePointAt(0) >= 0x1100 ? 2 : 1;
  return width;
}

function clipped(text, most) {
  if (cells(text) <= most) return text;
  let found = "";
  for (const sign of text) {
    if (cells(found + sign) > most - 1) break;
    found += sign;
  }
  return found + "\u2026";
}

function chance(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value > 0.995) return "1.0";
  return value.toFixed(2).slice(1);
}

const CELL = 7.25, SMALL = 6.35, MOST_CELLS = 16, DENSE_FROM = 9;

// Where everything of a step stands: boxes with x, y, width; the root first, the target's own token last.
function layout(step, texts) {
  const label = (token) => clipped(visible(texts[token] || "") || "#" + token, MOST_CELLS);
  const boxes = step.nodes.map((node, index) => ({ node, index, label: label(node.token), depth: node.depth, kind: "node", children: [] }));
  const root = { label: label(step.root), depth: 0, kind: "root", children: [] };
  let end = root;
  for (const box of boxes) {
    (box.node.parent < 0 ? root : boxes[box.node.parent]).children.push(box);
    if (box.node.status === "accepted" || box.node.status === "ended") end = box;
  }
  const rank = (box) => (box.node.status === "accepted" || box.node.status === "ended" ? 0 : 1);
  for (const box of [root, ...boxes]) box.children.sort((a, b) => rank(a) - rank(b));
  const all = [root, ...boxes];
  if (step.next) {
    const own = { label: label(step.next.token), depth: end.depth + 1, kind: "own", p: step.next.p, children: [] };
    end.children.unshift(own);
    all.push(own);
  }
  const leaves = all.filter((box) => !box.children.length).length;
  const dense = leaves >= DENSE_FROM;
  const sizes = { dense, row: dense ? 27 : 54, height: dense ? 21 : 38, gap: dense ? 26 : 16, top: 4, left: 2 };
  place(root, all, sizes);
  const width = Math.max(...all.map((box) => box.x + box.width)) + (dense ? 46 : 4);
  return { all, boxes, end, sizes, width, height: sizes.top + leaves * sizes.row };
}

function place(root, all, sizes) {
  const widths = [];
  for (const box of all) {
    const text = cells(box.label) * CELL;
    const numbers = box.kind === "node" ? 2 * 3 * SMALL + 8 : 3 * SMALL;
    box.width = Math.ceil(box.kind === "root" ? text + 16 : sizes.dense ? text + numbers + 34 : Math.max(text + 14, numbers) + 18);
    widths[box.depth] = Math.max(widths[box.depth] || 0, box.width);
  }
  const starts = [sizes.left];
  for (let depth = 0; depth < widths.length; depth++) starts[depth + 1] = starts[depth] + widths[depth] + sizes.gap;
  if (sizes.dense) for (const box of all) box.width = widths[box.depth];
  let row = 0;
  const stack = [root];
  while (stack.length) {  // first children stand beside their parents, others in rows below
    const box = stack.pop();
    box.x = starts[box.depth];
    box.y = sizes.top + row * sizes.row;
    if (!box.children.length) row += 1;
    stack.push(...box.children.slice().reverse());
  }
}

function edge(from, to, sizes) {
  const x0 = from.x + from.width, y0 = from.y + sizes.height / 2, x1 = to.x, y1 = to.y + sizes.height / 2;
  const kind = to.kind === "own" || to.node.status === "accepted" || to.node.status === "ended" ? "accepted" : to.node.status;
  if (y0 === y1) return svg("path", { class: "edge " + kind, d: `M${x0} ${y0}H${x1}` });
  const bend = x1 - sizes.gap / 2, r = 5;
  return svg("path", { class: "edge " + kind, d: `M${x0} ${y0}H${bend - r}Q${bend} ${y0} ${bend} ${y0 + r}V${y1 - r}Q${bend} ${y1} ${bend + r} ${y1}H${x1}` });
}

function box(one, sizes, pick) {
  const { x, y, width, label } = one, h = sizes.height, dense = sizes.dense;
  const status = one.kind === "node" ? one.node.status + (one.node.missed ? " missed" : "") : one.kind;
  const group = svg("g", { class: "node " + status, style: `--c:${colour(one.kind === "node" ? one.node.source : null)}` });
  group.append(svg("rect", { class: "box", x, y, width, height: h, rx: 5 }));
  if (one.kind === "node") group.append(svg("rect", { class: "stripe", x: x + 1, y: y + 1, width: 4, height: h - 2, rx: 2 }));
  const inset = one.kind === "root" ? 8 : 11, middle = y + h / 2 + 4, numbers = dense ? middle : y + 31;
  group.append(svg("text", { x: x + inset, y: dense || one.kind === "root" ? middle : y + 16 }, label));
  if (one.kind === "own") {
    group.append(svg("text", { class: "p", x: dense ? x + width - 8 : x + inset, y: numbers, "text-anchor": dense ? "end" : null }, chance(one.p)));
  }
  if (one.kind === "node") {
    const sign = 14, right = x + width - (dense ? sign + 6 : 8);
    group.append(svg("text", { class: "p", x: dense ? right - 3 * SMALL - 8 : x + inset, y: numbers, "text-anchor": dense ? "end" : null }, chance(one.node.p)));
    group.append(svg("text", { class: "q", x: right, y: numbers, "text-anchor": "end" }, chance(one.node.q === undefined ? one.node.confidence : one.node.q)));
    group.append(sign_of(one.node, x + width - 11, dense ? y + h / 2 : y + 11));
    group.addEventListener("pointerenter", () => pick(one, group));
    group.addEventListener("click", () => pick(one, group));
  }
  return group;
}

function sign_of(node, x, y) {
  if (node.status === "accepted") return svg("path", { class: "ok", d: `M${x - 3} ${y}l2.4 2.6l4.4 -5.4` });
  if (node.status === "rejected") return svg("path", { class: "mark", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` });
  return "";
}

// Why a drafter's deepest tokens are its last ones: "stop", "budget", or nothing.
function ended(step, one) {
  const used = one.kind === "node" ? step.drafters[one.node.source] : null;
  if (!used || one.depth !== used.deepest || one.children.some((child) => child.kind === "node")) return "";
  if (used.stop !== null) return "stop";
  return one.depth >= used.depth || used.proposed >= used.nodes ? "budget" : "";
}

function drawTree(step, texts, pick) {
  const plan = layout(step, texts), sizes = plan.sizes;
  const picture = svg("svg", { width: plan.width, height: plan.height + (sizes.dense ? 4 : 0), role: "img", "aria-label": `token tree of ${step.nodes.length} nodes` });
  for (const from of plan.all) for (const to of from.children) picture.append(edge(from, to, sizes));
  for (const one of plan.all) {
    picture.append(box(one, sizes, pick));
    const why = ended(step, one);
    if (why) {
      const x = one.x + one.width, middle = one.y + sizes.height / 2;
      const below = !sizes.dense, anchor = below ? "end" : "start";
      picture.append(svg("text", { class: "end", x: below ? x : x + 6, y: below ? one.y + sizes.height + 11 : middle + 4, "text-anchor": anchor }, below || !one.children.length ? why : ""));
    }
  }
  return { picture, plan };
}

// Text as it is, but for characters that control a terminal or the direction of a line.
function shown(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, visible);
}

// In words

function count(step, ...kinds) { return step.nodes.filter((node) => kinds.includes(node.status)).length; }

function outcome(step) {
  const cut = count(step, "cut"), accepted = count(step, "accepted", "ended");
  const parts = [];
  if (step.nodes.length) parts.push(html("b", {}, plural(step.nodes.length, "drafted token")), cut ? `, ${cut} of them cut by selection` : "", `; ${accepted || "none"} accepted`);
  else parts.push(names.length ? "Nothing was drafted" : "Plain decoding");
  if (step.next) parts.push("; the target's own token is ", quoted(step.next.token));
  if (step.next && step.next.p !== null) parts.push(", chance ", chance(step.next.p));
  const rivals = step.top.filter((one) => !step.next || one.token !== step.next.token).slice(0, 2);
  if (rivals.length && rivals[0].p >= 0.005) parts.push("; next to it ", ...rivals.flatMap((one, i) => [i ? " and " : "", "\u201c" + visible(texts[one.token] || "#" + one.token) + "\u201d ", chance(one.p)]));
  return [...parts, ".", step.error ? ` The row was no distribution: ${step.error}` : ""];
}

function describe(node, step) {
  const parts = [quoted(node.token), ` by ${[node.source, ...(node.also || [])].map((source) => names[source]).join(" and ")}: `, STATUS[node.status]];
  if (node.missed) parts.push(", though the output went on exactly so");
  if (node.status === "rejected") {
    const parent = node.parent, taken = step.nodes.find((one) => one.parent === parent && (one.status === "accepted" || one.status === "ended"));
    const instead = taken ? taken.token : step.next ? step.next.token : null;
    if (instead !== null) parts.push(", which wrote ", quoted(instead));
  }
  parts.push(`; chance ${chance(node.p)} by the target, ${chance(node.confidence)} by the drafter`);
  if (node.q !== undefined) parts.push(`, drawn with ${chance(node.q)}`);
  return [...parts, `; token ${node.token}, level ${node.depth}.`];
}

function drawNodes(step) {
  const head = ["node", "token", "parent", "drafter", "target", "drafter's", "outcome"];
  const cell = (value, left) => html("td", { class: left ? "left" : null }, value);
  const rows = step.nodes.map((node, index) => html("tr", {}, cell(String(index)), cell(html("span", { class: "token" }, visible(texts[node.token] || "#" + node.token)), true), cell(node.parent < 0 ? "root" : String(node.parent)), cell(named(node.source), true), cell(chance(node.p)), cell(chance(node.confidence)), cell(STATUS[node.status] + (node.missed ? ", yet right" : ""), true)));
  fill(at("nodes"), html("thead", {}, html("tr", {}, ...head.map((name) => html("th", { class: ["token", "drafter", "outcome"].includes(name) ? "left" : null }, name)))), html("tbody", {}, ...rows));
}

function drawWords(step) {
  const lines = step.words ? step.words.split("\n") : ["This controller gives no reasons."];
  fill(at("words"), ...lines.map((line) => {
    const name = names.find((one) => line.startsWith(one + " "));
    return html("li", {}, ...(name ? [html("b", { style: "font-weight:600" }, name), line.slice(name.length)] : [line]));
  }));
}

// Theme

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  fill(at("theme"), name === "dark" ? "Light" : "Dark");
  at("theme").setAttribute("aria-label", `Change to the ${name === "dark" ? "light" : "dark"} theme`);
}

function startTheme() {
  const system = window.matchMedia("(prefers-color-scheme: dark)"), asked = new URLSearchParams(location.search).get("theme");
  setTheme(asked === "dark" || asked === "light" ? asked : system.matches ? "dark" : "light");
  at("theme").hidden = false;
  system.addEventListener("change", () => setTheme(system.matches ? "dark" : "light"));
  at("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}
