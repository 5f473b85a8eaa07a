// Renders /openapi.json as text: parameters, fields with their meaning, and a command line to try for each call.
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  parent?.append(node);
  return node;
};

function explain(spec) {
  const resolve = schema => schema?.$ref ? spec.components.schemas[schema.$ref.split("/").pop()] : schema ?? {};

  const example = given => {
    const schema = resolve(given);
    if (schema.examples) return schema.examples[0];
    if ("default" in schema) return schema.default;
    if (schema.anyOf) return example(schema.anyOf[0]);
    if (schema.enum) return schema.enum[0];
    if (schema.type === "array") return [example(schema.items)];
    if (schema.type === "object") {
      const required = Object.entries(schema.properties ?? {}).filter(([name, field]) =>
        (schema.required ?? []).includes(name) || resolve(field).examples);
      return Object.fromEntries(required.map(([name, field]) => [name, example(field)]));
    }
    return { integer: 0, number: 0, boolean: false, string: "..." }[schema.type] ?? null;
  };

  const type = given => {
    const schema = resolve(given);
    if (schema.anyOf) return schema.anyOf.map(type).join(" | ");
    if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" | ");
    return schema.type === "array" ? `[${type(schema.items)}]` : schema.title && schema.properties ? schema.title : schema.type;
  };

  const table = (title, rows, parent) => {
    if (!rows.length) return;
    make("p", title, parent).className = "about";
    const body = make("table", "", parent);
    for (const cells of rows) {
      const row = make("tr", "", body);
      make("code", cells[0], make("td", "", row));
      make("code", cells[1], make("td", "", row));
      make("td", cells[2], row);
    }
  };

  const fields = (given, parent) => {
    const schema = resolve(given), inner = schema.properties ?? {};
    table("", Object.entries(inner).map(([name, field]) => [
      name + ((schema.required ?? []).includes(name) ? "" : "?"), type(field), field.description ?? ""]), parent);
    for (const field of Object.values(inner)) {
      const items = resolve(field.items ?? field);
      if (items.properties) { make("p", `Each of ${field.title ?? items.title}:`, parent).className = "about"; fields(items, parent); }
    }
  };

  const show = (path, method, call, parent) => {
    const details = make("details", "", parent), head = make("summary", "", details);
    make("span", method.toUpperCase(), head).className = "method";
    make("code", path, head);
    make("span", "  " + (call.description ?? "").split("\n")[0], head).className = "about";
    table("Parameters", (call.parameters ?? []).map(one => [
      `${one.name}${one.required ? "" : "?"} (${one.in})`, type(one.schema), one.description ?? ""]), details);
    const body = call.requestBody?.content?.["application/json"]?.schema;
    if (body) { make("p", "Body", details).className = "about"; fields(body, details); }
    const url = location.origin + path.replace("{run}", "guess-1").replace("{model}", "policy").replace(/{\w+}/g, "0");
    const needed = (call.parameters ?? []).filter(one => one.in === "query" && one.required).map(one => `${one.name}=0`);
    const send = body ? ` \\\n  -H 'Content-Type: application/json' -d '${JSON.stringify(example(body))}'` : "";
    const verb = method === "get" ? "" : ` -X ${method.toUpperCase()}`;
    make("pre", `curl${verb} '${url}${needed.length ? "?" + needed.join("&") : ""}'${send}`, details);
    const answer = Object.entries(call.responses).find(([status]) => status < 300);
    const given = answer[1].content?.["application/json"]?.schema;
    make("p", `Answer ${answer[0]}${given ? "" : answer[1].content ? ": " + Object.keys(answer[1].content)[0] : ""}`, details).className = "about";
    if (given) fields(given, details);
  };

  make("span", spec.info.description, document.querySelector("#description"));
  const sections = {};
  for (const [path, calls] of Object.entries(spec.paths))
    for (const [method, call] of Object.entries(calls)) {
      const tag = call.tags[0];
      if (!sections[tag]) {
        sections[tag] = make("section", "", document.querySelector("main"));
        make("h2", tag, sections[tag]);
      }
      show(path, method, call, sections[tag]);
    }
}

const answer = await fetch("openapi.json");
if (answer.ok) explain(await answer.json());
else document.querySelector("#description").textContent = (await answer.json()).error.message;
