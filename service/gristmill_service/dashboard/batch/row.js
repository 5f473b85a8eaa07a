// A row's tokens: what they say where the service has a tokenizer, else their ids.
import { paths, read } from "../shared/api.js";
import { legend, make } from "../shared/dom.js";
import { count } from "../shared/text.js";

const KINDS = { "-1": "prompt", 0: "observation", 1: "trained" };

// A row of a batch.
export const showRow = (parent, run, batch, row) => showTokens(parent, `Row ${row}`,
  start => read(paths.batch(run, batch, `rows/${row}`, `?start=${start}`)),
  [], told => `: ${told.uid} sample ${told.sample}${told.round ? ` round ${told.round}` : ""}`);

// ask(start): some of the row's tokens. more: buttons that lead to other rows. rest(told): what the title says after the row's name.
export async function showTokens(parent, name, ask, more = [], rest = () => "", start = 0) {
  let told;
  try {
    told = await ask(start);
  } catch (error) {
    return parent.replaceChildren(make("p", { class: "quiet", role: "status" }, error.message), ...more);
  }
  const text = id => told.texts[id] ?? `${id} `, end = start + told.tokens.length;
  const go = (words, to) => make("button", { onclick: () => showTokens(parent, name, ask, more, rest, to) }, words);
  parent.replaceChildren(
    make("div", { class: "bar" }, make("h3", {}, name + rest(told)),
      legend([["prompt", "prompt"], ["observation", "loss mask 0"], ["trained", "loss mask 1"]]),
      make("span", { class: "quiet small end", role: "status" }, `tokens ${count(start)} to ${count(Math.max(start, end - 1))} of ${count(told.tokens_in_all)}`)),
    make("div", { class: "tokens row-tokens", tabindex: "0", role: "region", "aria-label": `Tokens of ${name[0].toLowerCase()}${name.slice(1)}` },
      told.tokens.map((id, index) => make("span", { class: KINDS[told.loss_mask[index]], title: String(id) }, text(id)))),
    ...(start > 0 ? [go("tokens before", Math.max(0, start - 2000))] : []),
    ...(end < told.tokens_in_all ? [go("tokens after", end)] : []), ...more);
}
