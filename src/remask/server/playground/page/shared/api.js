// Calls to the server's API: the key, errors as sentences, and streams.

let key = ""; // in memory only: gone with the page

export function useKey(given) {
  key = given;
}

export const hasKey = () => key !== "";

/** What went wrong. `status` is 0 if the server did not answer; `field` names the field that caused it, or is null. */
export class Problem extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

/** Send a request. Returns its JSON answer. Throws `Problem`. */
export async function call(method, url, body = undefined, more = {}) {
  return (await send(method, url, body, more)).json();
}

/** Yield the objects of a stream of server-sent events. Throws `Problem`, also for an error inside the stream. */
export async function* events(url, body, signal) {
  const response = await send("POST", url, body, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) broken();
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw problem(STATUS[chunk.error.code] ?? 500, chunk.error, null);
      yield chunk;
    }
  }
}

// An error inside a stream carries a code, not a status.
const STATUS = { deadline_exceeded: 504, draining: 503 };

function broken(error) {
  if (error?.name === "AbortError") throw error;
  throw new Problem(0, "The stream ended too early. Try again.");
}

async function send(method, url, body, more) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url, { method, headers, body: body && JSON.stringify(body), ...more });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => null);
  throw problem(response.status, answer?.error, response.headers.get("Retry-After"));
}

function problem(status, error, wait) {
  const message = error?.message ?? `status ${status}`;
  const words = {
    400: error?.param ? `The server refuses the field ${error.param}. It says: ${message}` : `The server refuses this: ${message}`,
    401: "This key is not known to the server.",
    404: `Not found: ${message}`,
    409: `Not possible just now: ${message}`,
    413: `This is too large for the server: ${message}`,
    429: `The server is busy: as many requests wait as it takes. Try again in ${wait ?? 1} s.`,
    503: error?.code === "too_many_connections" ? `The server is busy: ${message}` : `The server is about to stop and takes no new requests (${message}). Use another one, or try again in ${wait ?? 5} s.`,
    504: `The request ran out of time: ${message}`,
  };
  return new Problem(status, words[status] ?? `The server failed: ${message}`, error?.param ?? null);
}
