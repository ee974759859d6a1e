"use strict";
// The live page. In: `page/state`, asked once a second while somebody sees it, and the chat's own stream. Both come from this server.
// All that is kept has a bound: figures of the last minutes in rings, and of an answer the last texts.

const EVERY = 1000, KEPT = 120, SMOOTH = 5, GAP = 3, RECENT = 10, DRAFTERS = 8;
const MOST_SPANS = 1200, MOST_CHARACTERS = 100000, MOST_MESSAGES = 40;
const POSITIONS = [["1", 0, 1], ["2", 1, 2], ["3\u20134", 2, 4], ["5\u20138", 4, 8], ["9\u201316", 8, 16]];
const KEY = "paceline-key";
let names = [], texts = {};
let state = null, before = null, timer = null, chosen = "", seen = null, chats = true;

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
const byDrafter = new Map(), byPosition = POSITIONS.map(() => new Rate());

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
    else for (const rate of [speed, plain, saved, whole, ...byDrafter.values(), ...byPosition]) rate.push(0, 0);
    before = counts;
  }
  drawHead();
  drawRequests();
  drawStep();
  if (counts) drawCharts();
}

function learn(now, last) {
  const more = (key) => now[key] - last[key];
  speed.push(more("tokens"), more("seconds"));
  plain.push(more("priced_tokens"), more("plain_seconds"));
  saved.push(more("plain_seconds"), more("priced_tokens") === more("tokens") ? more("seconds") : 0);
  const all = { verified: 0, accepted: 0, tried: new Float64Array(16), reached: new Float64Array(16) };
  for (const [name, one] of Object.entries(now.drafters)) {
    const was = last.drafters[name];
    if (!byDrafter.has(name) && byDrafter.size < DRAFTERS) byDrafter.set(name, new Rate());
    for (const key of ["verified", "accepted"]) all[key] += one[key] - (was ? was[key] : 0);
    for (const key of ["tried", "reached"]) one[key].forEach((value, i) => { all[key][i] += value - (was ? was[key][i] : 0); });
  }
  whole.push(all.accepted, all.verified);
  for (const [name, rate] of byDrafter) {
    const one = now.drafters[name], was = last.drafters[name];
    rate.push(one ? one.accepted - (was ? was.accepted : 0) : 0, one ? one.verified - (was ? was.verified : 0) : 0);
  }
  POSITIONS.forEach(([, from, to], i) => {
    const sum = (values) => values.subarray(from, to).reduce((a, b) => a + b, 0);
    byPosition[i].push(sum(all.reached), sum(all.tried));
  });
}

const paint = (name) => { const source = state.drafters.indexOf(name); return colour(source < 0 ? null : source); };

function drawHead() {
  const scope = state.admin ? "requests of all keys" : "";
  const method = state.drafters.length ? `${state.controller} controller, drafts by ${state.drafters.join(", ")}` : "plain decoding";
  const setup = [state.model, state.counts ? method : "a diffusion model, which drafts nothing", scope].filter(Boolean).join(" \u00b7 ");
  if (at("setup").textContent !== setup) {
    at("setup").textContent = setup;
    at("made").textContent = `paceline ${state.version}.`;
    at("chat-title").textContent = chats ? "Chat" : "Text";
    at("question-label").textContent = chats ? "Message (Enter sends, Shift and Enter begins a line)" : "Beginning of a text that the model continues (Enter sends)";
    fill(at("colours"), ...state.drafters.slice(0, DRAFTERS).map((name) => html("li", {}, html("span", { class: "swatch", style: `--c:${paint(name)}` }), name)),
      state.drafters.length ? html("li", {}, "uncoloured: by the model itself") : "");
  }
  const faster = saved.recent();
  const rows = [["Running", number(state.running)], ["Waiting", number(state.waiting)]];
  if (state.counts) {
    rows.push(["Tokens/s", number(speed.recent())], ["Plain decoding", number(plain.recent()), "tokens/s"],
      ["Speedup", faster >= 0 ? faster.toFixed(2) + "\u00d7" : "\u2013"], ["Drafts accepted", percent(whole.recent())]);
  }
  const figures = at("figures");
  if (figures.children.length !== rows.length) fill(figures, ...rows.map(([name, , unit]) => html("div", {}, html("dt", {}, name), html("dd", {}, html("span", {}), unit ? html("small", {}, " " + unit) : null))));
  rows.forEach(([, value], i) => { figures.children[i].querySelector("dd span").textContent = value; });
}

