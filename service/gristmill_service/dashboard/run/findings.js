// What delays a run, worst first, in red if intervention is needed. Each finding links to its batch, rank or group.
import { make } from "../shared/dom.js";
import { since } from "../shared/text.js";

export const rankId = (model, rank) => `rank-${model}-${rank}`;

// open(what): { batch }, { model, rank }, { batch, model, miniBatch, rank } for the rows of this shard, or { group } for an open group.
export function findingItems(health, open) {
  return health.findings.map(one => {
    const isLoud = ["failed", "stuck"].includes(one.level);
    return make("li", { class: isLoud ? "loud" : "" },
      make("b", { class: `state ${one.level === "note" ? "" : one.level}` }, one.level), " ", one.text,
      ...(one.since == null ? [] : [", for ", since(one.since, health.watched_since)]), " ", ...ways(one, open), ...parts(one));
  });
}

// The reason and the remedy of a failed batch.
export const parts = ({ reason, remedy }) => !reason ? [] : [make("dl", { class: "parts" }, make("dt", {}, "reason"), make("dd", {}, reason),
  ...(remedy ? [make("dt", {}, "remedy"), make("dd", {}, remedy)] : []))];

function ways(one, open) {
  const way = (text, what) => make("button", { class: "way", onclick: () => open(what) }, text);
  return [
    one.batch == null ? null : way(`batch ${one.batch}`, { batch: one.batch }),
    ...(one.ranks ?? []).map(rank => way(`${one.model === "critic" ? "critic " : ""}rank ${rank}`, { model: one.model, rank })),
    one.mini_batch == null ? null : way(`longest row of rank ${one.ranks[0]}`,
      { batch: one.batch, model: one.model, miniBatch: one.mini_batch, rank: one.ranks[0] }),
    one.uid == null ? null : way("samples of the oldest group", { group: { uid: one.uid, round: one.round ?? 0 } }),
  ].filter(Boolean);
}
