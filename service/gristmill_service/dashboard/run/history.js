// Figures of all batches of a run, including freed ones.
import { addressOf } from "../shared/address.js";
import { paths, read, readVersion } from "../shared/api.js";
import { batches, curves } from "../shared/curves.js";
import { make, quiet, section, table, tableRegion, tile } from "../shared/dom.js";
import { parts } from "./findings.js";
import { count, duration, number, share, some } from "../shared/text.js";

const AGAIN_MS = 10_000;
const percent = value => share(value);
const perBatch = (point, seconds) => seconds / point.batches;
const time = value => value && value < 1 ? `${number(1000 * value)} ms` : `${value < 10 ? number(value) : Math.round(value)} s`;

export class HistoryView {
  // open(batch): called when a batch is selected on a curve.
  constructor(run, open) {
    this.run = run;
    this.open = open;
    this.asked = 0;
    this.body = make("div", {});
    this.others = make("select", { "aria-label": "compare with another run", onchange: event => this.layOver(event.target.value) });
    this.node = section("History", this.body);
    this.node.firstChild.append(this.others);
    this.offer([]);
    this.node.hidden = true;
    this.whenDrawn = new Promise(resolve => { this.drawn = resolve; });
  }

  // Requests the history when there are new batches, at most every ten seconds.
  async update(health) {
    const version = JSON.stringify([health.batches_published, health.batches_failed, health.state === "finished"]);
    if (version === this.version || this.version && health.state !== "finished" && Date.now() - this.asked < AGAIN_MS) return;
    this.version = version;
    this.asked = Date.now();
    try {
      const { body, changed } = await readVersion(paths.history(this.run));
      if (changed || !this.history) this.draw(body, health);
    } catch (error) {
      this.version = null;
      if (this.history) this.body.append(quiet(error.message));
    }
  }

  // Offers these runs for comparison.
  offer(runs) {
    const names = runs.filter(name => name !== this.run).sort(), version = names.join("/");
    if (version === this.offered) return;
    this.offered = version;
    this.others.replaceChildren(...["", ...names].map(name =>
      make("option", { value: name, selected: name === (this.over?.run ?? "") }, name ? `with ${name}, dotted` : "only this run")));
    this.others.hidden = !names.length;
  }

  async layOver(run) {
    this.over = null;
    try {
      const points = run ? (await read(paths.history(run))).points : [];
      if (points.length) this.over = { run, points };
      this.draw(this.history, this.health);
      if (run && !points.length) this.body.append(quiet(`${run} has no batches yet.`, { role: "status" }));
    } catch (error) {
      this.body.append(quiet(error.message, { role: "status" }));
    }
  }

  // Returns the point with this batch's figures, which may include other batches; null if there is none.
  pointOf(batch) {
    return this.history?.points.find(point => point.first <= batch && batch <= point.last) ?? null;
  }

  // The number of the newest batch that was published; null if there is none.
  get newest() {
    return this.history?.points.at(-1)?.last ?? null;
  }

  draw(history, health) {
    Object.assign(this, { history, health });
    // The findings already explain the last failures.
    const explained = new Set(health.findings.map(one => one.batch)), unexplained = history.failed.filter(one => !explained.has(one.batch));
    this.node.hidden = !history.points.length && !unexplained.length;
    const isOpen = this.body.querySelector("details.more")?.open ?? health.state === "finished";
    const { points, totals } = history, failed = history.failed.map(one => one.batch);
    const shared = { failed, over: this.over, open: point => this.open(point.last) };
    // A single point is not a curve.
    const charts = points.length > 1 ? CURVES.flatMap(([title, linesOf, format]) => {
      const lines = linesOf(points, totals);
      return lines.length ? [curves(title, points, lines, { ...shared, format })] : [];
    }) : [];
    const rest = !charts.length ? null : make("details", { class: "more", open: isOpen }, make("summary", {}, "More curves"),
      make("div", { class: "curves" }, charts.slice(FIRST).map(chart => chart.node)));
    rest?.addEventListener("toggle", () => charts.forEach(chart => chart.redraw()));
    this.body.replaceChildren(...failures(unexplained, this.run), ...(totals ? [make("dl", { class: "tiles" }, ...tiles(totals)),
      make("div", { class: "curves" }, charts.slice(0, FIRST).map(chart => chart.node)), ...(rest ? [rest] : []),
      make("details", {}, make("summary", {}, "Figures of every batch"), historyTable(points, this.run))] : []));
    charts.forEach(chart => chart.redraw());
    this.drawn();
    performance.mark("history drawn");
  }
}

const byTag = (name, value) => (points, totals) => [{ name: Object.keys(totals.tags).length ? "all" : name, value: point => point[value] },
  ...Object.keys(totals.tags).map(tag => ({ name: tag || "no tag", value: point => point.tags[tag]?.[value] ?? null }))];

