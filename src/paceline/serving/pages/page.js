"use strict";
// The live page. In: `page/state`, asked once a second while somebody sees it, and the chat's own stream. Both come from this server.
// All that is kept has a bound: figures of the last minutes in rings, and of an answer the last texts.

const EVERY = 1000, KEPT = 120, SMOOTH = 5, GAP = 3, RECENT = 10, DRAFTERS = 8;
const MOST_SPANS = 1200, MOST_CHARACTERS = 100000, MOST_MESSAGES = 40;
const POSITIONS = [["1", 0, 1], ["2", 1, 2], ["3\u20134", 2, 4], ["5\u20138", 4, 8], ["9\u201316", 8, 16]];
const KEY = "paceline-key";
let names = [], texts = {};
let state = null, before = null, timer = null, chosen = "", seen = null, drafts = 0, chats = true;

// Where drafters take their drafts from, in a user's words, and what it means that one finds none.
const REPEATS = ["repeated text", "nothing repeats that was written before"], SMALL_MODEL = ["a smaller model"], LAYERS = ["the first layers of the model"];
const HEAD = ["a head trained for the model"], GUESSES = ["guesses of the model itself"], TEXTS = ["a collection of texts", "the texts hold nothing like it"];
const DIFFUSION = ["a diffusion model"];
const SOURCES = {
  ngram: REPEATS, suffix: REPEATS, copyspec: REPEATS, token_recycling: ["what followed the same tokens before"], rest: TEXTS, rasd: TEXTS, aded: ["word counts of texts"],
  prediction: ["the answer that the request expects", "no request says which answer it expects"],
  grammar: ["what the request's grammar prescribes", "no request prescribes a grammar, or it leaves a choice"],
  draft_model: SMALL_MODEL, encdec_draft: ["a few of the model's own layers"], pearl: SMALL_MODEL, s2d: SMALL_MODEL, easyspec: SMALL_MODEL, pard: SMALL_MODEL, tli: SMALL_MODEL, slem: SMALL_MODEL, specmquant: SMALL_MODEL,
  quantized_copy: ["a rounded copy of the model"], layer_skip: LAYERS, swift: LAYERS, del: LAYERS, kangaroo: LAYERS, m2r2: LAYERS,
  medusa: HEAD, hydra: HEAD, "hydra++": HEAD, clover: HEAD, chimera: HEAD, hidden_transfer: HEAD, ppd: ["trained prompt tokens in the model's own pass"], lud: ["placeholders in the model's own pass"], mlp_speculator: HEAD, eagle: HEAD, eagle2: HEAD, fspad: HEAD, eagle3: HEAD, dovetail: HEAD, p_eagle: HEAD, falcon: HEAD, longspec: HEAD, dflash: HEAD, dspark: HEAD,
  mtp: ["a module for multi-token prediction"],
  lookahead: GUESSES, jacobi: GUESSES, diffuspec: DIFFUSION, deer: DIFFUSION,
};

// The last values of a figure, oldest first.
class Ring {
  constructor(size) { this.values = new Float64Array(size).fill(NaN); this.start = 0; }
  push(value) { this.values[this.start] = value; this.start = (this.start + 1) % this.values.length; }
  get size() { return this.values.length; }
  at(index) { return this.values[(this.start + index) % this.values.length]; }
  // The sum of the last `count` values up to `index`, those without one left out.
  sum(index, count) {
    let found = 0;
    for (let i = Math.max(0, index - count + 1); i <= index; i++) if (this.at(i) > 0) found += this.at(i);
    return found;
  }
}

// A part of a whole, both in rings, smoothed.
class Rate {
  constructor() { this.part = new Ring(KEPT); this.whole = new Ring(KEPT); }
  push(part, whole) { this.part.push(part); this.whole.push(whole); }
  at(index) {
    if (!(this.whole.at(index) > 0)) return NaN;
    return this.part.sum(index, SMOOTH) / this.whole.sum(index, SMOOTH);
  }
  // The last moments that had something.
  recent() {
    let part = 0, whole = 0, count = 0;
    for (let i = KEPT - 1; i >= 0 && count < RECENT; i--) {
      if (this.whole.at(i) > 0) { part += this.part.at(i); whole += this.whole.at(i); count++; }
    }
    return whole ? part / whole : NaN;
  }
}

