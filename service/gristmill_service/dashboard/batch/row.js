// A row's tokens: as text if the service has a tokenizer, otherwise as ids.
import { paths, read } from "../shared/api.js";
import { legend, make, quiet } from "../shared/dom.js";
import { count } from "../shared/text.js";

const KINDS = { "-1": "prompt", 0: "observation", 1: "trained" };

// A row of a batch.
export const showRow = (parent, run, batch, row) => showTokens(parent, `Row ${row}`,
  start => read(paths.batch(run, batch, `rows/${row}`, `?start=${start}`)),
  [], answer => `: ${answer.uid} sample ${answer.sample}${answer.round ? ` round ${answer.round}` : ""}`);

// ask(start): reads a part of the row's tokens. more: buttons for other rows. rest(answer): the end of the title.
export async function showTokens(parent, name, ask, more = [], rest = () => "", start = 0) {
  let answer;
  try {
    answer = await ask(start);
  } catch (error) {
    return parent.replaceChildren(quiet(error.message, { role: "status" }), ...more);
  }
  const text = id => answer.texts[id] ?? `${id} `, end = start + answer.tokens.length;
  const go = (words, to) => make("button", { onclick: () => showTokens(parent, name, ask, more, rest, to) }, words);
  parent.replaceChildren(
    make("div", { class: "bar" }, make("h3", {}, name + rest(answer)),
      legend([["prompt", "prompt"], ["observation", "loss mask 0"], ["trained", "loss mask 1"]]),
      make("span", { class: "quiet small end", role: "status" }, `tokens ${count(start)} to ${count(Math.max(start, end - 1))} of ${count(answer.tokens_in_all)}`)),
    make("div", { class: "tokens row-tokens", tabindex: "0", role: "region", "aria-label": `Tokens of ${name[0].toLowerCase()}${name.slice(1)}` },
      answer.tokens.map((id, index) => make("span", { class: KINDS[answer.loss_mask[index]], title: String(id) }, text(id)))),
    ...(start > 0 ? [go("previous tokens", Math.max(0, start - 2000))] : []),
    ...(end < answer.tokens_in_all ? [go("next tokens", end)] : []), ...more);
}
