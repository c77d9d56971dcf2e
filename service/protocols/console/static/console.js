// The console. Everything that a server or a model says is put in as text, never as markup.
"use strict";

const INTERVAL = 1000; // milliseconds between two looks
const WINDOW = 60; // seconds that latencies cover
const CHART = 120; // points of the chart
const QUANTILES = [0.5, 0.9, 0.99];
const TIMES = [
  ["first_token", "arrival to first token"], ["between_tokens", "token to token"], ["queue", "waiting in the engine"],
  ["whole", "arrival to last token"], ["event_loop", "event loop, late"],
];
const $ = (id) => document.getElementById(id);

let token = ""; // in memory alone
let looks = []; // loads of the last minute, the newest last
let rates = []; // generated tokens a second
let failures = 0; // looks in a row that came to nothing
let conversation = []; // messages of the playground
let streaming = null; // AbortController of the answer under way
let chats = true; // whether the model has a chat template

// ---- elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.map((child) => child ?? ""));
  return made;
}

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

function pairs(list, entries) {
  // Rewritten only where something changed, so that a selection of text stays.
  const shown = JSON.stringify(entries);
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...entries.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function bars(box, entries) {
  const shown = JSON.stringify(entries);
  if (box.dataset.shown === shown) return;
  box.dataset.shown = shown;
  box.replaceChildren(...entries.map(({ name, value, used, kept = 0 }) => {
    const picture = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    picture.append(svg("rect", { class: "used", width: 100 * used, height: 10 }));
    picture.append(svg("rect", { class: "kept", x: 100 * used, width: 100 * kept, height: 10 }));
    return element("div", { class: "bar" }, element("p", {}, element("span", {}, name), element("span", {}, value)), picture);
  }));
}

// ---- numbers

const share = (part, whole) => (whole > 0 ? Math.min(1, part / whole) : 0);
const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(0)}\u00a0%` : "–");
const count = (value) => Math.round(value).toLocaleString("en");
const perSecond = (value) => `${value < 100 ? value.toFixed(1) : count(value)}/s`;
const seconds = (duration) => parseFloat(duration ?? "0"); // "1.5s"

function brief(value) {
  if (value === null) return "–";
  if (value < 0.9995) return `${Number((value * 1000).toPrecision(3))}\u00a0ms`;
  return `${Number(value.toPrecision(3))}\u00a0s`;
}

function bytes(value) {
  if (value >= 2 ** 30) return `${(value / 2 ** 30).toFixed(1)}\u00a0GiB`;
  return value >= 2 ** 20 ? `${(value / 2 ** 20).toFixed(0)}\u00a0MiB` : `${(value / 1024).toFixed(0)}\u00a0KiB`;
}

function span(value) {
  const minutes = Math.floor(value / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(value)}\u00a0s`;
}

// Where so much of what was counted lies below, evenly spread within a bucket; null where nothing was counted.
export function quantile(borders, counts, wanted) {
  const total = counts.reduce((sum, one) => sum + one, 0);
  if (!total) return null;
  let below = 0;
  for (let number = 0; number < borders.length; number += 1) {
    if (below + counts[number] >= wanted * total) {
      const low = number ? borders[number - 1] : 0;
      return low + ((borders[number] - low) * (wanted * total - below)) / counts[number];
    }
    below += counts[number];
  }
  return borders.at(-1) ?? null;
}

// ---- the server

async function ask(path, options = {}) {
  const headers = { "X-Whippet-Console": "1", ...(options.body ? { "Content-Type": "application/json" } : {}) };
  if (token) headers.Authorization = `Bearer ${token}`;
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
}