const speed = new Rate(), plain = new Rate(), saved = new Rate(), whole = new Rate();
const checkCost = new Rate(), checkTokens = new Rate();
const byDrafter = new Map(), byPosition = POSITIONS.map(() => new Rate());
// Of a drafter: which part of its tokens is accepted, how far it drafts ahead, in which part of the steps, and how often it is asked and finds something.
const drafterRates = () => ({ accepted: new Rate(), ahead: new Rate(), used: new Rate(), asked: new Rate(), found: new Rate() });
const allRates = () => [speed, plain, saved, whole, checkCost, checkTokens, ...[...byDrafter.values()].flatMap((one) => Object.values(one)), ...byPosition];

// Charts: a line for each rate over the last minutes.

class Chart {
  constructor(id, label, format, top) {
    this.place = at(id); this.label = label; this.format = format; this.top = top; this.lines = []; this.width = 0;
    this.picture = svg("svg", { class: "plot", role: "img", "aria-label": label });
    this.legend = html("ul", { class: "legend" });
    this.place.append(this.picture, this.legend);
    new ResizeObserver(() => this.draw()).observe(this.place);
  }

  // series: [name, rate, colour, dashed] each.
  show(series) {
    this.series = series;
    if (this.lines.length !== series.length || series.some(([name], i) => this.lines[i].name !== name)) this.begin();
    this.draw();
  }

  begin() {
    this.lines = this.series.map(([name, , paint, dashed]) => {
      const dash = dashed ? "5 3" : null, value = html("b", {});
      const key = svg("svg", { class: "key", "aria-hidden": "true", style: `--c:${paint}` }, svg("line", { x1: 0, x2: 18, y1: 4, y2: 4, "stroke-dasharray": dash }));
      const item = html("li", {}, key, name + " ", value);
      return { name, value, item, line: svg("path", { class: "series", style: `--c:${paint}`, "stroke-dasharray": dash }) };
    });
    fill(this.legend, ...this.lines.map((one) => one.item));
    this.width = 0;
  }

  frame(width, height) {
    const { left, right, top, bottom } = Chart.inset;
    this.marks = [0, 0.5, 1].map((share) => {
      const y = top + (height - top - bottom) * (1 - share), text = svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" });
      return { share, text, line: svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }) };
    });
    const when = (share, text, anchor) => svg("text", { x: left + (width - left - right) * share, y: height - 3, "text-anchor": anchor }, text);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    fill(this.picture, ...this.marks.flatMap((one) => [one.line, one.text]), ...this.lines.map((one) => one.line),
      when(0, "2 min ago", "start"), when(1, "now", "end"));
    this.width = width;
  }

  draw() {
    const width = this.place.clientWidth, height = 160, { left, right, top, bottom } = Chart.inset;
    if (!this.series || width < 40) return;
    if (width !== this.width) this.frame(width, height);
    let most = this.top || 0;
    if (!this.top) for (const [, rate] of this.series) for (let i = 0; i < KEPT; i++) if (rate.at(i) > most) most = rate.at(i);
    most = this.top || round_up(most);
    for (const one of this.marks) one.text.textContent = this.format(one.share * most);
    this.series.forEach(([name, rate], number) => {
      let path = "", last = -KEPT;
      for (let i = 0; i < KEPT; i++) {
        const value = rate.at(i);
        if (!(value >= 0)) continue;
        const x = left + ((width - left - right) * i) / (KEPT - 1), y = top + (height - top - bottom) * (1 - Math.min(value / most, 1));
        path += i - last > GAP ? `M${(x - 1).toFixed(1)} ${y.toFixed(1)}h2` : `L${x.toFixed(1)} ${y.toFixed(1)}`;
        last = i;
      }
      this.lines[number].line.setAttribute("d", path);
      this.lines[number].value.textContent = this.format(rate.recent());
    });
    this.picture.setAttribute("aria-label", `${this.label}: ${this.series.map(([name, rate]) => `${name} ${this.format(rate.recent())}`).join(", ")}`);
  }
}
Chart.inset = { left: 44, right: 8, top: 8, bottom: 20 };

