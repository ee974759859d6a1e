// The page: steps, text, decision, time, summary. In: the JSON of the page. Nothing is fetched, nothing is stored.

// Half a surrogate pair is no character; a document should not hold one.
const HALF = /[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const replay = JSON.parse(document.getElementById("data").textContent, (key, value) => (typeof value === "string" ? value.replace(HALF, "\ufffd") : value));
const { steps, texts, tokens, summary } = replay;
const names = replay.drafters;
const ms = (seconds) => (1000 * seconds).toFixed(seconds < 0.01 ? 2 : seconds < 1 ? 1 : 0);
let current = 0, timer = null, noting = null, spans = [];

// Icons

const ICONS = { first: "M4 3v10M12 3l-5 5l5 5", back: "M10.5 3l-5 5l5 5", next: "M5.5 3l5 5l-5 5", last: "M12 3v10M4 3l5 5l-5 5", play: "M5 3v10l8-5z", pause: "M5.5 3v10M10.5 3v10" };
const icon = (name) => svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true", class: name === "play" ? "solid" : null }, svg("path", { d: ICONS[name] }));

// What stays the same

function drawHead() {
  const model = replay.model, sampling = replay.sampling, output = replay.output;
  const method = names.length ? `${replay.controller} controller, drafts by ${names.join(", ")}` : "plain decoding";
  const how = sampling.temperature < 1e-5 ? "greedy" : `temperature ${sampling.temperature}`;
  const rules = Object.entries(sampling).filter(([name]) => name !== "temperature" && name !== "max_tokens").map(([name, value]) => `${name} ${JSON.stringify(value)}`);
  fill(at("setup"), [`${model.name} (${model.family}, ${model.dtype}, ${model.device})`, method, [how, ...rules].join(", ")].join(" \u00b7 "));
  const figure = (name, value, unit) => html("div", {}, html("dt", {}, name), html("dd", {}, value, unit ? html("small", {}, " " + unit) : null));
  fill(at("figures"),
    figure("Mean acceptance length", summary.mean_acceptance_length.toFixed(2)), figure("Tokens", String(summary.tokens)),
    figure("Passes of the target", String(summary.steps)), figure("Drafted", share(summary.drafted, summary.tokens)),
    figure("Speed of the steps", summary.tokens_per_second.toFixed(summary.tokens_per_second < 10 ? 1 : 0), "tokens/s"),
    figure("Ended by", output.error ? "error" : ended_by(output)));
  for (const name of ["first", "back", "next", "last"]) fill(at(name), icon(name));
  fill(at("made"), `Written by paceline ${replay.paceline}.`);
}

function ended_by(output) {
  if (output.finish_reason === "length") return "length limit";
  if (output.finish_reason !== "stop") return String(output.finish_reason || "\u2013");
  return output.stop_reason === null ? "end token" : typeof output.stop_reason === "string" ? "stop string" : "stop token";
}

function drawLegend() {
  const sample = (status, style) => {
    const node = svg("svg", { width: 22, height: 14, class: "sample" });
    node.append(svg("g", { class: "node " + status, style }, svg("rect", { class: "box", x: 1, y: 1, width: 20, height: 12, rx: 3 })));
    return html("span", { class: "tree", style: "display:inline-flex" }, node);
  };
  const entry = (picture, text) => html("li", {}, picture, text);
  const numbers = html("span", { class: "token" }, html("span", { style: "color:var(--ink)" }, ".91 "), html("span", { style: `color:${colour(0)}` }, ".83"));
  const seen = Object.keys(summary.nodes), some = (...all) => all.some((one) => seen.includes(one));
  const grey = "--c:var(--line-strong)";
  const mark = (status) => html("span", { class: "tree", style: "display:inline-flex" }, svg("svg", { width: 12, height: 12 }, sign_of({ status }, 6, 6)));
  fill(at("legend"),
    ...names.map((name, source) => html("li", {}, named(source))),
    entry(sample("own", "--c:var(--target)"), "the target's own token"),
    names.length ? entry(numbers, "chance by the target, by the drafter") : "",
    some("accepted", "ended") ? entry(mark("accepted"), "accepted") : "",
    some("rejected") ? entry(mark("rejected"), "rejected by the target") : "",
    some("unreached", "untried") ? entry(sample("unreached", grey), "never reached") : "",
    some("cut") ? entry(sample("cut", grey), "cut by selection") : "",
    steps.some((step) => step.nodes.some((node) => node.missed)) ? entry(sample("cut missed", grey), "cut, yet right") : "",
    some("ended") ? entry(sample("ended", `--c:${colour(0)}`), "after the end") : "");
}

function drawText() {
  const prompt = html("span", { class: "prompt" }, shown(replay.prompt.text));
  spans = tokens.map((token) => {
    const found = html("span", { class: token.source === null ? "" : "drafted", style: token.source === null ? null : `--c:${colour(token.source)}` }, shown(token.text));
    found.title = `${visible(texts[token.token] || "")}  #${token.token}, by ${token.source === null ? "the target" : names[token.source]} in step ${token.step + 1}`;
    found.classList.add("later");
    return found;
  });
  fill(at("text"), prompt, ...spans);
}

function drawTimeline() {
  const n = Math.max(steps.length, 16), height = 40, most = Math.max(1, ...steps.map((step) => step.count)), gap = n > 160 ? 0 : 0.18;
  const picture = svg("svg", { viewBox: `0 0 ${n} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(svg("rect", { id: "cursor", x: 0, y: 0, width: 1, height, fill: "var(--focus)", "fill-opacity": 0.22 }));
  let place = 0;
  steps.forEach((step, index) => {
    let y = height;
    for (const token of tokens.slice(place, place + step.count)) {
      const high = (height - 4) / most;
      y -= high;
      picture.append(svg("rect", { x: index + gap / 2, y: y + 0.4, width: 1 - gap, height: Math.max(high - 0.8, 0.5), fill: token.source === null ? "var(--t-verify)" : colour(token.source) }));
    }
    place += step.count;
  });
  fill(at("timeline"), picture);
  at("timeline").addEventListener("click", (event) => {
    const area = at("timeline").getBoundingClientRect();
    go(Math.floor(((event.clientX - area.left) / area.width) * n));
  });
}

// Time splits

function split(seconds, draft) {
  const parts = [];
  if (seconds.prefill !== undefined) parts.push(["prefill (the prompt)", seconds.prefill, "var(--t-prefill)"]);
  draft.forEach((value, source) => { if (value > 0) parts.push([`draft: ${names[source]}`, value, colour(source)]); });
  for (const name of ["score", "verify", "commit", "other"]) parts.push([name === "score" ? "score (the target's pass)" : name, seconds[name], `var(--t-${name})`]);
  const total = parts.reduce((sum, part) => sum + part[1], 0);
  const bar = html("div", { class: "split", "aria-hidden": "true" }, ...parts.map(([name, value, paint]) => html("div", { style: `--c:${paint};flex:${total ? value / total : 0} 0 0`, title: name })));
  const row = (name, value, paint) => html("tr", {}, html("td", {}, paint ? html("span", { class: "swatch", style: `--c:${paint}` }) : null, name), html("td", {}, ms(value)), html("td", {}, share(value, total)));
  return [bar, html("table", {}, html("thead", {}, html("tr", {}, html("th", {}, ""), html("th", {}, "ms"), html("th", {}, "share"))), html("tbody", {}, ...parts.map((part) => row(...part)), row("total", total, null)))];
}

// Acceptance by position

function drawAcceptance() {
  const series = summary.acceptance, deepest = Math.max(0, ...series.map((one) => one.length));
  if (!deepest) { fill(at("acceptance"), html("p", { class: "quiet", style: "margin-bottom:14px" }, "Nothing was drafted.")); return; }
  const width = 520, height = 168, left = 40, right = 10, top = 8, bottom = 34;
  const x = (depth) => left + ((width - left - right) * (depth - 0.5)) / deepest, y = (value) => top + (height - top - bottom) * (1 - value);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "plot", role: "img", "aria-label": "share of drafted tokens accepted, by position and drafter" });
  for (const value of [0, 0.25, 0.5, 0.75, 1]) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
    picture.append(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, `${100 * value}${value === 1 ? "\u00a0%" : ""}`));
  }
  for (let depth = 1; depth <= deepest; depth++) picture.append(svg("text", { x: x(depth), y: height - 18, "text-anchor": "middle" }, String(depth)));
  picture.append(svg("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, "position in the draft; hollow: fewer than 5 cases"));
  series.forEach((counts, source) => {
    const known = counts.map(([tried, accepted], index) => ({ tried, accepted, depth: index + 1 })).filter((one) => one.tried);
    picture.append(svg("polyline", { class: "series", style: `--c:${colour(source)}`, points: known.map((one) => `${x(one.depth)},${y(one.accepted / one.tried)}`).join(" ") }));
    for (const one of known) picture.append(dot(x(one.depth), y(one.accepted / one.tried), source, one));
  });
  const key = names.length > 1 ? html("p", { class: "quiet", style: "display:flex;gap:16px;flex-wrap:wrap;margin-bottom:14px" }, ...names.map((name, source) => html("span", { style: "display:inline-flex;align-items:center;gap:5px" }, svg("svg", { width: 14, height: 14, class: "plot", style: "width:14px;margin:0" }, dot(7, 7, source, null)), name))) : "";
  fill(at("acceptance"), picture, key);
}

// Shapes tell drafters apart without colours.
function dot(x, y, source, counts) {
  const r = 4, shape = source % 4, attributes = { class: "dot" + (counts && counts.tried < 5 ? " few" : ""), style: `--c:${colour(source)}` };
  const paths = ["", `M${x - r} ${y - r}h${2 * r}v${2 * r}h${-2 * r}z`, `M${x} ${y - r - 1}l${r + 1} ${2 * r}h${-2 * r - 2}z`, `M${x} ${y - r - 1}l${r + 1} ${r + 1}l${-r - 1} ${r + 1}l${-r - 1} ${-r - 1}z`];
  const found = shape ? svg("path", { ...attributes, d: paths[shape] }) : svg("circle", { ...attributes, cx: x, cy: y, r });
  if (counts) found.append(svg("title", {}, `${names[source]}, position ${counts.depth}: ${counts.accepted} of ${counts.tried} accepted`));
  return found;
}

// One step

function drawDrafters(step) {
  const head = ["drafter", "max levels", "max nodes", "proposed", "scored", "accepted", "ended by", "ms"];
  const row = (one, source) => {
    if (one === null) return html("tr", {}, html("td", {}, named(source)), html("td", { colspan: 7, class: "left quiet" }, "not used"));
    const limit = one.deepest >= one.depth || one.proposed >= one.nodes;
    const why = one.stop !== null ? `stop at ${one.stop}` : !one.proposed ? "no draft" : limit ? "budget" : "itself";
    return html("tr", {}, html("td", {}, named(source)), ...[one.depth, one.nodes, one.proposed, one.scored, one.accepted, why, ms(one.seconds)].map((value) => html("td", {}, String(value))));
  };
  const rows = step.drafters.map(row);
  fill(at("drafters"), ...(rows.length ? [html("thead", {}, html("tr", {}, ...head.map((name) => html("th", {}, name)))), html("tbody", {}, ...rows)] : []));
}

// Before anything is pointed at: the drafted token at which the accepted path ended, if there is one.
function introduced(step) {
  let end = -1;
  step.nodes.forEach((node, index) => { if (node.status === "accepted" || node.status === "ended") end = index; });
  const turned = step.nodes.find((node) => node.parent === end && (node.status === "rejected" || node.status === "cut"));
  return turned ? describe(turned, step) : step.nodes.length ? ["Point at a node for what became of it."] : [""];
}

function show(index) {
  const step = steps[index];
  let picked = null;
  const pick = (one, group) => {
    if (picked) picked.classList.remove("picked");
    picked = group;
    group.classList.add("picked");
    fill(at("detail"), ...describe(one.node, step));
  };
  const { picture, plan } = drawTree(step, texts, pick);
  const area = fill(at("tree"), picture);
  const end = plan.all.find((one) => one.kind === "own") || plan.end;
  area.scrollTop = 0;
  area.scrollLeft = Math.max(0, end.x + end.width + 24 - area.clientWidth);
  fill(at("outcome"), ...outcome(step));
  fill(at("detail"), ...introduced(step));
  drawWords(step);
  drawDrafters(step);
  fill(at("time"), ...split(step.seconds, step.drafters.map((one) => (one ? one.seconds : 0))));
  if (at("nodes").closest("details").open) drawNodes(step);
  showText(step);
}

function showText(step) {
  const from = step.start, to = step.start + step.count;
  spans.forEach((span, index) => {
    span.classList.toggle("later", index >= to);
    span.classList.toggle("now", index >= from && index < to);
  });
  const box = at("text"), last = spans[Math.min(to, spans.length) - 1];
  if (last) box.scrollTop += last.getBoundingClientRect().bottom - box.getBoundingClientRect().bottom + 10;
}

function go(index) {
  current = Math.min(Math.max(index, 0), steps.length - 1);
  at("slider").value = String(current);
  at("slider").setAttribute("aria-valuetext", `step ${current + 1} of ${steps.length}`);
  fill(at("where"), `step ${current + 1} of ${steps.length}`);
  at("cursor").setAttribute("x", String(current));
  at("first").disabled = at("back").disabled = current === 0;
  at("last").disabled = at("next").disabled = current === steps.length - 1;
  show(current);
  clearTimeout(noting);
  noting = setTimeout(noteStep, 300);
}

// The address follows when the steps come to rest: browsers limit how often it may change.
function noteStep() {
  if (location.hash !== "#" + (current + 1)) history.replaceState(null, "", "#" + (current + 1));
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => { if (current < steps.length - 1) go(current + 1); else play(false); }, Math.max(150, Math.min(900, 40000 / steps.length))) : null;
  at("play").setAttribute("aria-label", on ? "Pause" : "Play");
  fill(at("play"), icon(on ? "pause" : "play"));
}

function toggle() {
  if (timer === null && current === steps.length - 1) go(0);
  play(timer === null);
}

function listen() {
  const stop = (act) => () => { play(false); act(); };
  at("first").addEventListener("click", stop(() => go(0)));
  at("back").addEventListener("click", stop(() => go(current - 1)));
  at("next").addEventListener("click", stop(() => go(current + 1)));
  at("last").addEventListener("click", stop(() => go(steps.length - 1)));
  at("play").addEventListener("click", toggle);
  at("slider").addEventListener("input", stop(() => go(Number(at("slider").value))));
  at("nodes").closest("details").addEventListener("toggle", () => drawNodes(steps[current]));
  window.addEventListener("hashchange", () => go(Number(location.hash.slice(1)) - 1 || 0));
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.id === "slider") return;
    const acts = { ArrowLeft: () => go(current - 1), ArrowRight: () => go(current + 1), Home: () => go(0), End: () => go(steps.length - 1) };
    if (acts[event.key]) { event.preventDefault(); play(false); acts[event.key](); }
    else if (event.key === " " && !["BUTTON", "SUMMARY"].includes(event.target.tagName)) { event.preventDefault(); toggle(); }
  });
}

function start() {
  startTheme();
  drawHead();
  drawText();
  drawAcceptance();
  fill(at("total"), ...split(summary.seconds, summary.draft_seconds));
  for (const [id, lines] of [["found", summary.found], ["advice", summary.advice]]) fill(at(id), ...lines.map((line) => html("li", {}, line)));
  if (steps.length) {
    drawLegend();
    drawTimeline();
    at("slider").max = String(steps.length - 1);
    at("tree").style.minHeight = Math.min(500, Math.max(...steps.map((step) => layout(step, texts).height)) + 6) + "px";
    listen();
    play(false);
    go(Number(location.hash.slice(1)) - 1 || 0);
  } else fill(at("outcome"), "No step was made.", replay.output.error ? " " + replay.output.error : "");
  document.documentElement.dataset.ready = String(steps.length);
}

start();
