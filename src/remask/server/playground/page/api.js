// The server's API: the key, errors in words, and streams.

let key = ""; // in memory only: gone with the page

export function useKey(given) {
  key = given;
}

/** What went wrong: `status` 0 is no answer at all, `field` the field that is to blame, if one is. */
export class Problem extends Error {
  constructor(status, message, field = null) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

/** The JSON answer to a request. Throws `Problem`. */
export async function call(method, url, body = undefined, more = {}) {
  return (await send(method, url, body, more)).json();
}

/** The objects of a stream of server-sent events, as they come. Throws `Problem`, also for an error inside the stream. */
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
      const told = JSON.parse(data);
      if (told.error) throw problem(STATUS[told.error.code] ?? 500, told.error, null);
      yield told;
    }
  }
}

// What a stream that has begun can fail with has no status of its own.
const STATUS = { deadline_exceeded: 504, draining: 503 };

function broken(error) {
  if (error?.name === "AbortError") throw error;
  throw new Problem(0, "The stream broke off before its end. Try again.");
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
  const told = await response.json().catch(() => null);
  throw problem(response.status, told?.error, response.headers.get("Retry-After"));
}

function problem(status, error, wait) {
  const said = error?.message ?? `status ${status}`;
  const words = {
    400: error?.param ? `The server refuses the field ${error.param}. It says: ${said}` : `The server refuses this: ${said}`,
    401: "This key is not known to the server.",
    404: `Not found: ${said}`,
    409: `Not possible just now: ${said}`,
    413: `This is too large for the server: ${said}`,
    429: `The server is busy: as many requests wait as it takes. Try again in ${wait ?? 1} s.`,
    503: `The server is about to stop and takes no new requests (${said}). Use another one, or try again in ${wait ?? 5} s.`,
    504: `The request ran out of time: ${said}`,
  };
  return new Problem(status, words[status] ?? `The server failed: ${said}`, error?.param ?? null);
}