function round_up(value) {
  if (!(value > 0)) return 10;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * unit).find((one) => one >= value);
}

const percent = (value) => (value >= 0 ? Math.round(100 * value) + "\u00a0%" : "\u2013");
const number = (value) => (value >= 0 ? (value < 10 && !Number.isInteger(value) ? value.toFixed(1) : Math.round(value).toLocaleString("en")) : "\u2013");

let charts = null;

// What the server told

function take(found) {
  state = found;
  chats = found.chat;
  const counts = found.counts;
  if (counts) {
    if (before && counts.began === before.began) learn(counts, before);
    else for (const rate of allRates()) rate.push(0, 0);
    before = counts;
  }
  drawHead();
  drawRequests();
  drawStep();
  if (counts) { drawPlan(); drawCharts(); }
}

function learn(now, last) {
  const more = (key) => now[key] - last[key];
  speed.push(more("tokens"), more("seconds"));
  plain.push(more("priced_tokens"), more("plain_seconds"));
  saved.push(more("plain_seconds"), more("priced_seconds"));
  checkCost.push(more("check_seconds"), more("check_plain"));
  checkTokens.push(more("check_tokens"), more("checks"));
  const all = { verified: 0, accepted: 0, tried: new Float64Array(16), reached: new Float64Array(16) };
  for (const [name, one] of Object.entries(now.drafters)) {
    const was = last.drafters[name];
    if (!byDrafter.has(name) && byDrafter.size < DRAFTERS) byDrafter.set(name, drafterRates());
    for (const key of ["verified", "accepted"]) all[key] += one[key] - (was ? was[key] : 0);
    for (const key of ["tried", "reached"]) one[key].forEach((value, i) => { all[key][i] += value - (was ? was[key][i] : 0); });
  }
  whole.push(all.accepted, all.verified);
  for (const [name, rates] of byDrafter) learnDrafter(rates, now.drafters[name], last.drafters[name], more("steps"));
  POSITIONS.forEach(([, from, to], i) => {
    const sum = (values) => values.subarray(from, to).reduce((a, b) => a + b, 0);
    byPosition[i].push(sum(all.reached), sum(all.tried));
  });
}

function learnDrafter(rates, now, last, steps) {
  const more = (key) => (now ? now[key] - (last ? last[key] : 0) : 0);
  const tried = now ? now.tried.map((value, i) => value - (last ? last.tried[i] : 0)) : [0], used = Math.max(...tried);
  rates.accepted.push(more("accepted"), more("verified"));
  rates.ahead.push(tried.reduce((a, b) => a + b, 0), used);
  rates.used.push(used, steps);
  rates.asked.push(more("asked"), steps);
  rates.found.push(more("proposed"), more("asked"));
}

const paint = (name) => { const source = state.drafters.indexOf(name); return colour(source < 0 ? null : source); };

function drawHead() {
  const scope = state.admin ? "requests of all keys" : "";
  const method = state.drafters.length ? `${state.controller} controller, drafts by ${state.drafters.join(", ")}` : "plain decoding";
  const setup = [state.model, state.counts ? method : "a diffusion model, which drafts nothing", ...state.learning, scope].filter(Boolean).join(" \u00b7 ");
  if (at("setup").textContent !== setup) {
    at("setup").textContent = setup;
    at("made").textContent = `paceline ${state.version}.`;
    at("chat-title").textContent = chats ? "Chat" : "Text";
    at("system-part").hidden = !chats;
    at("saved").parentNode.hidden = !state.counts;
    at("question-label").textContent = chats ? "Message (Enter sends, Shift and Enter begins a line)" : "Beginning of a text that the model continues (Enter sends)";
    fill(at("colours"), ...state.drafters.slice(0, DRAFTERS).map((name) => html("li", {}, html("span", { class: "swatch", style: `--c:${paint(name)}` }), name)),
      state.drafters.length ? html("li", {}, "uncoloured: by the model itself") : "");
  }
  const faster = saved.recent(), rows = [];
  if (state.counts) {
    rows.push(["Real rate", number(speed.recent()), "tokens/s"], ["Plain decoding", number(plain.recent()), "tokens/s"],
      ["Speedup", faster >= 0 ? faster.toFixed(2) + "\u00d7" : "\u2013"], ["Saved in this chat", savedFigure()], ["Drafts accepted", percent(whole.recent())]);
  }
  rows.push(["Running, waiting", `${number(state.running)}, ${number(state.waiting)}`]);
  const figures = at("figures");
  if (figures.children.length !== rows.length) fill(figures, ...rows.map(([name, , unit]) => html("div", {}, html("dt", {}, name), html("dd", {}, html("span", {}), unit ? html("small", {}, " " + unit) : null))));
  rows.forEach(([, value], i) => { figures.children[i].querySelector("dd span").textContent = value; });
}

