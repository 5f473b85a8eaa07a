// Creates the nodes of the page. Data is always inserted as text, never as markup.
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter(child => child != null).map(child => child instanceof Node ? child : String(child)));
  return node;
}

export function table(heads, rows, caption) {
  const isNumber = value => typeof value === "number" || typeof value === "string" && /^-?\d[\d.,]*%?$/.test(value);
  const numeric = heads.map((_, index) => rows.length > 0 && rows.every(row => row[index] === "" || isNumber(row[index])));
  return make("table", {},
    caption ? make("caption", { class: "skip" }, caption) : null,
    make("thead", {}, make("tr", {}, heads.map((head, index) =>
      make("th", { scope: "col", class: numeric[index] ? "number" : "" }, head)))),
    make("tbody", {}, rows.map(row => make("tr", {}, row.map((value, index) =>
      make("td", numeric[index] ? { class: "number" } : {}, typeof value === "number" ? value.toLocaleString("en") : value))))));
}

// A table in a region with this label that can scroll and be focused.
export const tableRegion = (label, heads, rows) =>
  make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table(heads, rows));

export const quiet = (text, attributes = {}) => make("p", { class: "quiet", ...attributes }, text);

export const tile = (name, value, more) => make("div", {}, make("dt", {}, name), make("dd", {}, ...[value].flat(), make("span", {}, more)));

export function section(title, ...children) {
  return make("section", { "aria-label": title }, make("div", { class: "bar" }, make("h2", {}, title)), ...children);
}

export const legend = entries => make("ul", { class: "legend small" },
  entries.map(([kind, text]) => make("li", {}, make("i", { class: kind, "aria-hidden": "true" }), text)));
