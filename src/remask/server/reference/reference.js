// Writes what /openapi.json says. All of it is set as text.
const byId = (id) => document.getElementById(id);

function made(name, text, kind) {
  const element = document.createElement(name);
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function resolved(spec, schema) {
  return schema.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema;
}

// A schema in words, a few levels down.
function words(spec, schema, depth = 2) {
  const name = schema.$ref ? schema.$ref.split("/").pop() : null;
  if (name && depth < 2) return name;
  const form = resolved(spec, schema);
  const choices = form.anyOf ?? form.oneOf ?? form.allOf;
  if (choices) return [...new Set(choices.map((each) => words(spec, each, depth - 1)))].filter((each) => each !== "null").join(" or ");
  if (form.enum) return form.enum.map((each) => JSON.stringify(each)).join(" or ");
  if (form.const !== undefined) return JSON.stringify(form.const);
  if (form.type === "array") return `list of ${words(spec, form.items ?? {}, depth - 1)}`;
  if (form.type === "object" && name) return name;
  const low = form.minimum ?? form.exclusiveMinimum, high = form.maximum ?? form.exclusiveMaximum;
  const range = low !== undefined || high !== undefined ? ` ${low ?? ""}…${high ?? ""}` : "";
  return `${form.type ?? "any value"}${range}`;
}

// Of a body it matters which fields must be there, of an answer which may be missing.
function fields(spec, schema, asked) {
  const list = made("dl"), form = resolved(spec, schema);
  for (const [name, part] of Object.entries(form.properties ?? {})) {
    const term = made("dt"), required = (form.required ?? []).includes(name);
    const note = asked ? (required ? ", required" : "") : (required ? "" : ", not always there");
    term.append(made("code", name), made("span", ` ${words(spec, part)}${note}`, "soft"));
    list.append(term);
    const meaning = part.description ?? resolved(spec, part).description;
    if (meaning) list.append(made("dd", meaning));
  }
  return list;
}

function endpoint(spec, path, method, operation) {
  const box = made("details"), head = made("summary");
  head.append(made("span", method.toUpperCase(), "method"), made("code", path), made("span", ` ${operation.summary ?? ""}`, "soft"));
  box.append(head, made("p", operation.description));
  const body = operation.requestBody?.content?.["application/json"]?.schema;
  if (body) box.append(made("h3", "Body"), made("p", resolved(spec, body).description, "soft"), fields(spec, body, true));
  for (const [kind, told] of Object.entries(operation.responses?.["200"]?.content ?? {})) {
    const stream = kind === "text/event-stream", schema = told.schema ?? {};
    for (const each of schema.anyOf ?? [schema]) {
      box.append(made("h3", `${stream ? "Event" : "Answer"}: ${words(spec, each, 1)}`), made("p", resolved(spec, each).description, "soft"));
      box.append(fields(spec, each, false));
    }
  }
  const statuses = Object.entries(operation.responses ?? {}).map(([status]) => status);
  box.append(made("p", `Answers: ${statuses.join(", ")}`, "soft"));
  return box;
}

function show(spec) {
  const parts = Object.entries(spec.paths).flatMap(([path, operations]) =>
    Object.entries(operations).map(([method, operation]) => endpoint(spec, path, method, operation)));
  byId("endpoints").replaceChildren(...parts);
  byId("status").textContent = `${spec.info.title} ${spec.info.version}: ${parts.length} endpoints`;
  byId("find").addEventListener("input", () => {
    const sought = byId("find").value.trim().toLowerCase();
    for (const part of parts) part.hidden = !part.textContent.toLowerCase().includes(sought);
  });
}

async function read() {
  const key = byId("key").value;
  const answer = await fetch(new URL("../openapi.json", import.meta.url), { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  byId("key-form").hidden = answer.status !== 401;
  if (answer.ok) show(await answer.json());
  else byId("status").textContent = answer.status === 401 ? "This server asks for a key." : `The server answered ${answer.status}.`;
}

byId("key-form").addEventListener("submit", (event) => { event.preventDefault(); read(); });
read().catch((error) => { byId("status").textContent = `The document could not be read: ${error.message}`; });
