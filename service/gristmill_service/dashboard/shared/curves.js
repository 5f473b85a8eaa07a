// Curves of a run's batches: small charts, all over the same batches.
import { canvas, colors, walkable } from "./canvas.js";
import { make } from "./dom.js";
import { compact, number } from "./text.js";

const HEIGHT = 112, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 18;
const PAINTS = ["trained", "prompt", "observation", "stuck", "quiet", "text"];
const DASHES = [[], [5, 3], [2, 2]];

export const batches = point => point.first === point.last ? `batch ${point.first}` : `batches ${point.first} to ${point.last}`;

// lines: [{name, value(point)}]; a value of null leaves a gap. failed: numbers of batches. open(point): when one is chosen.
export function curves(title, points, lines, { failed = [], open, format = number }) {
  const values = lines.map(line => points.map(line.value));
  const known = values.flat().filter(value => value != null);
  const low = Math.min(0, ...known), most = Math.max(low, ...known), high = most === low ? low + 1 : most;
  const words = make("p", { class: "readout small", role: "status" });
  const paints = lines.map((_, index) => ({ name: PAINTS[index % PAINTS.length], dash: DASHES[Math.floor(index / PAINTS.length) % DASHES.length] }));
  const ends = lines.map((line, index) => `${line.name} ${shown(values[index].findLast(value => value != null), format)}`);
  const label = `${title} over ${points.length} points from ${batches(points[0])}; at the end ${ends.join(", ")}`;
  const x = (index, width) => LEFT + (points.length === 1 ? .5 : index / (points.length - 1)) * (width - LEFT - RIGHT);
  const shape = canvas(label, HEIGHT, (context, width, height) => {
    const paint = colors(...PAINTS, "grid"), y = value => TOP + (high - value) / (high - low) * (height - TOP - BOTTOM);
    axes(context, { values: [...new Set([low, most])], y, width, height, points, paint, format: one => Math.abs(one) < 10_000 ? format(one) : compact(one) });
    context.fillStyle = paint.stuck;
    for (const batch of failed) {
      const at = points.findIndex(point => batch <= point.last);
      context.fillRect(x(at < 0 ? points.length - 1 : at, width) - 1, height - BOTTOM - 6, 2, 6);
    }
    values.forEach((line, index) => drawLine(context, line, paints[index], at => x(at, width), y, paint));
    if (shape.chosen != null) {
      context.fillStyle = paint.quiet;
      context.fillRect(x(shape.chosen, width), TOP, 1, height - TOP - BOTTOM);
    }
  });
  walkable(shape, {
    readout: words,
    find: at => {
      const width = shape.node.clientWidth;
      if (at < LEFT - 8) return null;
      return Math.min(points.length - 1, Math.max(0, Math.round((at - LEFT) / Math.max(1, width - LEFT - RIGHT) * (points.length - 1))));
    },
    move: (chosen, right) => Math.min(points.length - 1, Math.max(0, (chosen ?? points.length - 1) + right)),
    describe: index => `${batches(points[index])}: ${lines.map((line, at) => `${line.name} ${shown(values[at][index], format)}`).join(", ")}`,
    open: index => open?.(points[index]),
  });
  const node = make("figure", { class: "curve" },
    make("figcaption", {}, make("h3", { class: "small" }, title),
      lines.length > 1 || lines[0].name !== title ? key(lines, paints) : null),
    shape.node, words);
  return { node, redraw: shape.redraw };
}

const shown = (value, format) => value == null ? "none" : format(value);

function key(lines, paints) {
  return make("ul", { class: "legend small" }, lines.map((line, index) => make("li", {},
    make("i", { class: `line ${paints[index].name} ${paints[index].dash.length ? "dashed" : ""}`, "aria-hidden": "true" }), line.name)));
}

function axes(context, { values, y, width, height, points, paint, format }) {
  for (const value of values) {
    context.fillStyle = paint.grid;
    context.fillRect(LEFT, y(value), width - LEFT - RIGHT, 1);
    context.fillStyle = paint.quiet;
    context.fillText(format(value), 0, y(value), LEFT - 6);
  }
  context.fillStyle = paint.quiet;
  const last = String(points.at(-1).last), first = String(points[0].first);
  context.fillText(first, LEFT, height - BOTTOM / 2);
  if (points.length > 1) context.fillText(last, width - RIGHT - context.measureText(last).width, height - BOTTOM / 2);
}

function drawLine(context, values, { name, dash }, x, y, paint) {
  context.strokeStyle = context.fillStyle = paint[name];
  context.lineWidth = 1.6;
  context.setLineDash(dash);
  context.beginPath();
  let isOn = false;
  values.forEach((value, index) => {
    if (value == null) { isOn = false; return; }
    if (isOn) context.lineTo(x(index), y(value));
    else context.moveTo(x(index), y(value));
    isOn = true;
    // A point between gaps has no line.
    if (values[index - 1] == null && values[index + 1] == null) context.fillRect(x(index) - 2, y(value) - 2, 4, 4);
  });
  context.stroke();
  context.setLineDash([]);
}
