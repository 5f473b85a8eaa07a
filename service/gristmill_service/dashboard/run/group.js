// A group that is not sealed: which steps of each sample have arrived, and the tokens of its rows.
import { showTokens } from "../batch/row.js";
import { paths, read } from "../shared/api.js";
import { make, quiet, tableRegion } from "../shared/dom.js";
import { count, number, some } from "../shared/text.js";

export const nameOf = group => group.uid + (group.round ? ` round ${group.round}` : "") + (group.tag ? ` (${group.tag})` : "");

// group: { uid, round }.
export async function showGroup(parent, run, group) {
  let answer;
  try {
    answer = await read(paths.samples(run, group));
  } catch (error) {
    return parent.replaceChildren(quiet(error.message, { role: "status" }));
  }
  const tokens = make("div", {});
  const again = make("button", { onclick: () => showGroup(parent, run, group) }, "Refresh");
  const open = one => make("button", { class: "way", "aria-label": `tokens of sample ${one.sample} step ${one.newest_step}`,
    onclick: () => showStep(tokens, run, group, one.sample, one.newest_step) }, `step ${one.newest_step}`);
  const part = tableRegion("Samples of the group",
    ["sample", "state", "steps", "missing", "tokens", "reward", "newest step"], answer.samples.map(one => [
      one.sample, one.reason ? `${one.state}: ${one.reason}` : one.attempt ? `${one.state}, attempt ${one.attempt}` : one.state, one.rows,
      one.missing_step == null ? "" : `step ${one.missing_step}`, one.tokens, one.reward == null ? "" : number(one.reward),
      one.newest_step == null ? "" : open(one)]));
  const more = answer.in_all > answer.samples.length ? `; the first ${count(answer.samples.length)} samples are shown` : "";
  parent.replaceChildren(make("div", { class: "bar" }, make("h3", {}, nameOf(answer)),
    make("span", { class: "quiet small" }, `${count(answer.complete)} of ${some(answer.in_all, "sample")} complete${more}`), again), part, tokens);
  part.scrollIntoView({ block: "center" });
  part.focus({ preventScroll: true });
}

async function showStep(parent, run, group, sample, step) {
  const go = (words, to) => make("button", { onclick: () => showStep(parent, run, group, sample, to) }, words);
  await showTokens(parent, `Sample ${sample} step ${step}`, start => read(paths.openRow(run, group, sample, step, start)),
    [...(step > 0 ? [go("previous step", step - 1)] : []), go("next step", step + 1)]);
}
