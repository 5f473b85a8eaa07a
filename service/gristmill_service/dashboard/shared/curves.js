// Curves of a run's batches: small charts with the same batches on the x axis.
import { canvas, colors, walkable } from "./canvas.js";
import { make } from "./dom.js";
import { compact, number } from "./text.js";

const HEIGHT = 112, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 18;
const PAINTS = ["trained", "prompt", "observation", "stuck", "quiet", "text"];
const DASHES = [[], [5, 3], [2, 2]], LAID_OVER = [1, 3];
// A line keeps its color while the page is open, even if other lines change.
const slots = new Map();

function slotOf(title, name) {
  const names = slots.get(title) ?? slots.set(title, new Map()).get(title);
  return names.get(name) ?? names.set(name, names.size).get(name);
}

export const batches = point => point.first === point.last ? `batch ${point.first}` : `batches ${point.first} to ${point.last}`;

// own: [{name, value(point)}]; a value of null leaves a gap. failed: numbers of batches. open(point): called on a selected point.
// over: { run, points } of another run, whose lines are dotted.
export function curves(title, points, own, { failed = [], open, format = number, over = null }) {
  const paints = own.map(line => slotOf(title, line.name)).map(slot =>
    ({ name: PAINTS[slot % PAINTS.length], dash: DASHES[Math.floor(slot / PAINTS.length) % DASHES.length] }));
  const lines = own.map((line, index) => ({ ...line, points, paint: paints[index] }));
  if (over) lines.push(...own.map((line, index) => ({ ...line, name: `${line.name} of ${over.run}`, points: over.points, paint: { ...paints[index], dash: LAID_OVER } })));
  const values = lines.map(line => line.points.map(line.value)), ranges = [points, ...(over ? [over.points] : [])];
  const first = Math.min(...ranges.map(all => all[0].last)), last = Math.max(...ranges.map(all => all.at(-1).last));
  const known = values.flat().filter(value => value != null);
  const low = Math.min(0, ...known), most = Math.max(low, ...known), high = most === low ? low + 1 : most;
  const words = make("p", { class: "readout small", role: "status" });
  const ends = lines.map((line, index) => `${line.name} ${shown(values[index].findLast(value => value != null), format)}`);
  const label = `${title} over ${points.length} points from ${batches(points[0])}; at the end ${ends.join(", ")}`;
  const x = (point, width) => LEFT + (point.last - first) / Math.max(1, last - first) * (width - LEFT - RIGHT);
  const shape = canvas(label, HEIGHT, (context, width, height) => {
    const paint = colors(...PAINTS, "grid"), y = value => TOP + (high - value) / (high - low) * (height - TOP - BOTTOM);
    axes(context, { values: [...new Set([low, most])], y, width, height, first: Math.min(...ranges.map(all => all[0].first)), last, paint, format: one => Math.abs(one) < 10_000 ? format(one) : compact(one) });
    context.fillStyle = paint.stuck;
    for (const batch of failed) {
      context.fillRect(x(points.find(point => batch <= point.last) ?? points.at(-1), width) - 1, height - BOTTOM - 6, 2, 6);
    }
    lines.forEach((line, index) => drawLine(context, values[index], line.paint, at => x(line.points[at], width), y, paint));
    if (shape.chosen != null) {
      context.fillStyle = paint.quiet;
      context.fillRect(x(points[shape.chosen], width), TOP, 1, height - TOP - BOTTOM);
    }
  });
  walkable(shape, {
    readout: words,
    find: at => {
      const width = shape.node.clientWidth;
      if (at < LEFT - 8) return null;
      const away = index => Math.abs(x(points[index], width) - at);
      return points.reduce((nearest, _, index) => away(index) < away(nearest) ? index : nearest, 0);
    },
    move: (chosen, right) => Math.min(points.length - 1, Math.max(0, (chosen ?? points.length - 1) + right)),
    describe: index => `${batches(points[index])}: ${lines.map((line, at) => {
      const same = line.points.findIndex(point => point.first <= points[index].last && points[index].last <= point.last);
      return `${line.name} ${shown(values[at][same], format)}`;
    }).join(", ")}`,
    open: index => open?.(points[index]),
  });
  const node = make("figure", { class: "curve" },
    make("figcaption", {}, make("h3", { class: "small" }, title),
      own.length > 1 || own[0].name !== title ? key(own, paints) : null),
    shape.node, words);
  return { node, redraw: shape.redraw };
}

const shown = (value, format) => value == null ? "none" : format(value);

function key(lines, paints) {
  return make("ul", { class: "legend small" }, lines.map((line, index) => make("li", {},
    make("i", { class: `line ${paints[index].name} ${paints[index].dash.length ? "dashed" : ""}`, "aria-hidden": "true" }), line.name)));
}

function axes(context, { values, y, width, height, first, last, paint, format }) {
  for (const value of values) {
    context.fillStyle = paint.grid;
    context.fillRect(LEFT, y(value), width - LEFT - RIGHT, 1);
    context.fillStyle = paint.quiet;
    context.fillText(format(value), 0, y(value), LEFT - 6);
  }
  context.fillStyle = paint.quiet;
  context.fillText(first, LEFT, height - BOTTOM / 2);
  context.fillText(last, width - RIGHT - context.measureText(last).width, height - BOTTOM / 2);
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
