// Where merging broke: the token that differs, with the tokens around it; as text if the service has a tokenizer.
import { make, quiet, tableRegion } from "../shared/dom.js";
import { count, share } from "../shared/text.js";

const END = -1;
let texts = {};

// A token's id, and its text if the service has a tokenizer.
function token(id) {
  if (id === END) return "end";
  const text = texts[id];
  return text === undefined ? String(id) : `${JSON.stringify(text).slice(1, -1).replaceAll(" ", "␣") || "∅"} (${id})`;
}

// The tokens around it: their texts, or their ids.
const around = tokens => tokens.map(id => texts[id] === undefined ? String(id) : JSON.stringify(texts[id]).slice(1, -1)).join(tokens.some(id => texts[id] !== undefined) ? "" : " ");

export function showBreaks(parent, answer) {
  texts = answer.texts ?? {};
  if (!answer.merges) return parent.replaceChildren(quiet("This run does not merge (merge: none)."));
  if (!answer.in_all) return parent.replaceChildren(
    quiet(`No breaks: ${count(answer.rows_received)} rows were merged into ${count(answer.rows)}.`));
  const { branches } = answer;
  const often = answer.pairs.filter(pair => pair.count > 1).slice(0, 5);
  const rest = answer.in_all > answer.breaks.length ? ` Shown are ${count(answer.breaks.length)}, at most 3 of each trajectory.` : "";
  parent.replaceChildren(
    make("p", {}, `${count(answer.in_all)} of ${count(answer.rows_received)} steps (${share(answer.in_all / answer.rows_received)}) did not ` +
      `extend ${branches ? "an earlier step" : "the previous step"}, and began a new row.${rest}`),
    make("p", { class: "small" }, often.length ? "Most often: " : "", often.flatMap((pair, index) => [index ? "; " : "",
      make("code", {}, token(pair.was)), " came back as ", make("code", {}, token(pair.now)), ` ${count(pair.count)} ×`])),
    tableRegion("Breaks",
      ["trajectory", "step", "token", branches ? "in the most similar step" : "in the previous step", "in this step's prompt"], answer.breaks.map(one => [
        `${one.uid} sample ${one.sample}${one.round ? ` round ${one.round}` : ""}`, one.step, one.index,
        branches ? make("span", {}, `step ${one.against}: `, other(one)) : other(one), one.column ? "" : context(one, one.now)])));
}

const other = one => one.column ? `different values of ${one.column}` : context(one, one.was);

function context(one, tokens) {
  const before = around(one.before.slice(-3)), [first = END, ...after] = tokens.slice(0, 3);
  return make("span", { class: "tokens" }, one.index > 3 ? "… " : "", before, " ", make("mark", {}, token(first)), " ", around(after));
}
