// Distributions of a batch's trajectories: histograms of scores, lengths and turns, and stop reasons.
import { canvas, colors, readout, walkable } from "../shared/canvas.js";
import { make, tableRegion } from "../shared/dom.js";
import { number, share, some } from "../shared/text.js";

const HEIGHT = 96, FOOT = 18;

export function showDistributions(parent, distributions) {
  const reasons = Object.entries(distributions.stop_reasons);
  const bars = [...distributions.histograms.map(one => ({ title: one.name, counts: one.counts, names: one.lows.map((low, index) => range(low, one.highs[index])) })),
    { title: "stop reasons", counts: reasons.map(([, count]) => count), names: reasons.map(([reason]) => reason) }];
  const charts = bars.filter(one => one.counts.length).map(one => chart(one, distributions.trajectories));
  parent.replaceChildren(make("div", { class: "curves" }, charts.map(one => one.node)), make("details", {}, make("summary", {}, "Distributions as a table"),
    tableRegion("Distributions as a table", ["of", "value", "trajectories"],
      bars.flatMap(one => one.counts.map((count, index) => [one.title, one.names[index], count])))));
  charts.forEach(one => one.redraw());
}

const range = (low, high) => low === high ? number(low) : `${number(low)} to ${number(high)}`;

function chart({ title, counts, names }, whole) {
  const caption = make("figcaption", {}, make("h3", { class: "small" }, title));
  // A single value has no distribution.
  if (counts.length === 1) {
    return { node: make("figure", { class: "curve" }, caption, make("p", {}, `${names[0]} in all ${some(whole, "trajectory", "trajectories")}`)), redraw() {} };
  }
  const most = Math.max(...counts), words = readout(""), at = (index, width) => index / counts.length * width;
  const shape = canvas(`${title} of ${some(whole, "trajectory", "trajectories")}: most often ${names[counts.indexOf(most)]}`, HEIGHT, (context, width, height) => {
    const paint = colors("prompt", "text", "quiet", "grid");
    context.fillStyle = paint.grid;
    context.fillRect(0, height - FOOT, width, 1);
    counts.forEach((count, index) => {
      const tall = count / most * (height - FOOT - 4), gap = Math.min(4, width / counts.length / 5);
      const box = [at(index, width) + gap / 2, height - FOOT - tall, Math.max(1, width / counts.length - gap), tall];
      context.fillStyle = paint.prompt;
      context.fillRect(...box);
      context.strokeStyle = paint.text;
      if (shape.chosen === index) context.strokeRect(...box);
    });
    context.fillStyle = paint.quiet;
    const half = width / 2 - 4, last = names.at(-1);
    context.fillText(names[0], 0, height - FOOT / 2 + 1, half);
    context.fillText(last, width - Math.min(half, context.measureText(last).width), height - FOOT / 2 + 1, half);
  });
  walkable(shape, {
    readout: words,
    find: x => Math.min(counts.length - 1, Math.max(0, Math.floor(x / Math.max(1, shape.node.clientWidth) * counts.length))),
    move: (chosen, right) => Math.min(counts.length - 1, Math.max(0, (chosen ?? 0) + right)),
    describe: index => `${names[index]}: ${some(counts[index], "trajectory", "trajectories")}, ${share(counts[index] / Math.max(1, whole))}`,
  });
  return { node: make("figure", { class: "curve" }, caption, shape.node, words), redraw: shape.redraw };
}