// Saved in this conversation

const sum = { tokens: 0, steps: 0, priced_tokens: 0, priced_seconds: 0, plain_seconds: 0, written: 0 };
const seconds = (value) => (Math.abs(value) < 9.95 ? Math.abs(value).toFixed(1) : Math.round(Math.abs(value)).toLocaleString("en")) + "\u00a0s";
const gain = (one) => one.plain_seconds - one.priced_seconds;
const NOTHING = 0.05; // seconds, which are shown as 0.0

function savedFigure() {
  if (!sum.priced_tokens) return "\u2013";
  return gain(sum) < NOTHING ? "nothing" : seconds(gain(sum));
}

// Adds an answer's sums; `written` of its tokens were written, which are more where nobody looked meanwhile.
function addAnswer(found, written) {
  sum.written += written;
  if (found) for (const key of Object.keys(found)) if (key in sum) sum[key] += found[key];
}

function savedWords() {
  if (!state.drafters.length) return ["This server drafts nothing: it was started without drafts."];
  if (!sum.written) return ["What drafting saves in this conversation is told here once there is an answer."];
  if (!sum.tokens) return ["The steps of this conversation were not seen, so that nothing is known of what drafting saved."];
  const parts = [`This conversation: ${plural(sum.tokens, "token")} in ${plural(sum.steps, "step")}`], fewer = sum.tokens - sum.steps;
  if (sum.written > sum.tokens) parts.push(` (of ${sum.written} tokens; the others were not seen)`);
  if (!sum.priced_tokens) return [...parts, ". What a step without drafts takes is not measured yet."];
  const part = sum.priced_tokens < sum.tokens ? ` for the ${sum.priced_tokens} of them whose plain time is known` : "";
  parts.push(`, which took ${seconds(sum.priced_seconds)}${part}; plain decoding would have taken ${seconds(sum.plain_seconds)}. `);
  const time = gain(sum);
  if (time >= NOTHING) return [...parts, html("b", {}, `Drafting saved ${seconds(time)} and ${plural(fewer, "step")}`), ` (${share(time, sum.plain_seconds)} of the time).`];
  const slower = time > -NOTHING ? "" : `, and cost ${seconds(time)}`;
  return [...parts, html("b", {}, `Drafting saved nothing${slower}`), fewer ? `: ${plural(fewer, "step")} fewer, but steps with drafts take longer.` : ": no draft was accepted."];
}

// The plan

// What a drafter does lately, or did before it was `paused`; null where it was not asked, or has nothing that it could look in.
function planLine(name, rates, paused) {
  const [from, none] = SOURCES[name] || [], source = from ? ` from ${from}` : "", who = html("b", {}, name);
  if (rates.used.recent() >= 0.005) {
    const ahead = Math.max(1, Math.round(rates.ahead.recent()));
    const [drafts, are] = paused ? ["drafted", "were"] : ["drafts", "are"];
    return [who, ` ${drafts} ${plural(ahead, "token")} ahead${source}, in ${percent(rates.used.recent())} of the steps; ${percent(rates.accepted.recent())} of them ${are} right.`];
  }
  if (!(rates.asked.recent() >= 0.1)) return null;
  if (rates.found.recent() > 0) return [who, ` finds drafts${source}, but checking them would cost more than they would bring.`];
  return [who, ` finds nothing to draft: ${none || "it has no guess"}.`];
}

