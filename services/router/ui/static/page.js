// Polls the status, and asks for an API key where one is needed.

import { call, setKey } from "./api.js";
import { show } from "./cluster.js";
import { connect } from "./prompt.js";

const POLL_MS = 1500;
const at = (id) => document.getElementById(id);

let latest = null;
let timer = 0;
// Without a key that is valid, polling would fill the audit log with refusals.
let asking = false;

async function poll() {
  clearTimeout(timer);
  if (document.hidden || asking) return;
  try {
    latest = await (await call("/ui/status")).json();
    show(latest);
    notice("");
    at("main").hidden = false;
  } catch (error) {
    if (error.status === 401 || error.status === 403) return askForKey(error.message);
    notice(`The router does not answer: ${error.message}`);
  }
  timer = setTimeout(poll, POLL_MS);
}

function notice(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

function askForKey(reason) {
  asking = true;
  notice(reason);
  at("main").hidden = true;
  at("key-form").hidden = false;
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  asking = false;
  poll();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
connect({
  model: () => latest?.status.router.model ?? "",
  chats: () => latest?.chats ?? false,
  refused: () => askForKey("this API key is not valid"),
});
at("main").hidden = true;
poll();
