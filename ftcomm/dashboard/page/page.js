// The live view. It takes the fields of `Overview` (ftcomm/monitoring/job.py) and `Stragglers` (ftcomm/dashboard/stragglers.py) as they change, and draws what has changed.
"use strict";
const $ = (id) => document.getElementById(id);
const job = { points: [], rows: [], newest: [], events: [], uses: {}, slowest: [] };
const PHASES = { detection: "detection", view: "view", resume: "resumed op", absence: "absence", "catch-up": "catch-up" };
const COLOURS = { training: "use", pause: "pause", start: "starting", detection: "detection", view: "view", resume: "resume", absence: "absence", "catch-up": "catchup" };
const WAITS = [100, 1000, 10000, 60000]; // ms from which a wait has the next colour
const POINTS = 900;
const BAD = new Set(["suspect", "removed", "process_exited", "failed", "ended", "cut_off", "step_failed", "divergence", "refused", "diagnosis"]);

function make(tag, of = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(of)) name === "class" ? (node.className = value) : name === "text" ? (node.textContent = value) : node.setAttribute(name, value);
  node.append(...children);
  return node;
}
function drawn(tag, of) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(of)) node.setAttribute(name, value);
  return node;
}
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
const clock = (at) => new Date(at * 1000).toTimeString().slice(0, 8);
function lasts(seconds) {
  seconds = Math.max(0, seconds); // a clock may have been set
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  return whole < 3600 ? `${Math.floor(whole / 60)}:${two(whole % 60)}` : `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}
const amount = (n) => (n < 10 ? n.toFixed(2) : n < 100 ? n.toFixed(1) : Math.round(n).toLocaleString("en"));
const sum = (numbers) => Object.values(numbers).reduce((total, n) => total + n, 0);

// -- the figures on top ---------------------------------------------------------------------------------------------

const FIGURES = {
  step: ["step", () => (job.step < 0 ? "–" : job.step.toLocaleString("en")), () => ""],
  speed: ["steps a second", () => job.rate.toFixed(job.rate < 10 ? 2 : 1), () => ""],
  members: ["contribute", () => String(job.contributing), () => `of ${job.replicas}`],
  effective: ["effective training time", () => (job.effective == null ? "–" : (100 * job.effective).toFixed(job.effective > 0.999 ? 2 : 1)), () => "%"],
  interrupted: ["interruptions", () => String(job.interruptions), () => ""],
  lost: ["lost to them", () => amount(sum(Object.fromEntries(Object.entries(job.uses).filter(([use]) => use in PHASES)))), () => "GPU-s"],
  view: ["view", () => String(job.epoch), () => ""],
  up: ["since the first view", () => (job.began ? lasts(job.now - job.began) : "–"), () => ""],
};
for (const [name, [label]] of Object.entries(FIGURES))
  $("figures").append(make("div", {}, make("dt", { text: label }), make("dd", { id: `figure-${name}` }, make("span"), make("small"))));
function figures() {
  for (const [name, [, value, unit]] of Object.entries(FIGURES)) {
    const [number, small] = $(`figure-${name}`).children;
    put(number, value()); put(small, unit());
  }
  put($("job"), `${job.script} · job ${job.run}`);
  put($("state"), job.state);
  document.title = `${job.state}, step ${job.step} · ftcomm`;
}

// -- the grid -------------------------------------------------------------------------------------------------------

const here = { row: 0, cell: 0 };
const shown = []; // of each replica: its nodes and what they say
function grid() {
  const many = job.rows.length && job.rows[0].cells.length > 32;
  put($("scale"), `${job.replicas} × ${job.ranks_per_replica}` + (job.ranks_per_cell > 1 ? `, a cell is ${job.ranks_per_cell} ranks` : ""));
  job.rows.forEach((row, index) => {
    let line = shown[index];
    if (!line || line.cells.length !== row.cells.length) {
      const parts = { name: make("span", { class: "name" }), host: make("span", { class: "host" }), box: make("span", { class: `cells${many ? " many" : ""}` }), what: make("span", { class: "what" }), step: make("span", { class: "step" }) };
      const node = make("div", { role: "row" }, ...Object.values(parts));
      const cells = row.cells.map((_, cell) => { const mark = make("i", { role: "gridcell" }); mark.dataset.row = index; mark.dataset.cell = cell; return mark; });
      parts.box.append(...cells);
      if (line) line.node.replaceWith(node); else $("grid").append(node);
      line = shown[index] = { node, parts, cells, said: [] };
    }
    const { parts } = line, kind = `replica ${row.state.split(" ")[0]}`;
    if (line.node.className !== kind) line.node.className = kind;
    put(parts.name, String(row.replica)); put(parts.host, row.host);
    put(parts.what, row.state); put(parts.step, row.step < 0 ? "" : row.step.toLocaleString("en"));
    if (line.node.title !== row.reason) line.node.title = row.reason;
    row.cells.forEach((wait, cell) => {
      const look = wait < 0 ? "gone" : WAITS.reduce((look, from, level) => (wait >= from ? `w${level + 1}` : look), "");
      const says = look + (here.row === index && here.cell === cell && document.activeElement === $("grid") ? " here" : "");
      if (line.said[cell] !== says) { line.cells[cell].className = says; line.said[cell] = says; }
    });
  });
}
function legend() {
  const keys = [["training", "training"], ["catching", "catching up"], ["starting", "starting"], ["wait1", "waits 0.1 s"], ["wait2", "1 s"], ["wait3", "10 s"], ["wait4", "1 min or more"]];
  for (const [colour, text] of keys) { const key = make("span", { class: "key" }); key.style.background = `var(--${colour})`; $("legend").append(key, text); }
  const key = make("span", { class: "key" }); key.style.boxShadow = "inset 0 0 0 1px var(--away-line)";
  $("legend").append(key, "no process");
}
function ranks(cell) {
  const first = cell * job.ranks_per_cell, last = Math.min(first + job.ranks_per_cell, job.ranks_per_replica) - 1;
  return first === last ? `shard ${first}` : `shards ${first} to ${last}`;
}
let opening = 0; // counts clicks: the last one is shown
async function open(index, cell, rank) {
  const row = job.rows[index], box = $("rank"), list = box.querySelector("dl"), ticket = ++opening;
  if (!row) return;
  put(box.querySelector("h2"), `Replica ${row.replica}, ${rank == null ? ranks(cell) : `shard ${rank}`}`);
  const wait = row.cells[cell];
  const facts = { state: row.state, "for": lasts(job.now - row.since), host: row.host || "–", step: row.step < 0 ? "–" : String(row.step), waits: wait < 0 ? "no process" : lasts(wait / 1000), starts: String(row.starts) };
  if (row.effective != null) facts.effective = `${(100 * row.effective).toFixed(1)} %`;
  if (row.reason) facts["last out by"] = row.reason;
  list.replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
  put($("doing"), ""); put($("stack"), "asking…"); $("stacks").hidden = false;
  if (!box.open) box.showModal();
  const asked = async (path) => { try { const answer = await fetch(path); return answer.ok ? await answer.json() : [await answer.text()]; } catch { return ["no answer"]; } };
  const awaited = () => box.open && ticket === opening;
  const doing = await asked(`/rank?replica=${row.replica}&shard=${rank ?? cell * job.ranks_per_cell}&ranks=${rank == null ? job.ranks_per_cell : 1}`);
  if (!awaited()) return;
  put($("doing"), [...(rank == null && job.ranks_per_cell > 1 && doing.lines ? [`shard ${doing.shard}`] : []), ...(doing.lines || doing)].join("\n"));
  if (($("stacks").hidden = doing.recorded === false)) return; // nobody on this host to ask
  const stack = await asked(`/stack?replica=${row.replica}&shard=${doing.shard ?? rank ?? cell * job.ranks_per_cell}`);
  if (awaited()) put($("stack"), stack.join("\n"));
}

// -- curves ---------------------------------------------------------------------------------------------------------

function curves() {
  const points = job.points, last = points.at(-1);
  if (!last) return;
  const from = Math.max(points[0][0], last[0] - POINTS), x = (at) => (600 * (at - from)) / Math.max(1, last[0] - from);
  const rates = points.map(([at, step], index) => { const before = points[Math.max(0, index - 4)]; return [at, at > before[0] ? Math.max(0, (step - before[1]) / (at - before[0])) : 0]; });
  const most = Math.max(1e-9, ...rates.map(([, rate]) => rate)), high = Math.max(1, job.replicas);
  const path = (values, height, top) => values.map(([at, value], index) => `${index ? "L" : "M"}${x(at).toFixed(1)} ${(height - (height - 4) * value / top).toFixed(1)}`).join("");
  // Curves are on a clock that nobody sets, interruptions are not: those of before it was set back lie ahead of now.
  const times = job.newest.map(({ at }) => at - job.now + job.mono).filter((at) => at >= from && at <= job.mono + 1);
  const marks = (height) => times.map((at) => drawn("path", { class: "mark", d: `M${x(Math.min(at, last[0])).toFixed(1)} 0V${height}` }));
  $("rate").replaceChildren(drawn("path", { class: "base", d: "M0 120H600" }), ...marks(120), drawn("path", { d: path(rates, 120, most) }));
  let steps = "";
  points.forEach(([at, , count], index) => { const y = (44 - 40 * count / high).toFixed(1); steps += index ? `H${x(at).toFixed(1)}V${y}` : `M${x(at).toFixed(1)} ${y}`; });
  $("members").replaceChildren(drawn("path", { class: "base", d: "M0 44H600" }), ...marks(44), drawn("path", { d: steps }));
  put($("span"), `the last ${lasts(last[0] - from)}; at most ${most.toFixed(most < 10 ? 2 : 1)}`);
}
function parts(bar, shares, total) {
  while (bar.children.length > shares.length) bar.lastChild.remove();
  shares.forEach(([name, share], index) => {
    const part = bar.children[index] || bar.appendChild(make("span"));
    const width = `${(100 * share / total).toFixed(2)}%`, colour = `var(--${COLOURS[name]})`;
    if (part.style.width !== width) part.style.width = width;
    if (part.dataset.of !== name) { part.style.background = colour; part.dataset.of = name; }
    part.title = `${PHASES[name] || name}: ${amount(share)} GPU-s`;
  });
}
function uses() {
  const shares = Object.entries(job.uses).filter(([, share]) => share > 0), total = sum(job.uses) || 1;
  parts($("uses"), shares, total);
  const text = $("uses-legend");
  if (text.dataset.of !== shares.map(([name]) => name).join()) {
    text.dataset.of = shares.map(([name]) => name).join();
    text.replaceChildren(...shares.map(([name]) => { const key = make("span", { class: "key" }); key.style.background = `var(--${COLOURS[name]})`; return make("span", {}, key, make("span")); }));
  }
  shares.forEach(([name, share], index) => put(text.children[index].lastChild, `${PHASES[name] || name} ${(100 * share / total).toFixed(share / total > 0.1 ? 1 : 2)} %`));
}

// -- stragglers -----------------------------------------------------------------------------------------------------

const SLOW = { compute: "slow", network: "slow network" };
const percent = (share) => `${(100 * share).toFixed(1)} %`;
/** Show a rank: its cell in the grid, what it does, and its stacks. */
function show([replica, rank]) {
  const index = job.rows.findIndex((row) => row.replica === replica);
  if (index < 0) return;
  here.row = index; here.cell = Math.floor(rank / job.ranks_per_cell);
  grid();
  open(index, here.cell, rank);
}
function stragglers() {
  $("stragglers").hidden = !job.compared_at;
  const rows = job.slowest.map((one) => {
    const name = job.ranks_per_replica > 1 ? `${one.rank[0]} · ${one.rank[1]}` : String(one.rank[0]);
    const row = make("tr", { class: one.named ? "named" : "", tabindex: 0 },
      make("td", { text: name }), make("td", { text: one.host }), make("td", { class: "n", text: one.slowdown.toFixed(2) }),
      make("td", { class: "n", text: percent(one.share) }), make("td", { class: "n", text: percent(one.network) }), make("td", { text: SLOW[one.named] || "" }));
    row.addEventListener("click", () => show(one.rank));
    row.addEventListener("keydown", ({ key }) => { if (key === "Enter") show(one.rank); });
    return row;
  });
  const at = [...$("slowest").children].indexOf(document.activeElement);
  $("slowest").replaceChildren(...rows);
  if (at >= 0 && rows[at]) rows[at].focus();
  $("slowest").parentNode.hidden = !rows.length;
  put($("compared"), rows.length ? `of ${job.compared} ranks, as of ${clock(job.compared_at)}` : "");
  const none = rows.length ? "Nobody is slower than the others by more than chance explains." : "No two ranks of a group have recorded steps on this host.";
  put($("even"), job.slowest.some(({ named }) => named) ? "" : none);
}

// -- traffic --------------------------------------------------------------------------------------------------------

const ROUND = 24; // replicas that are drawn in a circle; of more, ways are listed
const LINKS = 4; // that are listed: those that held up most, and are slowest
const HELD = 0.01; // a share of the time that is worth a colour
const rate = (bytes) => (bytes < 1e4 ? (bytes / 1e6).toFixed(4) : amount(bytes / 1e6));
const size = (bytes) => (bytes < 1e3 ? `${bytes} B` : bytes < 1e6 ? `${+(bytes / 1e3).toFixed(1)} kB` : `${+(bytes / 1e6).toFixed(1)} MB`);
function traffic() {
  const { order, ring, links, flows } = job.traffic;
  $("traffic").hidden = !links.length;
  if (!links.length) return;
  put($("order"), ring ? `around the ring ${order.slice(0, ROUND).join(" → ")} → ${order.length > ROUND ? "…" : order[0]}` : "each with each other");
  const drawing = order.length <= ROUND, svg = $("ways"), most = Math.max(...links.map(([, , bytes]) => bytes)) || 1;
  svg.toggleAttribute("hidden", !drawing);
  if (drawing) {
    const at = new Map(order.map((replica, index) => { const angle = (2 * Math.PI * index) / order.length - Math.PI / 2; return [replica, [240 + 200 * Math.cos(angle), 90 + 74 * Math.sin(angle)]]; }));
    const ways = links.filter(([source, target]) => at.has(source) && at.has(target)).map(([source, target, bytes, waited]) => {
      const [x, y] = at.get(source), [u, v] = at.get(target), bow = 0.08; // bowed, so that both directions are seen
      const p = (x + u) / 2 + bow * (v - y), q = (y + v) / 2 - bow * (u - x), part = 15 / Math.hypot(u - p, v - q); // up to the circle
      const points = [x, y, p, q, u + part * (p - u), v + part * (q - v)].map((place) => place.toFixed(1));
      const way = drawn("path", { class: waited > HELD ? "way held" : "way", "marker-end": "url(#arrow)", d: `M${points[0]} ${points[1]}Q${points.slice(2).join(" ")}` });
      way.style.strokeWidth = String(1 + 4 * bytes / most);
      way.append(Object.assign(drawn("title", {}), { textContent: `${source} to ${target}: ${rate(bytes)} MB a second` }));
      return way;
    });
    const nodes = [...at].flatMap(([replica, [x, y]]) => [drawn("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: 13 }), Object.assign(drawn("text", { x: x.toFixed(1), y: (y + 4.5).toFixed(1) }), { textContent: String(replica) })]);
    svg.lastElementChild.replaceChildren(...ways, ...nodes);
  }
  const slowest = [...links].sort((one, other) => other[3] - one[3] || one[2] - other[2]).slice(0, LINKS);
  $("links").replaceChildren(...slowest.map(([source, target, bytes, waited]) => make("tr", { class: waited > HELD ? "named" : "" }, ...[source, target, rate(bytes), percent(waited)].map((text) => make("td", { class: "n", text: String(text) })))));
  put($("flows"), flows.map((flow) => `${amount(flow.a_second)} a second of ${size(flow.each)} of ${flow.dtype}, ${flow.algorithm}${flow.transports ? ` by ${flow.transports}` : ""}, ${rate(flow.speed)} MB a second while one runs`).join("; "));
}

// -- why it stands still --------------------------------------------------------------------------------------------

function why() {
  const told = job.told, box = $("why");
  box.hidden = !told;
  if (!told) return;
  const { who, since, others, removal, remedy, culprits } = told.verdict;
  box.className = told.over ? "over" : "";
  put(box.querySelector("h2").firstChild, told.over ? "Why it stood still " : "Why it stands still ");
  put($("told"), `told at ${clock(told.at)}${told.over ? "; it goes on" : ""}`);
  put($("who"), who);
  const more = [since == null ? "" : `Since ${clock(since)}.`, others];
  if (!told.over) more.push(removal ? `If nothing moves, what holds them up is removed at ${clock(removal[1])} at the latest.` : "", remedy);
  put($("more"), more.filter((said) => said).join(" "));
  $("culprits").replaceChildren(...culprits.slice(0, 8).map(([replica, rank]) => {
    const button = make("button", { text: `replica ${replica}${job.ranks_per_replica > 1 ? ` shard ${rank}` : ""}`, title: "what it does, and its stacks" });
    button.addEventListener("click", () => show([replica, rank]));
    return button;
  }));
}

// -- interruptions and events ---------------------------------------------------------------------------------------

const opened = new Set();
function interruptions() {
  const most = Math.max(1e-9, ...job.newest.map(({ price }) => sum(price)));
  $("none").hidden = job.newest.length > 0;
  put($("interrupted"), job.interruptions > job.newest.length ? `the newest ${job.newest.length} of ${job.interruptions}` : "");
  const rows = [...job.newest].reverse().flatMap((one) => {
    const cost = sum(one.price), bar = make("div", { class: "bar" });
    bar.style.width = `${Math.max(2, 100 * cost / most)}%`;
    parts(bar, Object.entries(one.price).filter(([, share]) => share > 0), cost || 1);
    const out = one.over && one.back && one.absent < 0.1 && !one.price.absence ? "–" : one.over && !one.back ? `${lasts(one.absent)} †` : lasts(one.absent);
    const row = make("tr", { class: one.over ? "" : "lasts", title: one.lines.join("\n") },
      make("td", { text: clock(one.at) }), make("td", { text: one.replica < 0 ? "–" : String(one.replica) }), make("td", { text: one.cause.kind }),
      make("td", { text: one.cause.detail + (one.host ? ` · ${one.host}` : "") }), make("td", { class: "n", text: out }), make("td", { class: "n", text: amount(cost) }), make("td", {}, bar));
    row.dataset.number = one.number;
    const more = opened.has(one.number) ? [make("tr", { class: "more" }, make("td", { colspan: 7, text: [`view ${one.epoch}, step ${one.step}; ${one.cause.component} (${one.cause.category})`, ...one.lines].join("\n") }))] : [];
    return [row, ...more];
  });
  $("rows").replaceChildren(...rows);
}
function happened() {
  const log = $("log"), newest = Number(log.dataset.newest || -1);
  for (const line of job.events) if (line.number > newest) {
    log.prepend(make("li", BAD.has(line.kind) ? { class: "bad" } : {}, make("time", { text: clock(line.at) }), make("span", { text: line.text })));
    log.dataset.newest = line.number;
  }
  while (log.children.length > 200) log.lastChild.remove();
}

// -- what drives it -------------------------------------------------------------------------------------------------

const DRAW = { rows: grid, told: why, points: curves, uses, compared_at: stragglers, traffic, newest: () => { interruptions(); curves(); }, events: happened };
function take(fields) {
  const points = fields.points;
  if (points) job.points = [...job.points, ...points].slice(-POINTS);
  delete fields.points;
  Object.assign(job, fields);
  figures();
  for (const [name, draw] of Object.entries(DRAW)) if (name === "points" ? points : name in fields) draw();
}
function listen() {
  const source = new EventSource("/events"), link = $("link");
  let over = false;
  source.onopen = () => { job.points = []; };
  source.onmessage = ({ data }) => { link.className = ""; put(link, ""); take(JSON.parse(data)); };
  source.addEventListener("ended", () => { over = true; source.close(); put(link, "the job has ended; this is the last that was seen"); });
  source.onerror = () => {
    if (over) return;
    link.className = "lost"; put(link, "no answer; trying again");
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000); // it was refused, and does not try again
  };
}
function theme(next) {
  const dark = next ?? (localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  document.documentElement.dataset.theme = dark;
  if (next) localStorage.setItem("theme", next);
}
const flip = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
function move(rows, cells) {
  const row = job.rows[(here.row = Math.max(0, Math.min(job.rows.length - 1, here.row + rows)))];
  if (row) here.cell = Math.max(0, Math.min(row.cells.length - 1, here.cell + cells));
  grid();
}
function longest() {
  let most = -1;
  job.rows.forEach((row, index) => row.cells.forEach((wait, cell) => { if (wait > most) { most = wait; here.row = index; here.cell = cell; } }));
  $("grid").focus(); grid();
}
const KEYS = { ArrowUp: () => move(-1, 0), ArrowDown: () => move(1, 0), ArrowLeft: () => move(0, -1), ArrowRight: () => move(0, 1), Enter: () => open(here.row, here.cell) };
$("grid").addEventListener("keydown", (event) => { if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); } });
for (const kind of ["focus", "blur"]) $("grid").addEventListener(kind, grid);
$("grid").addEventListener("click", ({ target }) => { if (target.dataset.row) { here.row = Number(target.dataset.row); here.cell = Number(target.dataset.cell); open(here.row, here.cell); } });
$("rows").addEventListener("click", ({ target }) => {
  const number = Number(target.closest("tr").dataset.number);
  if (!opened.delete(number)) opened.add(number);
  interruptions();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "?") $("keys").showModal();
  else if (event.key === "t") flip();
  else if (event.key === "w") longest();
  else if (event.key === "y" && job.told && job.told.verdict.culprits.length) show(job.told.verdict.culprits[0]);
  else if (event.key === "s" && job.slowest.length) show(job.slowest[0].rank);
});
$("theme").addEventListener("click", flip);
$("help").addEventListener("click", () => $("keys").showModal());
theme();
legend();
listen();
