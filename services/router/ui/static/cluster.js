// Shows a status: model, rates, workers, pools, store.

import { count, duration, element, meter, milliseconds, sparkline } from "./charts.js";

const HISTORY = 60;
const at = (id) => document.getElementById(id);

// Name, figure, second line, and the value whose history is drawn.
const TILES = [
  ["Output tokens/s", (r) => count(r.completionTokensPerS), (r) => `${count(r.promptTokensPerS)} prompt tokens/s`, (r) => r.completionTokensPerS],
  ["Requests/s", (r) => count(r.requestsPerS), (r) => `${count(r.errorsPerS)} errors/s`, (r) => r.requestsPerS],
  ["Running", (r) => count(r.running), (r) => `${count(r.waiting)} in the queue`, (r) => r.running],
  ["TTFT p50", (r) => latency(r.ttft, "p50Ms"), (r) => `p99 ${latency(r.ttft, "p99Ms")}`, (r) => r.ttft.p50Ms],
  ["ITL p50", (r) => latency(r.itl, "p50Ms"), (r) => `p99 ${latency(r.itl, "p99Ms")}`, (r) => r.itl.p50Ms],
  ["Queue p50", (r) => latency(r.queue, "p50Ms"), (r) => `p99 ${latency(r.queue, "p99Ms")}`, (r) => r.queue.p50Ms],
];
const history = TILES.map(() => []);

function latency(figures, which) {
  return Number(figures.count) ? milliseconds(figures[which]) : "–";
}

export function show(answer) {
  const { status } = answer, { router } = status;
  document.title = `${router.model} · Baton`;
  at("model").textContent = router.model;
  at("serving").textContent = router.serving ? "serving" : "not serving";
  at("serving").className = `state state-${router.serving ? "ready" : "lost"}`;
  const context = `context of ${answer.context_tokens.toLocaleString("en")} tokens`;
  at("facts").textContent = `version ${answer.version} · up ${duration(router.uptimeS)} · ${context}`;
  at("window").textContent = `of the last ${Math.round(router.windowS)} s`;
  showRates(router);
  showWorkers(status.workers, answer.known_workers);
  showPools(status.pools);
  showStore(status);
}

function showRates(router) {
  at("rates").replaceChildren(...TILES.map(([name, figure, more, value], index) => {
    const past = history[index];
    past.push(Number(value(router)));
    if (past.length > HISTORY) past.shift();
    const tile = element("div", "", "tile");
    tile.append(
      element("span", name, "tile-name"), element("span", figure(router), "tile-figure"),
      element("span", more(router), "dim"), sparkline(past, HISTORY, `${name}, the last ${past.length} values`),
    );
    return tile;
  }));
}

const word = (name, prefix) => name.slice(prefix.length).toLowerCase().replaceAll("_", " ");
const nameOf = (worker) => worker.worker.identity?.name || worker.worker.address;

function showWorkers(workers, known) {
  const more = known > workers.length ? `, the first ${workers.length} are shown` : "";
  at("worker-count").textContent = `${known}${more}`;
  workers.sort((a, b) => nameOf(a).localeCompare(nameOf(b), "en", { numeric: true }));
  at("workers").tBodies[0].replaceChildren(...workers.map(workerRow));
  const problems = workers.map((w) => [nameOf(w), w.worker.error || w.worker.audit?.integrityError]);
  at("problems").replaceChildren(
    ...problems.filter(([, reason]) => reason).map(([name, reason]) => element("li", `${name}: ${reason}`)),
  );
}

function workerRow(worker) {
  const role = word(worker.worker.identity?.role || "WORKER_ROLE_UNSPECIFIED", "WORKER_ROLE_");
  const state = word(worker.state, "WORKER_STATE_");
  const audit = worker.worker.audit || {}, load = audit.load || { slots: 0, freeSlots: 0, blocks: 0, freeBlocks: 0 };
  const decodes = role !== "prefill", prefills = role !== "decode";
  const step = audit.recentDecode?.steps ? audit.recentDecode : audit.recentPrefill;
  const waiting = Math.max(Number(worker.queuedTokens), Number(load.queuedPrefillTokens || 0));
  const name = element("th", nameOf(worker));
  name.scope = "row";
  const badge = element("span", state, `state state-${state.replaceAll(" ", "-")}`);
  const cells = [
    ["Role", role === "unspecified" ? "–" : role],
    ["State", badge],
    ["Slots", decodes && load.slots ? meter(load.slots - load.freeSlots, load.slots) : "–"],
    ["Blocks", load.blocks ? meter(load.blocks - load.freeBlocks, load.blocks) : "–"],
    ["Queue", prefills ? count(waiting) : "–"],
    ["In/s", prefills ? count(audit.recentPrefill?.tokens || 0) : "–"],
    ["Out/s", decodes ? count(audit.recentDecode?.tokens || 0) : "–"],
    ["Step", step?.steps ? milliseconds(step.meanMs) : "–"],
  ];
  const row = element("tr");
  row.append(name, ...cells.map(([label, content]) => {
    const cell = element("td");
    cell.dataset.label = label;
    cell.append(content);
    return cell;
  }));
  return row;
}

function showPools(pools) {
  at("pools").replaceChildren(...pools.map((pool) => {
    const item = element("li");
    const [text, state] = pool.current ? ["current", "ready"] : [pool.ready ? "ready" : "not ready", "draining"];
    const workers = `${pool.workers} ${pool.workers === 1 ? "worker" : "workers"}`;
    item.append(
      element("code", pool.id), element("span", text, `state state-${state}`),
      element("span", `${workers}, ${pool.running} running`, "dim"),
    );
    return item;
  }));
}

function showStore({ store }) {
  if (!store) {
    at("store").textContent = "Redis: none";
    return;
  }
  const away = store.unavailableS === undefined ? "" : `, unavailable for ${duration(store.unavailableS)}`;
  at("store").textContent = `Redis: ${store.address}${store.embedded ? ", embedded" : ""}${away}`;
}
