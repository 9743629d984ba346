// The prompt box: streams an answer, then shows where the request went.

import { ApiError, call, events } from "./api.js";
import { bytes, element, milliseconds, timelineRow } from "./charts.js";

const at = (id) => document.getElementById(id);
// Characters of an answer that are kept on the page.
const MOST_SHOWN = 200_000;

let running = null;

// `model` and `chats` return what the last status said; `refused` is called where an API key is needed.
export function connect({ model, chats, refused }) {
  at("prompt-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send(model(), chats(), refused);
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("prompt-form").requestSubmit();
  });
}

async function send(model, chats, refused) {
  running = new AbortController();
  begin();
  try {
    const text = at("prompt").value;
    const prompt = chats ? { messages: [{ role: "user", content: text }] } : { prompt: text };
    const body = {
      model, ...prompt, max_tokens: Number(at("max-tokens").value), temperature: Number(at("temperature").value),
    };
    const response = await call(chats ? "/ui/chat" : "/ui/completion", {
      method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal: running.signal,
    });
    for await (const event of events(response)) receive(event);
  } catch (error) {
    if (error.name === "AbortError") at("outcome").textContent = "stopped";
    else fail(error.message);
    if (error instanceof ApiError && error.status === 401) refused();
  } finally {
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
  }
}

function begin() {
  at("send").disabled = true;
  at("stop").disabled = false;
  at("result").hidden = false;
  at("trace").hidden = true;
  at("answer").textContent = "";
  at("outcome").className = "dim";
  at("outcome").textContent = "waiting for the first token …";
}

function receive(event) {
  if (event.error) fail(event.error.message);
  else if (event.finish) end(event);
  else if (at("answer").textContent.length < MOST_SHOWN) {
    at("answer").append(event.text);
    at("outcome").textContent = "streaming …";
  }
}

function fail(message) {
  at("outcome").className = "failed";
  at("outcome").textContent = message;
}

function end(event) {
  const cached = event.cached_tokens ? ` (${event.cached_tokens} cached)` : "";
  at("outcome").textContent =
    `${event.prompt_tokens} prompt tokens${cached}, ${event.completion_tokens} output tokens, ended by ${event.finish}`;
  if (event.trace?.spans.length) showTrace(event.trace);
}

function showTrace(trace) {
  const where = { queue: "router", prefill: trace.prefill_worker, transfer: "", decode: trace.decode_worker };
  const local = trace.prefill_worker === trace.decode_worker;
  where.transfer = local ? "same worker" : `${trace.prefill_worker} → ${trace.decode_worker}`;
  const total = Math.max(...trace.spans.map(([, , end]) => end), 1e-3);
  at("timeline").replaceChildren(
    ...trace.spans.map(([name, begin, end]) => timelineRow(name, where[name], begin, end, total)),
  );
  const attempts = trace.attempts > 1 ? ` in ${trace.attempts} attempts` : "";
  const reason = trace.reason ? ` · ${trace.reason}` : "";
  at("route").textContent = `${milliseconds(total)} in all${attempts} · ${bytes(trace.kv_bytes)} of KV sent${reason}`;
  at("trace").hidden = false;
}
