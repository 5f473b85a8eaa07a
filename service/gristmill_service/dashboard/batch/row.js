// A row's tokens: as text if the service has a tokenizer, otherwise as ids.
import { paths, read } from "../shared/api.js";
import { legend, make, quiet } from "../shared/dom.js";
import { count } from "../shared/text.js";

const ROLES = { assistant: "trained", tool: "observation" };
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
    ...conversation(answer.conversation),
    ...(start > 0 ? [go("previous tokens", Math.max(0, start - 2000))] : []),
    ...(end < answer.tokens_in_all ? [go("next tokens", end)] : []), ...more);
}

// What was said in a row, from the lines that a recorder wrote: one per step.
function conversation(lines) {
  let steps;
  try {
    steps = lines.split("\n").filter(line => line).map(line => JSON.parse(line));
  } catch {
    return [quiet("The column conversation has no lines of JSON.")];
  }
  if (!steps.length) return [];
  const said = steps.flatMap((step, number) => [
    // A step that continues another than the one before it in this row: there the conversation broke.
    ...(number && step.continues == null ? [quiet("The next call did not continue this conversation.")] : []),
    ...(!number && step.continues != null ? [quiet(`Continues step ${step.continues}, which is in another row.`)] : []),
    ...(step.messages ?? [{ role: "prompt", content: step.prompt }]).flatMap(message => turn(message)), ...turn(step.answer)]);
  return [make("h4", {}, "Conversation"), make("div", { class: "conversation", role: "region", tabindex: "0", "aria-label": "Conversation" }, said)];
}

function turn(message) {
  const part = (name, text) => !text ? [] : [make("p", { class: ROLES[message.role] ?? "prompt" }, make("b", {}, name), ` ${text}`)];
  const content = message.content, words = typeof content === "string" || content == null ? content : content.map(one => one.text ?? `[${one.type}]`).join("");
  return [...part(`${message.role}, thinking`, message.reasoning ?? message.reasoning_content), ...part(message.role, words),
    ...(message.tool_calls ?? []).flatMap(call => part(`${message.role}, call of ${call.function.name}`, call.function.arguments || "{}"))];
}