async function problem(response) {
  try {
    const { error } = await response.json();
    return error.retry_ms ? `${error.message}; try again in ${brief(error.retry_ms / 1000)}` : error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function trouble(message) {
  $("trouble").hidden = !message;
  text($("trouble"), message);
}

function badge(word, kind) {
  text($("state"), word);
  $("state").className = `badge ${kind}`;
}

async function look() {
  try {
    const response = await ask("/api/state", { signal: AbortSignal.timeout(5000) });
    if (response.ok) {
      const { rights, state } = await response.json();
      failures = 0;
      trouble(state ? "" : "This token may use the playground, and not look at the server.");
      if (state) show(state, rights);
      else badge("playground alone", "");
    } else {
      trouble(await problem(response));
      badge(response.status === 401 ? "token needed" : "refused", "bad");
      if (response.status === 401 && !$("identity").open && !token) $("identity").open = true;
    }
  } catch {
    failures += 1;
    badge("not reachable", "bad");
    trouble("The server does not answer; the figures below are old.");
  }
}

async function poll() {
  if (!document.hidden) await look();
  setTimeout(poll, INTERVAL * Math.min(10, 1 + failures));
}

function show(state, rights) {
  const { load } = state;
  const now = { at: seconds(load.uptime), load };
  if (looks.length && looks.at(-1).at > now.at) { // the server was started again
    looks = [];
    rates = [];
  }
  if (!looks.length || looks.at(-1).at < now.at) looks.push(now);
  while (looks.length > 2 && looks[0].at < now.at - WINDOW) looks.shift();
  showServing(state);
  showRates(now);
  showLatency(now);
  showRequests(load);
  showPages(load);
  showCaches(state, now);
  showMachine(load, now);
  showSwitches(state.optimizations, rights.includes("admin"));
  showErrors(state.errors);
}

// How a counter has grown since the look before, a second.
function rate(now, pick, since = looks.at(-2)) {
  if (!since || now.at <= since.at) return 0;
  return Math.max(0, Number(pick(now.load) ?? 0) - Number(pick(since.load) ?? 0)) / (now.at - since.at);
}

const sum = (counts, prefix = "") =>
  Object.entries(counts ?? {}).reduce((total, [name, one]) => (name.startsWith(prefix) ? total + Number(one) : total), 0);

// ---- cards

function showServing({ load, model, objection }) {
  const word = load.state.replace("ENGINE_STATE_", "").toLowerCase();
  badge(word, word === "ready" ? "good" : "bad");
  text($("model"), load.model);
  text($("up"), `version ${load.version}, up ${span(seconds(load.uptime))}`);
  chats = model?.chat ?? chats;
  const entries = [["Decoder", model ? model.decoder : "nothing is loaded yet"]];
  if (model) {
    entries.push(
      ["Device", model.device], ["Architecture", model.architecture], ["Weights", `${model.weight_format}, ${model.dtype}`],
      ["Keys and values", model.kv_dtype], ["Context", `${count(model.limits.max_context_tokens)} tokens`],
      ["Speculation", model.draft_model || model.proposers.filter((one) => !one.why_not).map((one) => one.name).join(", ") || "none"],
      ["Weights' digest", model.weights_digest.slice(0, 16)],
    );
  }
  pairs($("serving"), entries);
  const notes = (model?.objections ?? []).map((one) => `${one.decoder} is not in use: ${one.reason}`);
  if (objection) notes.unshift(objection);
  if ($("objections").dataset.shown !== notes.join()) {
    $("objections").dataset.shown = notes.join();
    $("objections").replaceChildren(...notes.map((note) => element("li", {}, note)));
  }
}

function showRates(now) {
  const generated = rate(now, (load) => load.generated_tokens);
  if (looks.length > 1 && looks.at(-1) === now) rates = [...rates, generated].slice(-CHART);
  const most = Math.max(1, ...rates), step = 240 / (CHART - 1), first = CHART - rates.length;
  const points = rates.map((value, at) => `${((first + at) * step).toFixed(1)},${(57 - (54 * value) / most).toFixed(1)}`);
  $("chart").firstElementChild.setAttribute("points", points.join(" "));
  const proposed = rate(now, (load) => load.draft_proposed), accepted = rate(now, (load) => load.draft_accepted);
  pairs($("rates"), [
    ["Generated tokens", perSecond(generated)],
    ["Prompt tokens", perSecond(rate(now, (load) => load.prompt_tokens))],
    ["of them cached", perSecond(rate(now, (load) => load.cached_tokens))],
    ["Steps", perSecond(rate(now, (load) => load.steps))],
    ["Draft tokens", proposed ? `${perSecond(proposed)}, ${percent(accepted, proposed)} accepted` : "–"],
    ["Calls that ended", perSecond(rate(now, (load) => sum(load.ended_calls)))],
  ]);
}

function showLatency(now) {
  const since = looks[0];
  text($("span"), `Of the last ${span(now.at - since.at)}.`);
  const rows = TIMES.map(([name, told]) => {
    const { borders = [], counts = [] } = now.load.seconds[name] ?? {};
    const before = since.load.seconds[name]?.counts ?? [];
    const recent = counts.map((one, at) => Math.max(0, Number(one) - Number(before[at] ?? 0)));
    const cells = QUANTILES.map((wanted) => brief(quantile(borders, recent, wanted)));
    return [told, ...cells, count(recent.reduce((total, one) => total + one, 0))];
  });
  table($("latency"), rows);
}

function table(body, rows) {
  const shown = JSON.stringify(rows);
  if (body.dataset.shown === shown) return;
  body.dataset.shown = shown;
  body.replaceChildren(...rows.map(([first, ...cells]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...cells.map((cell) => element("td", {}, cell)))));
}

function showRequests(load) {
  bars($("queue"), [
    { name: "Running", value: `${load.running} of ${load.max_sequences}`, used: share(load.running, load.max_sequences) },
    { name: "Queued", value: `${load.queued_requests} of ${load.queue_limit}`, used: share(load.queued_requests, load.queue_limit) },
  ]);
  const entries = [["Live", count(load.live_requests)], ["In cache lookup", count(load.looking_requests)], ["Waiting for readers", count(load.paused)]];
  for (const [code, number] of Object.entries(load.ended_calls)) entries.push([`Ended ${code}`, count(number)]);
  for (const [reason, number] of Object.entries(load.refused_requests)) entries.push([`Refused ${reason}`, count(number)]);
  pairs($("ended"), entries);
}

function showPages(load) {
  const { used_pages: used, kept_pages: kept, total_pages: total } = load;
  bars($("pages"), [{
    name: "Device", value: `${count(used)} used, ${count(kept)} kept, ${count(Math.max(0, total - used - kept))} free`,
    used: share(used, total), kept: share(kept, total),
  }]);
  const counts = load.cache_counts, hit = Number(counts["block_chunks.hit"] ?? 0), asked = sum(counts, "block_chunks.");
  pairs($("tiers"), [
    ["Device in all", `${count(total)} of ${load.page_size} tokens`],
    ["Redis, chunks found", asked ? `${count(hit)} of ${count(asked)}` : "–"],
    ["Redis, chunks written", count(counts.block_written ?? 0)],
    ["Redis, fetched and written", `${bytes(Number(counts["block_bytes.fetched"] ?? 0))}, ${bytes(Number(counts["block_bytes.written"] ?? 0))}`],
    ["Preemptions", count(load.preemptions)],
  ]);
}

function showCaches({ load, cache_bytes: held }, now) {
  const counts = load.cache_counts, found = (names) => names.reduce((total, name) => total + Number(counts[name] ?? 0), 0);
  const line = (hits, prefix) => (sum(counts, prefix) ? `${count(hits)} of ${count(sum(counts, prefix))} (${percent(hits, sum(counts, prefix))})` : "–");
  const entries = [
    ["Response, found", line(found(["response_lookup.hit"]), "response_lookup.")],
    ["Semantic, found", line(found(["semantic_lookup.strict", "semantic_lookup.learned"]), "semantic_lookup.")],
    ["Prefix, tokens found", `${count(load.cached_tokens)} of ${count(load.prompt_tokens)} (${percent(load.cached_tokens, load.prompt_tokens)})`],
    ["Shared generations", `${count(counts["flight.follow"] ?? 0)}, ${perSecond(rate(now, (one) => one.cache_counts["flight.follow"] ?? 0))}`],
  ];
  for (const [store, size] of Object.entries(held)) entries.push([`Held in ${store}`, bytes(size)]);
  for (const [pool, state] of Object.entries(load.cache_breakers)) entries.push([`Redis, ${pool.replaceAll("_", " ")}`, state === "closed" ? "asked" : state]);
  pairs($("caches"), entries);
}

function showMachine(load, now) {
  const device = Number(load.device_bytes), used = Number(load.device_used_bytes);
  bars($("device"), device ? [{ name: "GPU memory", value: `${bytes(used)} of ${bytes(device)}`, used: share(used, device) }] : []);
  pairs($("machine"), [
    ...(device ? [] : [["GPU", "none"]]),
    ["Steps", count(load.steps)],
    ["Engine restarts", count(load.restarts)],
    ["Front, of a core", `${(100 * rate(now, (one) => seconds(one.front_cpu))).toFixed(1)}\u00a0%`],
    ["Front, memory", bytes(Number(load.front_bytes))],
  ]);
}

function showSwitches(optimizations, admin) {
  text($("switch-hint"), admin ? "A change takes effect at once, while requests are served." : "Changing them takes the right admin.");
  const list = $("switches");
  if (list.dataset.names !== optimizations.map((one) => one.name).join()) {
    list.dataset.names = optimizations.map((one) => one.name).join();
    list.replaceChildren(...optimizations.map(({ name }) => {
      const box = element("input", { type: "checkbox", role: "switch", id: `switch-${name}`, "aria-describedby": `about-${name}` });
      box.addEventListener("change", () => flip(name, box));
      const label = element("label", { for: `switch-${name}` }, name.replaceAll("_", " "));
      return element("li", {}, box, label, element("p", { id: `about-${name}` }));
    }));
  }
  for (const { name, enabled, effective, description, why_not: why } of optimizations) {
    const box = $(`switch-${name}`);
    if (!box.dataset.busy) box.checked = enabled;
    box.disabled = !admin || Boolean(box.dataset.busy);
    const note = effective ? "in effect" : why ? `no effect: ${why}` : "off";
    text($(`about-${name}`), `${description} – ${note}`);
  }
}

async function flip(name, box) {
  box.dataset.busy = "1";
  try {
    const response = await ask("/api/switch", { method: "POST", body: JSON.stringify({ name, enabled: box.checked }) });
    if (!response.ok) {
      box.checked = !box.checked;
      trouble(await problem(response));
    }
  } catch {
    box.checked = !box.checked;
  } finally {
    // The state may be of the second before.
    setTimeout(() => delete box.dataset.busy, INTERVAL);
  }
}

function showErrors(errors) {
  $("no-errors").hidden = errors.length > 0;
  $("error-table").hidden = !errors.length;
  table($("errors"), errors.map((one) => [
    new Date(one.at * 1000).toLocaleTimeString(), one.code, one.reason || "–", one.method.replace("whippet.v1.", ""),
    one.request_id || "–", brief(one.seconds),
  ]));
}

// ---- the playground

const FIELDS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

function question(message) {
  const sampling = Object.fromEntries(FIELDS.filter((name) => $(name).value !== "").map((name) => [name, Number($(name).value)]));
  const asked = { stopping: { max_tokens: Number($("max_tokens").value) || 256 }, output: {}, sampling };
  if ($("logprobs").value !== "") asked.output.logprobs = Number($("logprobs").value);
  if (!$("cached").checked) asked.cache = { response: "CACHE_MODE_OFF", semantic: "CACHE_MODE_UNSPECIFIED" };
  if (!chats) return { ...asked, text: message };
  const system = $("system").value.trim();
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation, { role: "user", content: message }];
  return { ...asked, chat: { messages } };
}

function turn(role, ...children) {
  const name = { user: "You", assistant: "Model" }[role];
  const made = element("article", { class: `turn ${role}` }, element("h3", {}, name), ...children);
  $("transcript").append(made);
  return made;
}

// Lines of JSON as they come.
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    yield* parts.filter(Boolean).map((part) => JSON.parse(part));
  }
}