function planLines() {
  if (!state.drafters.length) return [["Nothing is drafted: every step gives one token."]];
  if (!(speed.recent() > 0)) return [["Nothing was decoded yet while this page looked."]];
  const lines = [], said = state.words && !state.words.includes("last token") ? /^Nothing is drafted.*/m.exec(state.words) : null;
  if (said) lines.push([said[0]]);
  const told = [...byDrafter].map(([name, rates]) => [name, planLine(name, rates, Boolean(said))]), resting = told.filter(([, line]) => !line).map(([name]) => name);
  lines.push(...told.map(([, line]) => line).filter(Boolean));
  if (resting.length) lines.push([html("b", {}, resting.join(", ")), resting.length > 1 ? " rest at present." : " rests at present."]);
  if (checkCost.recent() > 0) lines.push([`A step that checks drafts takes as long as ${checkCost.recent().toFixed(1)} plain steps and gives ${checkTokens.recent().toFixed(1)} tokens; a plain one gives 1.`]);
  const faster = saved.recent();
  if (faster >= 1.02) lines.push([`All in all decoding is ${faster.toFixed(2)} times as fast as without drafts.`]);
  else if (faster >= 0.98) lines.push(["All in all decoding is about as fast as without drafts."]);
  else if (faster >= 0) lines.push([`All in all decoding has ${faster.toFixed(2)} of the speed that it would have without drafts.`]);
  return lines;
}

function drawPlan() {
  fill(at("saved"), ...savedWords());
  fill(at("plan"), ...planLines().map((parts) => html("li", {}, ...parts)));
  names = state.drafters;
  drawWords({ words: state.words });
}

function drawCharts() {
  charts ||= {
    speed: new Chart("speed", "tokens per second over the last two minutes", number, 0),
    drafters: new Chart("drafters", "share of drafted tokens accepted, by drafter", percent, 1),
    positions: new Chart("positions", "share of steps whose draft was accepted, by position", percent, 1),
  };
  charts.speed.show([["real", speed, "var(--d0)"], ["plain decoding would make", plain, "var(--muted)", true]]);
  charts.drafters.show([...byDrafter].filter(([, rates]) => rates.accepted.recent() >= 0).map(([name, rates]) => [name, rates.accepted, paint(name)]));
  charts.positions.show(POSITIONS.map(([name], i) => [i ? name : "position " + name, byPosition[i], `var(--d${i})`, i % 2 === 1]));
}

function drawRequests() {
  const list = at("request"), found = state.requests.map((one) => one.id);
  if (chosen && !found.includes(chosen)) found.push(chosen);
  const wanted = ["", ...found], have = [...list.options].map((one) => one.value);
  if (document.activeElement === list || wanted.join("\n") === have.join("\n")) return;
  const owner = (id) => { const one = state.requests.find((other) => other.id === id); return state.admin && one ? ` (${one.owner || "no key"})` : ""; };
  fill(list, ...wanted.map((id) => html("option", { value: id, selected: id === chosen }, id ? id + owner(id) : "the newest")));
}

function drawStep() {
  const tree = state.tree, mark = tree && [tree.id, tree.tokens, tree.ended].join(" ");
  if (!tree || mark === seen) return;
  if (seen !== null && tree.drafts < drafts) return; // the last one that had drafts stays, also where the server has forgotten it
  seen = mark;
  drafts = tree.drafts;
  names = tree.drafters;
  texts = tree.texts;
  const step = tree.step;
  let picked = null;
  const { picture, plan } = drawTree(step, texts, (one, group) => {
    if (picked) picked.classList.remove("picked");
    picked = group;
    group.classList.add("picked");
    fill(at("detail"), ...describe(one.node, step));
  });
  const since = tree.at < tree.tokens ? `; the tree is of token ${tree.at}` : "";
  const area = fill(at("tree"), picture), end = plan.all.find((one) => one.kind === "own") || plan.end;
  area.scrollLeft = Math.max(0, end.x + end.width + 24 - area.clientWidth);
  at("legend").hidden = false;
  fill(at("detail"), `Request ${tree.id}, ${tree.ended ? "ended after" : "so far"} ${plural(tree.tokens, "token")}${since}.${tree.readable ? "" : " Its texts are hidden."}`);
  fill(at("outcome"), ...(tree.readable ? outcome(step) : [`${plural(step.nodes.length, "drafted token")}; ${count(step, "accepted", "ended") || "none"} accepted.`]));
  if (at("as-table").open) drawNodes(step);
}

