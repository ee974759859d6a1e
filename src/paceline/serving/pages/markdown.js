"use strict";
// Markdown as elements, of a text that a model wrote and that nobody has checked. Elements are made by name and texts go in as text nodes:
// no part of the text is ever read as HTML. Nothing is loaded: an image is a link. Links lead to http, https and mailto alone.
//
// Known are paragraphs, headings, lists, quotations, fenced code, tables, rules, emphasis, code, links. What is not known stays as it is.
// Every function gets `write(from, to)`, which returns nodes for that part of the text, so that the caller can colour it.

const MOST_BLOCK = 8000, MOST_LINE = 4000, MOST_DEPTH = 12;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/, HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/, RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/, ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/, ROW = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const LINK = /!?\[((?:[^[\]\\]|\\.)*)\]\([ \t]*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:[ \t]+"[^"]*")?[ \t]*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`|*]+/y, MARK = /[\\`*_~[!h\n]/g, PUNCTUATION = /[!-/:-@[-`{-~]/;

// The blocks of a text, in order: { from: where its first line begins, whole: whether that line has ended, node }.
function markdownBlocks(text, write) {
  const lines = [];
  for (let from = 0; from < text.length;) {
    let to = text.indexOf("\n", from), next = to + 1;
    if (to < 0) to = next = text.length;
    if (to - from > MOST_LINE) to = next = Math.max(text.lastIndexOf(" ", from + MOST_LINE), from + MOST_LINE / 2);
    lines.push({ from, to, whole: to < text.length });
    from = next;
  }
  return blocksOf({ text, write }, lines, 0);
}

function blocksOf(source, lines, depth) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const { from, whole } = lines[i], line = source.text.slice(from, lines[i].to);
    if (!line.trim()) { i++; continue; }
    const [node, next] = blockAt(source, lines, i, depth);
    blocks.push({ from, whole, node });
    i = next;
  }
  return blocks;
}

// The block that begins with line i, and the line behind it.
function blockAt(source, lines, i, depth) {
  const line = textOf(source, lines[i]);
  let found;
  if ((found = FENCE.exec(line))) return codeBlock(source, lines, i, found);
  if ((found = HEADING.exec(line))) return [html("h" + Math.min(6, found[1].length + 2), {}, ...inlineOf(source, [headingOf(source, lines[i], found[0].length)])), i + 1];
  if (RULE.test(line)) return [html("hr", {}), i + 1];
  if (depth < MOST_DEPTH && QUOTE.test(line)) return quotation(source, lines, i, depth);
  if (depth < MOST_DEPTH && ITEM.test(line)) return list(source, lines, i, depth);
  if (line.includes("|") && i + 1 < lines.length && textOf(source, lines[i + 1]).includes("-") && ROW.test(textOf(source, lines[i + 1]))) return table(source, lines, i);
  return paragraph(source, lines, i, depth);
}

const textOf = (source, line) => source.text.slice(line.from, line.to);

function begins(line, depth) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || (depth < MOST_DEPTH && (QUOTE.test(line) || ITEM.test(line)));
}

// Numbers other than 1 that begin a line of a paragraph are part of it: a year at the end of a sentence.
const interrupts = (line, depth) => begins(line, depth) && !/^ {0,3}(?!1[.)])\d/.test(line);

function paragraph(source, lines, i, depth) {
  const own = [];
  let size = 0;
  do {
    const indent = /^[ \t]*/.exec(textOf(source, lines[i]))[0].length;
    own.push({ from: lines[i].from + indent, to: lines[i].to });
    size += lines[i].to - lines[i].from;
    i++;
  } while (i < lines.length && size < MOST_BLOCK && textOf(source, lines[i]).trim() && !interrupts(textOf(source, lines[i]), depth));
  return [html("p", {}, ...inlineOf(source, own)), i];
}

function headingOf(source, line, marks) {
  const end = /[ \t]+#+[ \t]*$/.exec(textOf(source, line));
  return { from: line.from + marks, to: Math.max(line.from + marks, end ? line.from + end.index : line.to) };
}