// One answer while it comes.
class Answer {
  constructor() {
    this.reasoning = element("p", { class: "reasoning", hidden: true });
    this.said = element("p", {});
    this.article = turn("assistant", this.reasoning, this.said);
    this.text = "";
    this.tokens = [];
    this.begun = performance.now();
    this.first = null;
    this.finish = null;
  }

  take(message) {
    const box = $("transcript"), follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    this.first ??= performance.now();
    if (message.reasoning) {
      this.reasoning.hidden = false;
      this.reasoning.append(message.reasoning);
    }
    this.text += message.text ?? "";
    if (message.logprobs) this.probable(message);
    else if (message.text) this.said.append(message.text);
    if (message.error) this.fail(message.error.message);
    if (message.finish) this.finish = message.finish;
    if (follows) box.scrollTop = box.scrollHeight;
  }

  probable({ logprobs, text: whole = "" }) {
    this.tokens.push(...logprobs);
    // Tokens can be parts of a character; then the text of all of them stands together.
    const parts = logprobs.map((one) => one.text ?? "").join("") === whole ? logprobs : [{ text: whole, logprob: Math.min(...logprobs.map((one) => one.logprob ?? 0)) }];
    for (const { text: part = "", logprob = 0 } of parts) {
      const likely = Math.exp(logprob), level = likely < 0.25 ? 0 : likely < 0.5 ? 1 : likely < 0.8 ? 2 : 3;
      this.said.append(element("span", { class: `token p${level}`, title: percent(likely, 1) }, part));
    }
  }