function drawCharts() {
  charts ||= {
    speed: new Chart("speed", "tokens per second over the last two minutes", number, 0),
    drafters: new Chart("drafters", "share of drafted tokens accepted, by drafter", percent, 1),
    positions: new Chart("positions", "share of steps whose draft was accepted, by position", percent, 1),
  };
  charts.speed.show([["real", speed, "var(--d0)"], ["plain decoding would make", plain, "var(--muted)", true]]);
  charts.drafters.show([...byDrafter].map(([name, rate]) => [name, rate, paint(name)]));
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
  seen = mark;
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
  const area = fill(at("tree"), picture), end = plan.all.find((one) => one.kind === "own") || plan.end;
  area.scrollLeft = Math.max(0, end.x + end.width + 24 - area.clientWidth);
  at("legend").hidden = false;
  fill(at("detail"), tree.readable ? `Request ${tree.id}, ${plural(tree.tokens, "token")} so far${tree.ended ? ", ended" : ""}.` : `Request ${tree.id}; its texts are hidden.`);
  fill(at("outcome"), ...(tree.readable ? outcome(step) : [`${plural(step.nodes.length, "drafted token")}; ${count(step, "accepted", "ended") || "none"} accepted.`]));
  drawWords(step);
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

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  let again = true;
  try {
    const answer = await fetch("page/state?request=" + encodeURIComponent(chosen), { headers: headers(), cache: "no-store" });
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

// An answer as it streams: pieces of text, each coloured by its drafter. Old pieces lose their colour, and at last are dropped.
class Answer {
  constructor(log) {
    this.log = log; this.old = document.createTextNode(""); this.box = html("span", {}); this.sum = html("span", { class: "sum" });
    this.waiting = []; this.drawn = false; this.last = undefined;
    this.box.append(this.old);
    log.append(html("span", { class: "who" }, chats ? "Model" : "Continuation"), this.box, this.sum);
  }

  add(pieces) {
    this.waiting.push(...pieces);
    if (!this.drawn) { this.drawn = true; setTimeout(() => this.draw(), 40); }
  }

  draw() {
    this.drawn = false;
    const near = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    for (const { text, drafter } of this.waiting.splice(0)) {
      const readable = shown(text);
      if (drafter === this.last && this.box.lastChild !== this.old) { this.box.lastChild.firstChild.appendData(readable); continue; }
      this.box.append(html("span", drafter === null ? {} : { class: "drafted", style: `--c:${paint(drafter)}`, title: `drafted by ${drafter}, accepted` }, readable));
      this.last = drafter;
    }
    if (this.box.childNodes.length > MOST_SPANS) this.forget(MOST_SPANS / 2);
    if (near) this.log.scrollTop = this.log.scrollHeight;
  }

  forget(count) {
    const old = [...this.box.childNodes].slice(1, 1 + count);
    const text = this.old.data + old.map((one) => one.textContent).join("");
    for (const one of old) one.remove();
    this.old.data = text.length > MOST_CHARACTERS ? "\u2026" + text.slice(-MOST_CHARACTERS) : text;
  }

  end(text, bad) {
    this.draw();
    this.sum.textContent = text;
    this.sum.classList.toggle("bad", Boolean(bad));
    this.log.scrollTop = this.log.scrollHeight;
  }
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
  return ["v1/chat/completions", { ...body, messages: conversation }];
}

async function send(text) {
  const log = at("log"), [path, body] = asked(text);
  log.append(html("span", { class: "who" }, chats ? "You" : "Beginning"), html("span", {}, shown(text)));
  const answer = new Answer(log), stop = (running = new AbortController());
  log.scrollTop = log.scrollHeight;
  busy(true);
  const content = new Growing();
  let usage = null, wrong = "";
  try {
    const reply = await fetch(path, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal: stop.signal });
    if (!reply.ok) throw new Error(await problem(reply));
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      for (const choice of event.choices || []) {
        if (choice.delta && choice.delta.content) content.add(choice.delta.content);
        if (choice.segments) answer.add(choice.segments);
      }
    }
  } catch (error) {
    wrong = error.name === "AbortError" ? "Stopped." : error.message;
  }
  answer.end(wrong || told(usage), wrong && wrong !== "Stopped.");
  if (running !== stop) return;
  if (chats && content.all) conversation.push({ role: "assistant", content: content.all });
  else if (chats) conversation.pop();
  busy(false, wrong || "The answer is complete.");
}

function told(usage) {
  if (!usage) return "";
  const { completion_tokens: tokens, speculative } = usage, drafted = speculative ? speculative.num_accepted_tokens : 0;
  return `${plural(tokens, "token")}, ${drafted} of them drafted (${share(drafted, tokens)})`;
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
  fill(at("log"));
  busy(false, "");
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
look();