function codeBlock(source, lines, i, [opening, fence, language]) {
  const indent = opening.search(/\S/), end = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}[ \\t]*$`), code = html("code", {});
  let next = i + 1;
  for (; next < lines.length && !end.test(textOf(source, lines[next])); next++) {
    const { from, to } = lines[next], spaces = Math.min(indent, textOf(source, lines[next]).search(/[^ ]|$/));
    if (next > i + 1) code.append("\n");
    code.append(...source.write(from + spaces, to));
  }
  const head = html("div", { class: "code-head" }, html("span", {}, language.slice(0, 40)), copyButton("Copy code", () => code.textContent));
  return [html("div", { class: "code" }, head, html("pre", { tabindex: "0" }, code)), Math.min(next + 1, lines.length)];
}

function quotation(source, lines, i, depth) {
  const own = [];
  for (let found; i < lines.length && (found = QUOTE.exec(textOf(source, lines[i]))); i++) own.push({ ...lines[i], from: lines[i].from + found[0].length });
  return [html("blockquote", {}, ...blocksOf(source, own, depth + 1).map((one) => one.node)), i];
}

function list(source, lines, i, depth) {
  const first = ITEM.exec(textOf(source, lines[i])), ordered = /\d/.test(first[2]), items = [];
  for (let found; i < lines.length && (found = ITEM.exec(textOf(source, lines[i]))) && /\d/.test(found[2]) === ordered && !RULE.test(textOf(source, lines[i]));) {
    const width = found[0].length - (found[3].length > 4 ? found[3].length - 1 : 0), own = [{ ...lines[i], from: lines[i].from + Math.min(width, found[0].length) }];
    let blank = false;
    for (i++; i < lines.length; i++) {
      const line = textOf(source, lines[i]), indent = line.search(/[^ ]|$/);
      if (line.trim() && indent < Math.min(width, 2) && (blank || begins(line, depth))) break;
      blank = !line.trim();
      own.push({ ...lines[i], from: lines[i].from + Math.min(indent, width) });
    }
    items.push(itemOf(source, own, depth));
  }
  return [html(ordered ? "ol" : "ul", ordered ? { start: parseInt(first[2], 10) } : {}, ...items), i];
}

// A first paragraph of an item stands on the line of its mark.
function itemOf(source, own, depth) {
  const nodes = blocksOf(source, own, depth + 1).map((one) => one.node);
  return html("li", {}, ...(nodes.length && nodes[0].tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
}

function table(source, lines, i) {
  const row = (line, tag) => html("tr", {}, ...cellsOf(source, line).map((cell) => html(tag, {}, ...inlineOf(source, [cell]))));
  const head = row(lines[i], "th"), body = [];
  for (i += 2; i < lines.length && textOf(source, lines[i]).includes("|"); i++) body.push(row(lines[i], "td"));
  return [html("div", { class: "scroll" }, html("table", {}, html("thead", {}, head), html("tbody", {}, ...body))), i];
}

function cellsOf(source, line) {
  const cells = [], text = textOf(source, line);
  let start = 0;
  for (let i = 0; i <= text.length; i++) {
    if (text[i] === "\\") { i++; continue; }
    if (i < text.length && text[i] !== "|") continue;
    const cell = text.slice(start, i), from = line.from + start + cell.search(/\S|$/);
    if (cell.trim() || (start && i < text.length)) cells.push({ from, to: from + cell.trim().length });
    start = i + 1;
  }
  return cells;
}

// Parts of a line

// The nodes of some lines, which are joined by breaks.
function inlineOf(source, lines) {
  const starts = [];
  let text = "";
  lines.forEach((line, i) => { starts.push(text.length + (i ? 1 : 0)); text += (i ? "\n" : "") + textOf(source, line); });
  let at = 0;
  const put = (from, to) => {
    const nodes = [];
    while (at > 0 && starts[at] > from) at--;
    while (from < to) {
      while (at + 1 < starts.length && starts[at + 1] <= from) at++;
      const end = starts[at] + lines[at].to - lines[at].from;
      if (from < end) nodes.push(...source.write(lines[at].from + from - starts[at], lines[at].from + Math.min(to, end) - starts[at]));
      if (to > end) nodes.push("\n");
      from = end + 1;
    }
    return nodes;
  };
  return spans({ text, put, none: {} }, 0, text.length, 0);
}

// The nodes between two places of a text: what has no marks of its own, and elements for what has.
function spans(inline, from, to, depth) {
  const { text, put } = inline, nodes = [];
  let plain = from;
  for (let i = from; i < to;) {
    MARK.lastIndex = i;
    const found = MARK.exec(text);
    if (!found || found.index >= to) break;
    i = found.index;
    const made = spanAt(inline, i, to, depth);
    if (!made) { i++; continue; }
    nodes.push(...put(plain, i), ...made.nodes);
    i = plain = made.to;
  }
  return [...nodes, ...put(plain, to)];
}

function spanAt(inline, i, to, depth) {
  const sign = inline.text[i];
  if (sign === "\\") return i + 1 < to && PUNCTUATION.test(inline.text[i + 1]) ? { nodes: inline.put(i + 1, i + 2), to: i + 2 } : null;
  if (sign === "`") return codeAt(inline, i, to);
  if (sign === "[" || sign === "!") return linkAt(inline, i, to, depth);
  if (sign === "h") return depth < MOST_DEPTH ? addressAt(inline, i, to) : null;
  return sign === "\n" ? null : emphasisAt(inline, i, to, depth);
}

