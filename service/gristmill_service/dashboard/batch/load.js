// Loads: one lane per rank. Each micro-step is as wide as the load of its slowest rank; empty parts are waits.
import { canvas, colors, readout, walkable } from "../shared/canvas.js";
import { legend, make } from "../shared/dom.js";
import { count, share, some } from "../shared/text.js";

const LABEL = 62, END = 74;

export function showLoad(parent, picture) {
  const words = readout("Point at a micro-step, or move through the micro-steps with the arrow keys.");
  const unit = picture.load_unit === "tokens" ? "tokens" : picture.load_unit;
  const lanes = picture.mini_batches.map(part => lanesOf(part, picture, words, unit));
  const whole = Math.max(1, ...lanes.map(one => one.length));
  lanes.forEach(one => { one.whole = whole; });
  const cells = picture.micro_steps_per_cell > 1 ? ` Each cell is the sum of ${picture.micro_steps_per_cell} micro-steps.` : "";
  parent.replaceChildren(
    make("div", { class: "bar" }, legend([["trained", `works (${unit})`], ["wait", "waits for the slowest rank"]]),
      make("span", { class: "quiet small end" }, `${cells} On the right: the share of time that the rank waits.`)),
    words, ...lanes.flatMap(one => [one.title, one.shape.node]));
  lanes.forEach(one => one.shape.redraw());
}

function lanesOf(part, picture, words, unit) {
  const loads = part.shards.map(shard => shard.load), steps = Math.max(0, ...loads.map(load => load.length));
  const slowest = Array.from({ length: steps }, (_, step) => Math.max(...loads.map(load => load[step] ?? 0)));
  const starts = slowest.reduce((ends, one) => [...ends, ends.at(-1) + one], [0]), length = starts.at(-1);
  const lane = loads.length > 32 ? 8 : 16, whole = { length };
  const idle = loads.map(load => length ? 1 - load.reduce((sum, one) => sum + one, 0) / length : 0);
  const title = make("p", { class: "small quiet" }, `mini-batch ${part.index}: ${some(steps, "micro-step")}, ranks wait ` +
    `${share(idle.reduce((sum, one) => sum + one, 0) / Math.max(1, idle.length))} of their time`);
  const shape = canvas(`Mini-batch ${part.index}: load of ${loads.length} ranks in ${steps} micro-steps`, lane * loads.length + 2,
    (context, width) => {
      const paint = colors("trained", "padding", "quiet", "card", "text"), scale = (width - LABEL - END) / whole.whole;
      loads.forEach((load, rank) => {
        const y = rank * lane + 1;
        context.fillStyle = paint.quiet;
        if (lane > 8 || rank % 8 === 0) {
          context.fillText(`rank ${rank}`, 0, y + lane / 2);
          context.fillText(share(idle[rank]), width - END + 12, y + lane / 2);
        }
        load.forEach((value, step) => {
          const x = LABEL + starts[step] * scale, wide = slowest[step] * scale, gap = wide > 4 ? 1 : 0;
          context.fillStyle = paint.padding;
          context.fillRect(x, y, wide - gap, lane - 2);
          context.fillStyle = paint.trained;
          context.fillRect(x, y, Math.max(0, value * scale - gap), lane - 2);
        });
      });
      if (shape.chosen) {
        const [rank, step] = shape.chosen;
        context.strokeStyle = paint.text;
        context.lineWidth = 1.5;
        context.strokeRect(LABEL + starts[step] * scale - .5, rank * lane + .5, slowest[step] * scale, lane - 1);
      }
    });
  const own = { title, shape, length, set whole(value) { whole.whole = value; } };
  walkable(shape, {
    readout: words,
    find(x, y) {
      const rank = Math.floor(y / lane), at = (x - LABEL) * whole.whole / (shape.node.clientWidth - LABEL - END);
      const step = starts.findIndex((start, index) => at >= start && at < starts[index + 1]);
      return rank >= 0 && rank < loads.length && step >= 0 ? [rank, step] : null;
    },
    move: (chosen, right, down) => steps ? [
      Math.min(loads.length - 1, Math.max(0, (chosen?.[0] ?? 0) + down)),
      Math.min(steps - 1, Math.max(0, (chosen?.[1] ?? 0) + right))] : null,
    describe: ([rank, step]) => `mini-batch ${part.index}, rank ${rank}, micro-step ${step * picture.micro_steps_per_cell}: ` +
      `${count(loads[rank][step] ?? 0)} ${unit === "tokens" ? "tokens" : "(in FLOPs)"}; the slowest, rank ` +
      `${loads.findIndex(load => (load[step] ?? 0) === slowest[step])}, has ${count(slowest[step])}`,
  });
  return own;
}