// Asking

const stored = () => sessionStorage.getItem(KEY) || "";
const headers = (more) => ({ ...more, ...(stored() ? { Authorization: "Bearer " + stored() } : {}) });

function needKey(text) {
  at("door").hidden = false;
  at("live").hidden = true;
  at("setup").textContent = "A key is needed.";
  at("trouble").textContent = text;
  if (document.activeElement === document.body) at("key").focus();
}

async function askState(answer) {
  return fetch(`page/state?request=${encodeURIComponent(chosen)}&answer=${encodeURIComponent(answer)}`, { headers: headers(), cache: "no-store" });
}

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  let again = true;
  try {
    const answer = await askState("");
    if (answer.status === 401) {
      again = false;
      needKey(stored() ? "The server does not know this key." : "");
    } else if (!answer.ok) throw new Error("it answers " + answer.status);
    else {
      const found = await answer.json(), entered = at("door").contains(document.activeElement);
      at("door").hidden = true;
      at("live").hidden = false;
      at("forget").hidden = !stored();
      if (entered) at("question").focus();
      if (at("trouble").textContent) at("trouble").textContent = "";
      take(found);
    }
  } catch (error) {
    at("trouble").textContent = `The server cannot be reached (${error.message}); asking again.`;
  }
  document.documentElement.dataset.ready = String(Number(document.documentElement.dataset.ready || 0) + 1);
  clearTimeout(timer);
  if (again) timer = setTimeout(look, EVERY);
}

// Chat

let conversation = [], running = null;

const nearEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

// Keeps the end of the conversation in view where its height changes with what stands beside it.
function followEnd(log) {
  let follows = true;
  log.addEventListener("scroll", () => { follows = nearEnd(log); });
  new ResizeObserver(() => { if (follows) log.scrollTop = log.scrollHeight; }).observe(log);
}

// An answer as it streams, as Markdown, each piece coloured by its drafter. `text` is what may still change: from the beginning of the last
// block on; the blocks before it stay as they are drawn. Old pieces lose their colour, and at last are dropped.
class Answer {
  constructor(log) {
    this.log = log; this.box = html("div", { class: "answer" }); this.sum = html("div", { class: "sum" });
    this.text = ""; this.pieces = []; this.last = []; this.waiting = []; this.drawn = false; this.pause = 40;
    log.append(html("div", { class: "who" }, chats ? "Model" : "Continuation"), this.box, this.sum);
  }

  add(pieces) {
    this.waiting.push(...pieces);
    if (!this.drawn) { this.drawn = true; setTimeout(() => this.draw(), this.pause); }
  }

  draw() {
    const began = performance.now(), near = nearEnd(this.log);
    this.drawn = false;
    for (const { text, drafter } of this.waiting.splice(0)) this.push(shown(text), drafter);
    const blocks = (chats ? markdownBlocks : plainBlocks)(this.text, (from, to) => this.coloured(from, to));
    let first = blocks.length - 1; // of the blocks that may still change
    while (first > 0 && !blocks[first].whole) first--;
    this.last.forEach((one) => one.remove());
    this.box.append(...blocks.map((one) => one.node));
    this.last = blocks.slice(Math.max(0, first)).map((one) => one.node);
    if (first > 0) this.cut(blocks[first].from);
    this.bound();
    if (near) this.log.scrollTop = this.log.scrollHeight;
    this.pause = Math.max(40, 8 * (performance.now() - began)); // an eighth of the time at most
  }

  push(text, drafter) {
    const last = this.pieces[this.pieces.length - 1];
    this.text += text;
    if (last && last.drafter === drafter) last.end = this.text.length;
    else this.pieces.push({ end: this.text.length, drafter });
    if (this.pieces.length > MOST_SPANS) { this.pieces.splice(0, MOST_SPANS / 2); this.pieces[0].drafter = null; }
  }

