// Where merging broke: the token that differs, among those around it; as text where the service has a tokenizer.
import { make, table } from "../shared/dom.js";
import { count, share } from "../shared/text.js";

const END = -1;
let texts = {};

// A token's id, and what it says where the service knows.
function token(id) {
  if (id === END) return "end";
  const text = texts[id];
  return text === undefined ? String(id) : `${JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣") || "∅"} (${id})`;
}

// Those around it: what they say, or their ids.
const around = tokens => tokens.map(id => texts[id] === undefined ? String(id) : JSON.stringify(texts[id]).slice(1, -1)).join(tokens.some(id => texts[id] !== undefined) ? "" : " ");

export function showBreaks(parent, told) {
  texts = told.texts ?? {};
  if (!told.merges) return parent.replaceChildren(make("p", { class: "quiet" }, "This run does not merge (merge: none)."));
  if (!told.in_all) return parent.replaceChildren(make("p", { class: "quiet" },
    `Nowhere: ${count(told.rows_received)} rows became ${count(told.rows)}.`));
  const { branches } = told;
  const often = told.pairs.filter(pair => pair.count > 1).slice(0, 5);
  const rest = told.in_all > told.breaks.length ? ` The first ${count(told.breaks.length)} are shown.` : "";
  parent.replaceChildren(
    make("p", {}, `${count(told.in_all)} of ${count(told.rows_received)} steps (${share(told.in_all / told.rows_received)}) did not ` +
      `extend ${branches ? "an earlier step" : "the step before them"}, and began a row of their own.${rest}`),
    make("p", { class: "small" }, often.length ? "Most often: " : "", often.flatMap((pair, index) => [index ? "; " : "",
      make("code", {}, token(pair.was)), " came back as ", make("code", {}, token(pair.now)), ` ${count(pair.count)} ×`])),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Breaks" },
      table(["trajectory", "step", "token", branches ? "in the step most like it" : "in the step before", "in this step's prompt"], told.breaks.map(one => [
        `${one.uid} sample ${one.sample}${one.round ? ` round ${one.round}` : ""}`, one.step, one.index,
        branches ? make("span", {}, `step ${one.against}: `, other(one)) : other(one), one.column ? "" : context(one, one.now)]), "Where merging broke")));
}

const other = one => one.column ? `other values of ${one.column}` : context(one, one.was);

function context(one, tokens) {
  const before = around(one.before.slice(-3)), [first = END, ...after] = tokens.slice(0, 3);
  return make("span", { class: "tokens" }, one.index > 3 ? "… " : "", before, " ", make("mark", {}, token(first)), " ", around(after));
}
