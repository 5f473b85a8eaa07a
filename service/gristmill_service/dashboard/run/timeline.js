// The timeline of ranks: when each rank worked on which batch, and when it was idle.
import { paths, read } from "../shared/api.js";
import { canvas, colors } from "../shared/canvas.js";
import { legend, make, quiet } from "../shared/dom.js";
import { ago, duration, now } from "../shared/text.js";

const LABEL = 62, MOST = 64, TICKS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600];

export class TimelineView {
  constructor(run) {
    this.run = run;
    this.seconds = 600;
    this.picture = make("div", {});
    const spans = [[120, "2 minutes"], [600, "10 minutes"], [3600, "an hour"], [14400, "4 hours"]];
    this.node = make("section", { "aria-label": "Timeline of ranks" }, make("div", { class: "bar" }, make("h2", {}, "Timeline of ranks"),
      make("select", { "aria-label": "how far back", onchange: event => { this.seconds = Number(event.target.value); this.refresh(); } },
        spans.map(([value, text]) => make("option", { value, selected: value === this.seconds }, text))),
      legend([["trained", "works on an even batch"], ["prompt", "works on an odd batch"], ["wait", "begun, not acknowledged"]])), this.picture);
    new IntersectionObserver(entries => { this.inSight = entries.at(-1).isIntersecting; if (this.inSight) this.refresh(); },
      { rootMargin: "100px" }).observe(this.node);
  }

  // Sends requests only while the timeline is visible: when something happened, and every ten seconds.
  update(health) {
    this.health = health;
    const version = JSON.stringify([health.state, health.steps_seen, health.batches_published, health.models.map(model => model.incarnation)]);
    if (version === this.version && Date.now() - this.asked < 10_000) return;
    this.version = version;
    if (this.inSight) this.refresh();
  }

  async refresh() {
    this.asked = Date.now();
    try {
      draw(this.picture, await read(paths.timeline(this.run, "policy", this.seconds)), this.health);
    } catch (error) {
      this.picture.replaceChildren(quiet(error.message));
    }
  }
}

function spansOf(rank, timeline, published, hasTrainer) {
  let before = timeline.begin;
  const spans = rank.passed.map(([at, batch, epoch, miniBatch]) => {
    const begin = Math.max(before, published.get(batch) ?? before);
    before = at;
    return { begin: Math.min(begin, at), end: at, batch, what: `batch ${batch} epoch ${epoch} mini-batch ${miniBatch}` };
  });
  const ready = published.get(rank.next.batch);
  const open = ready == null || !hasTrainer ? null : { begin: Math.max(rank.since, ready, timeline.begin), end: timeline.end, batch: rank.next.batch };
  return { spans, open };
}

function draw(parent, timeline, health) {
  const ranks = timeline.ranks.slice(0, MOST), lane = ranks.length > 24 ? 13 : 16, hasTrainer = health?.models[0].has_trainer ?? true;
  const published = new Map(timeline.batches.map(one => [one.batch, one.published]));
  const lines = ranks.map(rank => spansOf(rank, timeline, published, hasTrainer));
  // The timeline begins with the first work.
  const begins = lines.flatMap(({ spans, open }) => [...spans, open]).filter(Boolean).map(span => span.begin);
  if (begins.length) timeline.begin = Math.min(...begins);
  const length = Math.max(1, timeline.end - timeline.begin);
  const waited = ranks.map((rank, index) => 1 - [...lines[index].spans, lines[index].open].filter(Boolean)
    .reduce((sum, span) => sum + span.end - span.begin, 0) / length);
  const label = `Of ${timeline.ranks_in_all} ranks over ${duration(length)}: ` +
    ranks.slice(0, 8).map((_, rank) => `rank ${rank} was idle for ${Math.round(100 * Math.max(0, waited[rank]))}%`).join(", ");
  const shape = canvas(label, lane * ranks.length + 36, (context, width) => {
    const paint = colors("trained", "prompt", "padding", "grid", "quiet"), x = at => LABEL + (at - timeline.begin) / length * (width - LABEL - 4);
    lines.forEach(({ spans, open }, rank) => {
      const y = 18 + rank * lane;
      context.fillStyle = paint.grid;
      context.fillRect(LABEL, y, width - LABEL - 4, lane - 3);
      context.fillStyle = paint.quiet;
      context.fillText(`rank ${rank}`, 0, y + lane / 2 - 1);
      for (const span of [...spans, open].filter(Boolean)) {
        context.fillStyle = span === open ? paint.padding : span.batch % 2 ? paint.prompt : paint.trained;
        context.fillRect(x(span.begin), y, Math.max(1.5, x(span.end) - x(span.begin) - 1), lane - 3);
      }
    });
    marks(context, timeline, x, lane * ranks.length + 18, width, paint);
    ticks(context, timeline, x, lane * ranks.length + 18, width, health?.state === "finished");
  });
  const more = timeline.ranks_in_all > ranks.length ? [make("p", { class: "quiet small" }, `The first ${ranks.length} of ${timeline.ranks_in_all} ranks are drawn.`)] : [];
  parent.replaceChildren(shape.node, ...more);
  shape.redraw();
}

// When batches were published.
function marks(context, timeline, x, bottom, width, paint) {
  let free = LABEL - 1;
  for (const { batch, published } of timeline.batches) {
    if (published < timeline.begin || x(published) < free) continue;
    context.fillStyle = paint.quiet;
    context.fillRect(x(published), 12, 1, bottom - 12);
    const text = `batch ${batch}`, wide = context.measureText(text).width, left = Math.min(x(published), width - wide);
    context.fillText(text, left, 6);
    free = left + wide + 10;
  }
}

// Labels of times before the end, which is now, or the end of the run.
function ticks(context, timeline, x, bottom, width, isFinished) {
  const length = timeline.end - timeline.begin, step = TICKS.find(one => length / one <= width / 90) ?? TICKS.at(-1);
  const last = isFinished ? `ended ${duration(now() - timeline.end)} ago` : "now";
  let free = width - context.measureText(last).width - 4;
  context.fillText(last, free, bottom + 8);
  for (let before = step; before <= length; before += step) {
    const at = x(timeline.end - before), text = ago(before), wide = context.measureText(text).width, left = Math.max(LABEL, at - wide / 2);
    context.fillRect(at, bottom - 3, 1, 5);
    if (left + wide + 8 > free) continue;
    context.fillText(text, left, bottom + 8);
    free = left;
  }
}
