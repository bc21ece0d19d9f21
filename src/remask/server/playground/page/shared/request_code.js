// A request as a command line for curl and as a Python program.

import { hasKey } from "./api.js";
import { copy, find } from "./dom.js";

// Arguments of the OpenAI client's own; all else goes into `extra_body`.
const OWN = new Set(["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "tools", "tool_choice"]);
const CALLS = { "v1/chat/completions": ["chat.completions", "message.content"], "v1/completions": ["completions", "text"] };

/** Show a request. `note` says what the page itself sends beside it. */
export function showRequest(url, body, note = "") {
  const key = hasKey() ? " It takes the key from the environment variable REMASK_API_KEY." : "";
  find("code-note").textContent = `${note}${key}`.trim();
  find("as-curl").textContent = asCurl(url, body);
  find("as-python").textContent = asPython(url, body);
  find("code").showModal();
}

export function startRequestCode() {
  find("close-code").addEventListener("click", () => find("code").close());
  for (const kind of ["curl", "python"]) {
    find(`copy-${kind}`).addEventListener("click", (event) => copy(event.currentTarget, find(`as-${kind}`).textContent));
  }
}

const base = () => new URL(".", location.href.split("#")[0]).href;

export function asCurl(url, body) {
  const key = hasKey() ? ' \\\n  -H "Authorization: Bearer $REMASK_API_KEY"' : "";
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return `curl ${base()}${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${quoted}'`;
}

export function asPython(url, body) {
  const key = hasKey() ? 'os.environ["REMASK_API_KEY"]' : '"none"';
  const imports = hasKey() ? "import os\n\n" : "";
  if (!CALLS[url]) {
    const headers = hasKey() ? `\nheaders = {"Authorization": f"Bearer {${key.replaceAll('"', "'")}}"}` : "";
    const sent = `httpx.post("${base()}${url}", json=body${hasKey() ? ", headers=headers" : ""}, timeout=60)`;
    return `${imports}import httpx\n\nbody = ${literal(body)}${headers}\nanswer = ${sent}\nanswer.raise_for_status()\nprint(answer.json())`;
  }
  const [method, read] = CALLS[url];
  const { own, extra } = Object.entries(body).reduce(
    (sorted, [name, value]) => {
      (OWN.has(name) ? sorted.own : sorted.extra).push([name, value]);
      return sorted;
    },
    { own: [], extra: [] },
  );
  const all = extra.length ? [...own, ["extra_body", Object.fromEntries(extra)]] : own;
  const given = all.map(([name, value]) => `    ${name}=${literal(value, 1)},\n`).join("");
  const shown = body.tools ? "print(answer.choices[0].message)" : `print(answer.choices[0].${read})`;
  return `${imports}from openai import OpenAI\n\nclient = OpenAI(base_url="${base()}v1", api_key=${key})\nanswer = client.${method}.create(\n${given})\n${shown}`;
}

/** A JSON value as Python writes it. */
function literal(value, depth = 0) {
  const [inner, outer] = ["    ".repeat(depth + 1), "    ".repeat(depth)];
  const around = (open, parts, close) => (parts.length ? `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${outer}${close}` : open + close);
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return around("[", value.map((each) => literal(each, depth + 1)), "]");
  if (typeof value === "object") {
    return around("{", Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, depth + 1)}`), "}");
  }
  return JSON.stringify(value);
}