// Lines for the means of a kind, such as "agents/solver/score_mean"; the last part is left out of the line's name.
const means = (kind, last) => (points, totals) => Object.keys(totals.means).filter(name => name.startsWith(kind)).map(name =>
  ({ name: name.slice(kind.length, name.length - last.length), value: point => point.means[name] ?? null }));

const FIRST = 4;
const CURVES = [
  ["score", byTag("score", "score_mean"), number],
  ["score by agent", means("agents/", "/score_mean"), number],
  ["reward components", means("components/", "/mean"), number],
  ["running baselines", means("baselines/", ""), number],
  ["padding", () => [{ name: "padding", value: point => point.padding_share }], percent],
  ["tokens per second", () => [{ name: "tokens per second", value: point => point.tokens_per_second }], value => count(Math.round(value))],
  ["waits, seconds per batch", () => [
    { name: "ranks", value: point => perBatch(point, point.ranks_waited) },
    { name: "workers", value: point => perBatch(point, point.workers_waited) }], time],
  ["groups solved by any sample", byTag("groups solved by any sample", "solved"), percent],
  ["groups without variance", byTag("groups without variance", "zero_variance"), percent],
  ["response tokens", byTag("response tokens", "response_length_mean"), number],
  ["rows per batch", () => [
    { name: "as received", value: point => perBatch(point, point.rows) },
    { name: "after merging", value: point => perBatch(point, point.rows_merged) },
    { name: "merge breaks", value: point => perBatch(point, point.breaks) }], number],
  ["staleness, versions", points => points.some(point => point.staleness_mean != null) ? [
    { name: "mean", value: point => point.staleness_mean },
    { name: "most", value: point => point.staleness_mean == null ? null : point.staleness_max }] : [], number],
  ["building, seconds per batch", (_, totals) => Object.entries(totals.stages).sort((a, b) => b[1] - a[1]).slice(0, 6)
    .map(([stage]) => ({ name: stage, value: point => perBatch(point, point.stages[stage] ?? 0) })), time],
];

function tiles(totals) {
  const known = (value, format) => value == null ? "none" : format(value);
  return [
    tile("batches", count(totals.batches), `in ${duration(totals.seconds)}`),
    tile("groups", count(totals.groups), `${known(totals.solved, share)} solved by any sample, ${known(totals.zero_variance, share)} without variance`),
    tile("score", known(totals.score_mean, number), `of ${some(totals.trajectories, "trajectory", "trajectories")}`),
    tile("tokens", count(totals.tokens), `${known(totals.tokens_per_second, value => count(Math.round(value)))} per second, ${known(totals.padding_share, share)} padding`),
    tile("rows in batches", count(totals.rows), `${count(totals.rows_merged)} after merging, ${some(totals.breaks, "break")}`),
    tile("ranks waited", share(totals.seconds && totals.ranks_waited / totals.seconds), `workers ${share(totals.seconds && totals.workers_waited / totals.seconds)} of the time`),
  ];
}

function failures(failed, run) {
  if (!failed.length) return [];
  return [make("ul", { class: "failures", "aria-label": "Batches that failed" }, failed.map(one => make("li", {},
    make("b", { class: "state failed" }, make("a", { href: addressOf({ run, batch: one.batch }) }, `batch ${one.batch}`)), ...parts(one))))];
}

// Returns the figures of one point, for a batch that is freed.
export function figures(point) {
  const shown = value => value == null ? "" : number(value);
  return table(["figure", "value"], COLUMNS.map(([name, value]) => [name, shown(value(point))]), `Figures of ${batches(point)}`);
}

const COLUMNS = [
  ["groups", point => point.groups], ["trajectories", point => point.trajectories], ["score", point => point.score_mean],
  ["solved by any sample", point => point.solved], ["without variance", point => point.zero_variance],
  ["response tokens", point => point.response_length_mean], ["rows in batches", point => point.rows], ["after merging", point => point.rows_merged],
  ["breaks", point => point.breaks], ["tokens", point => point.tokens], ["tokens per second", point => point.tokens_per_second],
  ["padding", point => point.padding_share], ["staleness", point => point.staleness_mean], ["seconds", point => point.seconds],
  ["ranks waited", point => point.ranks_waited], ["workers waited", point => point.workers_waited],
];

function historyTable(points, run) {
  return tableRegion("Figures of every batch", ["batches", ...COLUMNS.map(([name]) => name)], points.map(point => [
    make("a", { href: addressOf({ run, batch: point.last }) }, batches(point)),
    ...COLUMNS.map(([, value]) => value(point) == null ? "" : number(value(point)))]));
}