  // Forgets the text before a place.
  cut(from) {
    this.text = this.text.slice(from);
    for (const piece of this.pieces) piece.end -= from;
    this.pieces = this.pieces.filter((piece) => piece.end > 0);
  }

  // The nodes of a part of the text.
  coloured(from, to) {
    const nodes = [];
    let low = 0, high = this.pieces.length;
    while (low < high) { const middle = (low + high) >> 1; if (this.pieces[middle].end > from) high = middle; else low = middle + 1; }
    for (; from < to; low++) {
      const { end, drafter } = this.pieces[low], text = this.text.slice(from, Math.min(end, to));
      nodes.push(drafter === null ? text : html("span", { class: "drafted", style: `--c:${paint(drafter)}`, title: `drafted by ${drafter}, accepted` }, text));
      from = end;
    }
    return nodes;
  }

  bound() {
    const spans = this.box.getElementsByClassName("drafted");
    if (spans.length > MOST_SPANS) {
      const old = [...spans].slice(0, spans.length - MOST_SPANS / 2), around = new Set(old.map((one) => one.parentNode));
      for (const span of old) span.replaceWith(...span.childNodes);
      for (const one of around) one.normalize();
    }
    if (this.text.length > MOST_CHARACTERS) { // one block; its first line says what it is
      const line = this.text.slice(0, Math.min(100, this.text.indexOf("\n") + 1)) + "\u2026\n";
      this.text = line + this.text.slice(-MOST_CHARACTERS / 2);
      this.pieces = [{ end: this.text.length, drafter: null }];
    }
    let size = this.box.textContent.length;
    while (size > MOST_CHARACTERS && this.box.childNodes.length > this.last.length) {
      size -= this.box.firstChild.textContent.length;
      this.box.firstChild.remove();
    }
  }

  end(text, bad, content) {
    this.draw();
    fill(this.sum, html("span", {}, text), content ? copyButton("Copy answer", () => content) : null);
    this.sum.classList.toggle("bad", Boolean(bad));
    this.log.scrollTop = this.log.scrollHeight;
  }
}

// The blocks of a text that is no Markdown: its lines.
function plainBlocks(text, write) {
  const blocks = [];
  for (let from = 0; from < text.length;) {
    const line = text.indexOf("\n", from), to = Math.min(line < 0 ? text.length : line, from + MOST_LINE), whole = to < text.length;
    blocks.push({ from, whole, node: html("div", { class: "plain" }, ...(from < to ? write(from, to) : ["\u200b"])) });
    from = to === line ? to + 1 : to;
  }
  return blocks;
}

// A text that grows: small pieces are joined, since a browser keeps sums of strings as trees of them.
class Growing {
  constructor() { this.joined = []; this.pieces = []; }
  add(piece) { if (this.pieces.push(piece) > 200) this.joined.push(this.pieces.splice(0).join("")); }
  get all() { return this.joined.join("") + this.pieces.join(""); }
}

function trim() {
  const log = at("log");
  while (conversation.length > MOST_MESSAGES) conversation.splice(0, 2); // a question with its answer: many templates want them in turn
  while (log.querySelectorAll(".who").length > MOST_MESSAGES) {
    do log.firstChild.remove(); while (log.firstChild && !log.firstChild.classList.contains("who"));
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function problem(answer) {
  try { return (await answer.json()).error.message; } catch { return "the server answers " + answer.status; }
}

function asked(text) {
  const body = { stream: true, stream_options: { include_usage: true, include_segments: true } };
  if (at("temperature").value !== "") body.temperature = Number(at("temperature").value);
  if (!chats) return ["v1/completions", { ...body, prompt: text, max_tokens: 256 }];
  conversation.push({ role: "user", content: text });
  trim();
  const system = at("system").value.trim();
  return ["v1/chat/completions", { ...body, messages: system ? [{ role: "system", content: system }, ...conversation] : conversation }];
}

async function send(text) {
  const log = at("log"), [path, body] = asked(text);
  log.append(html("div", { class: "who" }, chats ? "You" : "Beginning"), html("div", { class: "asked" }, shown(text)));
  const answer = new Answer(log), stop = (running = new AbortController());
  log.scrollTop = log.scrollHeight;
  busy(true);
  const content = new Growing(), began = performance.now();
  let usage = null, wrong = "", request = "", first = 0;
  try {
    const reply = await fetch(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal: stop.signal });
    if (!reply.ok) throw new Error(await problem(reply));
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      request = event.engine_request || request;
      for (const choice of event.choices || []) {
        if (choice.delta && choice.delta.content) content.add(choice.delta.content);
        else if (choice.text) content.add(choice.text);
        if (choice.segments && choice.segments.length) { first ||= performance.now(); answer.add(choice.segments); }
      }
    }
  } catch (error) {
    wrong = error.name === "AbortError" ? "Stopped." : error.message;
  }
  const sums = request ? await sumsOf(request) : null, written = usage ? usage.completion_tokens : sums ? sums.tokens : 0;
  const facts = told(usage, first - began, performance.now() - began, sums);
  answer.end([wrong, facts].filter(Boolean).join(" "), wrong && wrong !== "Stopped.", content.all);
  if (running !== stop) return;
  addAnswer(sums, written);
  if (state.counts) { drawHead(); drawPlan(); }
  if (chats && content.all) conversation.push({ role: "assistant", content: content.all });
  else if (chats) conversation.pop();
  busy(false, wrong || "The answer is complete.");
}