  fail(message) {
    this.article.append(element("p", { class: "failed" }, message));
  }

  close() {
    $("timings").hidden = $("tokens").hidden = true;
    if (this.finish) this.timings();
    if (this.tokens.length) {
      $("tokens").hidden = false;
      table($("token-rows"), this.tokens.map((one) => [
        visible(one), percent(Math.exp(one.logprob ?? 0), 1),
        (one.top ?? []).map((other) => `${visible(other)} ${percent(Math.exp(other.logprob ?? 0), 1)}`).join(", "),
      ]));
    }
  }

  timings() {
    const { usage = {}, timings: took = {}, reason = "", cache_source: source = "" } = this.finish;
    const decode = seconds(took.decode), tokens = usage.completion_tokens ?? 0;
    pairs($("timings"), []);
    const figures = [
      ["Ended by", reason.replace("FINISH_REASON_", "").toLowerCase().replaceAll("_", " ")],
      ["Prompt", `${usage.prompt_tokens ?? 0} tokens, ${usage.cached_tokens ?? 0} cached`],
      ["Answer", `${tokens} tokens`],
      ["Queue", brief(seconds(took.queue))], ["Prefill", brief(seconds(took.prefill))], ["Decode", brief(decode)],
      ["Speed", tokens > 1 && decode > 0 ? `${((tokens - 1) / decode).toFixed(1)} tokens/s` : "–"],
      ["First token here", this.first ? brief((this.first - this.begun) / 1000) : "–"],
      ["From a cache", source.replace("CACHE_SOURCE_", "").toLowerCase()],
    ];
    if (usage.draft_proposed) figures.push(["Drafts accepted", `${usage.draft_accepted ?? 0} of ${usage.draft_proposed}`]);
    $("timings").replaceChildren(...figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
    $("timings").hidden = false;
  }
}

// A token with its spaces visible; one that is part of a character by its number.
function visible({ text: part, token_id: id }) {
  return part ? part.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") : `#${id ?? 0}`;
}

async function send(event) {
  event.preventDefault();
  const message = $("message").value;
  if (streaming || !message.trim()) return;
  streaming = new AbortController();
  const body = JSON.stringify(question(message));
  busy(true);
  turn("user", element("p", {}, message));
  $("message").value = "";
  const answer = new Answer();
  try {
    const response = await ask("/api/generate", { method: "POST", body, signal: streaming.signal });
    if (!response.ok) answer.fail(await problem(response));
    else for await (const one of lines(response.body)) answer.take(one);
    if (response.ok && !answer.finish && !answer.article.querySelector(".failed")) answer.fail("the connection was cut");
  } catch (error) {
    answer.fail(error.name === "AbortError" ? "cancelled" : "the connection was cut");
  }
  conversation.push({ role: "user", content: message }, { role: "assistant", content: answer.text });
  if (!answer.text) conversation.splice(-2);
  answer.close();
  streaming = null;
  busy(false);
}

function busy(on) {
  $("send").disabled = on;
  $("clear").disabled = on;
  $("cancel").disabled = !on;
  text($("progress"), on ? "answering…" : "");
  if (!on) $("message").focus();
}

function clear() {
  conversation = [];
  $("transcript").replaceChildren();
  $("timings").hidden = $("tokens").hidden = true;
}

// ---- start

$("ask").addEventListener("submit", send);
$("cancel").addEventListener("click", () => streaming?.abort());
$("clear").addEventListener("click", clear);
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  if (event.key === "Escape") streaming?.abort();
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value.trim();
  $("token").value = "";
  $("identity").open = false;
  look();
});
document.addEventListener("visibilitychange", () => document.hidden || look());
poll();
