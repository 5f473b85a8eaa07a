// A group that is not sealed: what of each sample has come, and the tokens of its rows.
import { showTokens } from "../batch/row.js";
import { paths, read } from "../shared/api.js";
import { make, table } from "../shared/dom.js";
import { count, number, some } from "../shared/text.js";

export const nameOf = group => group.uid + (group.round ? ` round ${group.round}` : "") + (group.tag ? ` (${group.tag})` : "");

// group: { uid, round }.
export async function showGroup(parent, run, group) {
  let told;
  try {
    told = await read(paths.samples(run, group));
  } catch (error) {
    return parent.replaceChildren(make("p", { class: "quiet", role: "status" }, error.message));
  }
  const tokens = make("div", {});
  const again = make("button", { onclick: () => showGroup(parent, run, group) }, "Look again");
  const open = one => make("button", { class: "way", "aria-label": `tokens of sample ${one.sample} step ${one.newest_step}`,
    onclick: () => showStep(tokens, run, group, one.sample, one.newest_step) }, `step ${one.newest_step}`);
  const part = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Samples of the group" },
    table(["sample", "state", "steps", "missing", "tokens", "reward", "newest"], told.samples.map(one => [
      one.sample, one.reason ? `${one.state}: ${one.reason}` : one.attempt ? `${one.state}, attempt ${one.attempt}` : one.state, one.rows,
      one.missing_step == null ? "" : `step ${one.missing_step}`, one.tokens, one.reward == null ? "" : number(one.reward),
      one.newest_step == null ? "" : open(one)]), "Samples of the group"));
  const more = told.in_all > told.samples.length ? `, the first ${count(told.samples.length)} of which are shown` : "";
  parent.replaceChildren(make("div", { class: "bar" }, make("h3", {}, nameOf(told)),
    make("span", { class: "quiet small" }, `${count(told.complete)} of ${some(told.in_all, "sample")} complete${more}`), again), part, tokens);
  part.scrollIntoView({ block: "center" });
  part.focus({ preventScroll: true });
}

async function showStep(parent, run, group, sample, step) {
  const go = (words, to) => make("button", { onclick: () => showStep(parent, run, group, sample, to) }, words);
  await showTokens(parent, `Sample ${sample} step ${step}`, start => read(paths.openRow(run, group, sample, step, start)),
    [...(step > 0 ? [go("step before", step - 1)] : []), go("step after", step + 1)]);
}