// What the server has counted of the steps of a request; null where it did not look.
async function sumsOf(request) {
  try {
    const answer = await askState(request);
    return answer.ok ? (await answer.json()).answer : null;
  } catch { return null; } // the server is away, which `look` tells
}

// What is known of an answer. `first`, `all`: milliseconds until its first token, and until its end.
function told(usage, first, all, sums) {
  if (!usage) return "";
  const { completion_tokens: tokens, prompt_tokens: prompt, speculative, prompt_tokens_details: details } = usage;
  const drafted = speculative ? speculative.num_accepted_tokens : 0, cached = details ? details.cached_tokens : 0;
  const parts = [`${plural(tokens, "token")}, ${drafted} of them drafted (${share(drafted, tokens)})`];
  if (first > 0) parts.push(`${seconds(all / 1000)} (${number((1000 * tokens) / all)} tokens/s), the first token after ${(first / 1000).toFixed(2)}\u00a0s`);
  parts.push(cached ? `${cached} of ${plural(prompt, "prompt token")} from the cache` : `${plural(prompt, "prompt token")}, none from the cache`);
  if (sums && sums.priced_tokens && state.drafters.length) parts.push(gain(sums) >= NOTHING ? `drafting saved ${seconds(gain(sums))}` : "drafting saved nothing");
  return parts.join(" \u00b7 ") + ".";
}

function busy(on, text) {
  const here = [document.body, at("stop")].includes(document.activeElement); // a button that is disabled loses the focus
  at("send").disabled = on;
  at("stop").disabled = !on;
  at("said").textContent = on ? "Answering \u2026" : text;
  if (!on) { running = null; if (here) at("question").focus(); }
}

function submit(event) {
  event.preventDefault();
  const text = at("question").value;
  if (running || !text.trim()) return;
  at("question").value = "";
  send(text);
}

function clear() {
  if (running) { const old = running; running = null; old.abort(); }
  conversation = [];
  for (const key of Object.keys(sum)) sum[key] = 0;
  fill(at("log"));
  busy(false, "");
  if (state.counts) { drawHead(); drawPlan(); }
  at("question").focus();
}

function listen() {
  at("door").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, at("key").value.trim());
    at("key").value = "";
    look();
  });
  at("forget").addEventListener("click", () => { sessionStorage.removeItem(KEY); location.reload(); });
  at("request").addEventListener("change", () => { chosen = at("request").value; seen = null; look(); });
  at("as-table").addEventListener("toggle", () => { if (at("as-table").open && state && state.tree) drawNodes(state.tree.step); });
  at("ask").addEventListener("submit", submit);
  at("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("ask").requestSubmit(); // so that the browser checks the temperature
  });
  at("stop").addEventListener("click", () => running && running.abort());
  at("clear").addEventListener("click", clear);
  document.addEventListener("visibilitychange", look);
}

startTheme();
listen();
followEnd(at("log"));
look();
