// The picture of a batch: one panel per shard, one bar per row, all to one scale.
import { canvas, colors, readout, snap, walkable } from "../shared/canvas.js";
import { legend, make, tableRegion } from "../shared/dom.js";
import { count, share, some } from "../shared/text.js";

const PARTS = ["prompt", "observation", "trained", "padding"];
const GAP = 10, HEAD = 18, ALL_BARS = 470, MOST_RANKS = 16;

// uid: of the group whose rows are marked, "" for none. marked: the number of another marked row. openRow(row): called on a selected row.
export function showPicture(parent, picture, { uid = "", marked = null, openRow }) {
  const group = uid ? picture.groups.indexOf(uid.length > 80 ? `${uid.slice(0, 79)}…` : uid) : -1;
  const widest = Math.max(1, ...picture.mini_batches.flatMap(part => part.shards.map(shard =>
    shard.trained.reduce((most, _, bar) => Math.max(most, extent(picture, shard, bar)), 0))));
  const bars = picture.mini_batches.map(part => Math.max(1, ...part.shards.map(shard => shard.trained.length)));
  const lines = Math.ceil(Math.max(1, ...picture.mini_batches.map(part => part.shards.length)) / MOST_RANKS);
  const height = Math.min(9, Math.max(1, ALL_BARS / lines / bars.reduce((sum, one) => sum + one, 0)));
  const words = readout("Point at a row, or move through the rows with the arrow keys.");
  const panels = picture.mini_batches.map((part, index) => panel(picture, part, { widest, height, bars: bars[index], words, group, marked, openRow }));
  parent.replaceChildren(
    make("div", { class: "bar" }, legend([["prompt", "prompt"], ["observation", "observation (loss mask 0)"],
      ["trained", "trained"], ["padding", "padding"]]), make("span", { class: "quiet small end" }, scale(picture, widest))),
    ...whereMarked(picture, uid, group), words, ...panels.flatMap(one => [one.title, one.shape.node]),
    ...(leftOut(picture) ? [make("p", { class: "quiet small" }, `${picture.mini_batches.length} of ${picture.mini_batches_in_all} mini-batches are drawn; select others above.`)] : []),
    make("details", {}, make("summary", {}, "The same as a table"), shardTable(picture)));
  panels.forEach(one => one.shape.redraw());
}

function whereMarked(picture, uid, group) {
  if (!uid) return [];
  const places = picture.mini_batches.flatMap(part => part.shards.flatMap((shard, rank) => (shard.group ?? []).includes(group) && group >= 0 ? [`mini-batch ${part.index} rank ${rank}`] : []));
  return [make("p", { class: "small", role: "status" }, places.length ? `Marked: the rows of ${uid}, in ${places.join(", ")}.`
    : `No row of ${uid} can be marked: the group was dropped, or each bar is several rows. Select a single mini-batch.`)];
}

// Returns the number of the shard's row with the most tokens; null if it has no rows, or each bar is several rows.
export function longestRow(picture, { miniBatch, rank }) {
  const shard = picture.mini_batches.find(part => part.index === miniBatch)?.shards[rank];
  const rows = (shard?.row ?? []).map((row, bar) => ({ row, tokens: shard.prompt[bar] + shard.observation[bar] + shard.trained[bar] }))
    .filter(one => one.row >= 0);
  return rows.length ? rows.reduce((most, one) => one.tokens > most.tokens ? one : most).row : null;
}

const leftOut = picture => picture.mini_batches.length < picture.mini_batches_in_all;
const total = (shard, bar) => PARTS.reduce((sum, name) => sum + shard[name][bar], 0);
// Tokens that a row shares with the previous row belong to that row: its bar begins at the first token that is not shared.
const indented = picture => picture.layout === "prefix_tree" && picture.rows_per_bar === 1;
const extent = (picture, shard, bar) => (indented(picture) ? shard.shared[bar] : 0) + total(shard, bar);

function scale(picture, widest) {
  const rows = picture.rows_per_bar > 1 ? `each bar is ${picture.rows_per_bar} rows; ` : "";
  return `${rows}the widest bar is ${count(widest)} tokens${indented(picture) ? "; a bar begins where its row diverges from the previous row" : ""}`;
}