// How often the sign at a place comes there in a row.
const runAt = (text, i, to) => { let end = i; while (end < to && text[end] === text[i]) end++; return end - i; };

function codeAt({ text, put, none }, i, to) {
  const run = runAt(text, i, to), whole = { nodes: put(i, i + run), to: i + run };
  if (none["`" + run + " " + to]) return whole; // looked for before, from further up
  for (let end = i + run; (end = text.indexOf("`", end)) >= 0 && end < to;) {
    const other = runAt(text, end, to);
    if (other === run) {
      const inset = text[i + run] === " " && text[end - 1] === " " && end - i - run > 2 ? 1 : 0;
      return { nodes: [html("code", {}, ...put(i + run + inset, end - inset))], to: end + run };
    }
    end += other;
  }
  none["`" + run + " " + to] = true;
  return whole;
}

function linkAt(inline, i, to, depth) {
  LINK.lastIndex = i;
  const found = LINK.exec(inline.text);
  if (!found || i + found[0].length > to || depth >= MOST_DEPTH) return null;
  const address = safeAddress(found[2]), start = i + found[0].indexOf("[") + 1, end = start + found[1].length;
  if (!address) return { nodes: inline.put(i, i + found[0].length), to: i + found[0].length };
  const label = found[1].trim() ? spans(inline, start, end, MOST_DEPTH) : [address];
  return { nodes: [anchor(address, label)], to: i + found[0].length };
}

function addressAt({ text, put }, i, to) {
  ADDRESS.lastIndex = i;
  const found = /\w/.test(text[i - 1] || "") ? null : ADDRESS.exec(text);
  if (!found) return null;
  const end = Math.min(to, i + found[0].replace(/[.,;:!?)\]]+$/, "").length), address = safeAddress(text.slice(i, end));
  return address ? { nodes: [anchor(address, put(i, end))], to: end } : null;
}

function safeAddress(text) {
  let address;
  try { address = new URL(text); } catch { return null; }
  return ["http:", "https:", "mailto:"].includes(address.protocol) ? address.href : null;
}

const anchor = (address, label) => html("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, ...label);

function emphasisAt(inline, i, to, depth) {
  const { text, none } = inline, sign = text[i], run = runAt(text, i, to), size = Math.min(run, 2), mark = sign.repeat(size);
  const whole = { nodes: inline.put(i, i + run), to: i + run };
  if ((sign === "~" && run !== 2) || depth >= MOST_DEPTH || i + run >= to || /\s/.test(text[i + run])) return whole;
  if (sign === "_" && /[\p{L}\p{N}_]/u.test(text[i - 1] || "")) return whole;
  const end = none[mark + to] ? -1 : closing(text, i + size, to, sign, size);
  if (end < 0) { none[mark + to] = true; return whole; }
  return { nodes: [html({ "~": "del" }[sign] || (size === 2 ? "strong" : "em"), {}, ...spans(inline, i + size, end, depth + 1))], to: end + size };
}

// Where a mark is closed; -1 where it is not.
function closing(text, from, to, sign, size) {
  for (let i = from; i < to; i++) {
    if (text[i] === "\\") { i++; continue; }
    if (text[i] === "`") {
      const run = runAt(text, i, to), end = text.indexOf("`".repeat(run), i + run);
      i = end >= 0 && end < to ? end + run - 1 : i + run - 1;
      continue;
    }
    if (text[i] !== sign) continue;
    const run = runAt(text, i, to), ends = run >= size && (run === size || run > 2) && i > from && !/\s/.test(text[i - 1]);
    if (ends && !(sign === "_" && /[\p{L}\p{N}]/u.test(text[i + run] || ""))) return i + (run > 2 ? run - size : 0);
    i += run - 1;
  }
  return -1;
}

// Copying

function copyButton(label, text) {
  const button = html("button", { type: "button", class: "copy" }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copied(text())) ? "Copied" : "The browser does not allow it";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

// Browsers have `navigator.clipboard` for addresses on this machine and for https alone.
async function copied(text) {
  try {
    if (navigator.clipboard) { await navigator.clipboard.writeText(text); return true; }
  } catch { return false; }
  const box = html("textarea", { "aria-hidden": "true", class: "aside" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}
