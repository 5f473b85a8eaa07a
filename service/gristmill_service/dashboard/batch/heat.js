// Loads of many ranks: one line per rank, the rank that waits longest first; one column per micro-step, dark if a rank works as
// long as the slowest.
import { canvas, colors, readout, walkable } from "../shared/canvas.js";
import { legend, make } from "../shared/dom.js";
import { count, share } from "../shared/text.js";

const LABEL = 62, END = 74, HEAD = 18, TALL = 13;

export function showHeat(parent, picture) {
  const words = readout("Point at a cell, or move through the cells with the arrow keys.");
  const ranks = Math.max(...picture.mini_batches.map(part => part.shards.length));
  const columns = picture.mini_batches.flatMap(part => {
    const loads = part.shards.map(shard => shard.load), steps = Math.max(0, ...loads.map(load => load.length));
    return Array.from({ length: steps }, (_, step) => ({ part: part.index, step, isFirst: step === 0, loads: loads.map(load => load[step] ?? 0),
      slowest: Math.max(1, ...loads.map(load => load[step] ?? 0)) }));
  });
  const whole = columns.reduce((sum, one) => sum + one.slowest, 0);
  const waits = Array.from({ length: ranks }, (_, rank) => 1 - columns.reduce((sum, one) => sum + one.loads[rank], 0) / Math.max(1, whole));
  const order = waits.map((_, rank) => rank).sort((a, b) => waits[b] - waits[a]);
  const shape = canvas(`Loads of ${ranks} ranks in ${columns.length} micro-steps; ranks wait ${share(mean(waits))} of their time, rank ${order[0]} the longest`, HEAD + ranks * TALL + 2, (context, width) => {
    const paint = colors("trained", "padding", "quiet", "text"), wide = (width - LABEL - END) / columns.length;
    columns.forEach((one, column) => {
      const x = LABEL + column * wide;
      order.forEach((rank, line) => {
        const load = one.loads[rank] ?? 0;
        context.globalAlpha = 1;
        context.fillStyle = paint.padding;
        context.fillRect(x, HEAD + line * TALL, Math.max(1, wide - (wide > 4 ? 1 : 0)), TALL - 1);
        context.globalAlpha = load / one.slowest;
        context.fillStyle = paint.trained;
        context.fillRect(x, HEAD + line * TALL, Math.max(1, wide - (wide > 4 ? 1 : 0)), TALL - 1);
      });
      context.globalAlpha = 1;
      if (!one.isFirst) return;
      context.fillStyle = paint.quiet;
      context.fillRect(x - 1, 2, 1, HEAD + ranks * TALL);
      const own = columns.filter(other => other.part === one.part).length * wide;
      if (own > 24) context.fillText(String(one.part), x + 3, HEAD / 2, own - 4);
    });
    context.fillStyle = paint.quiet;
    context.fillText("mini-batch", 0, HEAD / 2, LABEL - 4);
    order.forEach((rank, line) => {
      context.fillText(`rank ${rank}`, 0, HEAD + (line + .5) * TALL);
      context.fillText(share(waits[rank]), width - END + 12, HEAD + (line + .5) * TALL);
    });
    if (!shape.chosen) return;
    context.strokeStyle = paint.text;
    context.lineWidth = 1.5;
    context.strokeRect(LABEL + shape.chosen[1] * wide - 1, HEAD + shape.chosen[0] * TALL - 1, wide + 1, TALL + 1);
  });
  walkable(shape, {
    readout: words,
    find(x, y) {
      const line = Math.floor((y - HEAD) / TALL), column = Math.floor((x - LABEL) / (shape.node.clientWidth - LABEL - END) * columns.length);
      return line >= 0 && line < ranks && column >= 0 && column < columns.length ? [line, column] : null;
    },
    move: (chosen, right, down) => [Math.min(ranks - 1, Math.max(0, (chosen?.[0] ?? 0) + down)), Math.min(columns.length - 1, Math.max(0, (chosen?.[1] ?? 0) + right))],
    describe: ([line, column]) => {
      const one = columns[column], rank = order[line];
      return `mini-batch ${one.part}, rank ${rank}, micro-step ${one.step * picture.micro_steps_per_cell}: ${count(one.loads[rank])} ` +
        `${picture.load_unit === "tokens" ? "tokens" : "(in FLOPs)"}, ${share(one.loads[rank] / one.slowest)} of the slowest, rank ${one.loads.indexOf(one.slowest)}; it waits ${share(waits[rank])} of the batch`;
    },
  });
  parent.replaceChildren(make("div", { class: "bar" }, legend([["trained", "works as long as the slowest rank"], ["wait", "waits"]]),
    make("span", { class: "quiet small end" }, "On the right: the share of time that the rank waits, longest first.")), words, shape.node);
  shape.redraw();
}

const mean = values => values.reduce((sum, one) => sum + one, 0) / Math.max(1, values.length);