function panel(picture, part, { widest, height, bars, words, group, marked, openRow }) {
  const ranks = part.shards.length, columns = Math.min(ranks, MOST_RANKS), lines = Math.ceil(ranks / columns);
  const tall = HEAD + bars * height, paddingFirst = picture.layout === "left_padded";
  const box = (rank, width) => {
    const wide = (width - GAP * (columns - 1)) / columns;
    return { left: rank % columns * (wide + GAP), top: Math.floor(rank / columns) * (tall + 6), wide };
  };
  const title = make("p", { class: "small quiet" }, `mini-batch ${part.index}: ${some(part.rows, "row")}` +
    `${part.padding_rows ? ` and ${some(part.padding_rows, "padding row")}` : ""}, ${some(part.loss_tokens, "trained token")}`);
  const shape = canvas(`Mini-batch ${part.index}: ${ranks} ranks with one panel each, one bar per row`, lines * (tall + 6), (context, width) => {
    const paint = colors(...PARTS, "grid", "quiet", "text", "stuck");
    part.shards.forEach((shard, rank) => drawShard(context, shard, rank, box(rank, width), paint));
    part.shards.forEach((shard, rank) => (shard.row ?? []).forEach((row, bar) => {
      if (row === marked || group >= 0 && shard.group[bar] === group) outline(context, box(rank, width), rank, bar, paint.stuck);
    }));
    if (shape.chosen) outline(context, box(shape.chosen[0], width), ...shape.chosen, paint.text);
  });
  function drawShard(context, shard, rank, { left, top, wide }, paint) {
    context.fillStyle = paint.quiet;
    context.fillText(columns > 10 ? `${rank}` : `rank ${rank}`, left, top + HEAD / 2);
    const order = paddingFirst ? ["padding", ...PARTS.slice(0, 3)] : PARTS, gap = height >= 4 ? 1 : 0;
    for (let bar = 0; bar < shard.trained.length; bar += 1) {
      const y = snap(top + HEAD + bar * height), tallness = snap(top + HEAD + (bar + 1) * height) - y - gap;
      let x = left + (indented(picture) ? shard.shared[bar] / widest * wide : 0);
      if (x > left) {
        context.fillStyle = paint.grid;
        context.fillRect(left, y + tallness / 2, x - left, 1);
      }
      for (const name of order) {
        const long = shard[name][bar] / widest * wide;
        context.fillStyle = paint[name];
        if (long > 0) context.fillRect(x, y, long, tallness);
        x += long;
      }
    }
  }
  function outline(context, { left, top, wide }, rank, bar, color) {
    const long = extent(picture, part.shards[rank], bar) / widest * wide;
    context.strokeStyle = color;
    context.lineWidth = 1.5;
    context.strokeRect(left - 1, top + HEAD + bar * height - 1.5, long + 2, height + 2);
  }
  walkable(shape, {
    readout: words,
    find(x, y) {
      for (let rank = 0; rank < ranks; rank += 1) {
        const { left, top, wide } = box(rank, shape.node.clientWidth), bar = Math.floor((y - top - HEAD) / height);
        if (x >= left && x <= left + wide && bar >= 0 && bar < part.shards[rank].trained.length) return [rank, bar];
      }
      return null;
    },
    move(chosen, right, down) {
      const [rank, bar] = chosen ?? [0, 0], next = (rank + right + ranks) % ranks;
      const most = part.shards[next].trained.length;
      return most ? [next, Math.min(most - 1, Math.max(0, bar + down))] : null;
    },
    open: ([rank, bar]) => { const row = part.shards[rank].row?.[bar]; if (row >= 0) openRow(row); },
    describe: ([rank, bar]) => `mini-batch ${part.index}, rank ${rank}, ${named(picture, part.shards[rank], bar)}: ` +
      [...(picture.layout === "prefix_tree" ? ["shared"] : []), ...PARTS]
        .map(name => `${name} ${count(part.shards[rank][name][bar])}`).join(", "),
  });
  return { title, shape };
}

function named(picture, shard, bar) {
  if (!shard.row) return `rows ${bar * picture.rows_per_bar} to ${Math.min(shard.rows, (bar + 1) * picture.rows_per_bar) - 1} of the shard`;
  if (shard.row[bar] < 0) return "padding row";
  return `row ${shard.row[bar]} (${picture.groups[shard.group[bar]] ?? "group"} sample ${shard.sample[bar]}, ${covered(shard, bar)})`;
}

function covered(shard, bar) {
  const [first, last, steps] = [shard.first[bar], shard.last[bar], shard.steps[bar]];
  if (steps === 1) return `step ${first}`;
  // The path through a tree may skip steps.
  return last - first + 1 === steps ? `steps ${first} to ${last}` : `${steps} of the steps ${first} to ${last}`;
}

function shardTable(picture) {
  const sum = values => values.reduce((total, value) => total + value, 0);
  const kinds = [...(picture.layout === "prefix_tree" ? ["shared"] : []), ...PARTS];
  return tableRegion("Tokens of each shard", ["mini-batch", "rank", "rows", ...kinds, "padding share"],
    picture.mini_batches.flatMap(part => part.shards.map((shard, rank) => {
      const sums = kinds.map(name => sum(shard[name])), own = sum(sums.slice(-PARTS.length));
      return [part.index, rank, shard.rows, ...sums, share(sums.at(-1) / Math.max(1, own))];
    })));
}
