// Calls of the router's endpoints, with the API key where there is one.

let key = "";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(text) {
  key = text.trim();
}

// Resolves to a response whose status is 200; rejects with ApiError otherwise.
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not the router's error body: the status has to do.
  }
  throw new ApiError(response.status, message);
}

// Yields the objects of a stream of server-sent events.
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) yield JSON.parse(part.slice("data: ".length));
  }
}
