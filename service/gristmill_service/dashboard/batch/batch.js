// One batch: its picture immediately, the other parts when they scroll into view.
import { addressOf } from "../shared/address.js";
import { paths, read } from "../shared/api.js";
import { showBreaks } from "./breaks.js";
import { showDistributions } from "./distributions.js";
import { make, quiet, section } from "../shared/dom.js";
import { figures } from "../run/history.js";
import { showHeat } from "./heat.js";
import { showLoad } from "./load.js";
import { longestRow, showPicture } from "./picture.js";
import { showRow } from "./row.js";
import { ScoresView } from "./scores.js";
import { count, share, some } from "../shared/text.js";

// From this many ranks on, loads are a heat map: bars would fill many screens.
const MANY_RANKS = 16;

export class BatchView {
  constructor(run, history) {
    this.run = run;
    this.history = history;
    this.batch = null;
    this.offered = [];
    this.choices = make("div", { class: "bar" });
    this.facts = make("p", { class: "quiet small" });
    this.picture = make("div", {});
    this.row = make("div", {});
    this.load = make("div", {});
    this.breaks = make("div", {});
    this.spread = make("div", {});
    this.scores = new ScoresView(run);
    this.parts = [
      section("Load per rank and micro-step", this.load),
      section("Where merging broke", this.breaks),
      section("Scores and advantages", this.scores.node),
      section("Distributions", this.spread),
    ];
    this.node = make("div", {},
      make("section", { "aria-label": "Shards" }, this.choices, this.facts, this.picture, this.row), ...this.parts);
    this.node.hidden = true;
    this.sight = new IntersectionObserver(entries => entries.forEach(entry => entry.isIntersecting && this.see(entry.target)),
      { rootMargin: "200px" });
  }

  // uid: of the group whose rows are marked, if any. shard: the one whose longest row is opened, if any.
  async show(batch, { uid = "", shard = null, model = shard?.model ?? "policy", miniBatch = shard?.miniBatch ?? null } = {}) {
    const wanted = JSON.stringify([batch, model, miniBatch, uid, shard]);
    if (wanted === this.wanted) return;
    this.wanted = wanted;
    this.node.hidden = false;
    const query = `?model=${model}${miniBatch === null ? "" : `&mini_batch=${miniBatch}`}`;
    let picture;
    try {
      picture = await read(paths.batch(this.run, batch, "picture", query));
    } catch (error) {
      if (wanted === this.wanted) this.refuse(batch, error);
      return;
    }
    if (wanted !== this.wanted) return;
    for (const part of this.parts) part.hidden = false;
    const isOther = batch !== this.batch;
    Object.assign(this, { batch, answer: picture, model, miniBatch, uid });
    this.facts.textContent = facts(picture);
    this.showChoices();
    const longest = shard === null ? null : longestRow(picture, shard);
    showPicture(this.picture, picture, { uid, marked: longest, openRow: row => showRow(this.row, this.run, batch, row) });
    if (batch !== this.batchOfRow || shard) this.row.replaceChildren();
    this.batchOfRow = batch;
    performance.mark("picture drawn");
    (picture.mini_batches.some(part => part.shards.length >= MANY_RANKS) ? showHeat : showLoad)(this.load, picture);
    if (shard) this.openLongest(longest, shard);
    else if (uid) this.node.scrollIntoView();
    if (isOther) {
      this.seen = new Set();
      for (const part of [this.breaks, this.scores.node, this.spread]) {
        this.sight.unobserve(part);
        this.sight.observe(part);
      }
    }
  }

  async openLongest(row, { rank }) {
    if (row === null) return this.row.replaceChildren(quiet(
      `No row of rank ${rank} can be opened: it has no rows here, or each bar is several rows.`, { role: "status" }));
    await showRow(this.row, this.run, this.batch, row);
    this.row.scrollIntoView({ block: "center" });
    this.row.querySelector("[tabindex]")?.focus({ preventScroll: true });
  }

  async refuse(batch, error) {
    this.batch = null;
    this.facts.textContent = "";
    this.showChoices(batch);
    const words = make("p", { class: "empty" }, `Batch ${batch} cannot be shown: ${error.message}`), { wanted } = this;
    this.picture.replaceChildren(words);
    for (const part of [this.row, this.load, this.breaks, this.scores.node, this.spread]) part.replaceChildren();
    for (const part of this.parts) part.hidden = true;
    // The history may contain figures of the batch.
    await this.history.whenDrawn;
    const point = this.history.pointOf(batch);
    if (point && wanted === this.wanted) this.picture.replaceChildren(words, figures(point));
  }

  async see(part) {
    if (this.batch === null || this.seen.has(part)) return;
    this.seen.add(part);
    const batch = this.batch;
    try {
      if (part === this.scores.node) return await this.scores.show(batch);
      if (part === this.spread) {
        const spread = await read(paths.batch(this.run, batch, "distributions"));
        if (batch === this.batch) showDistributions(part, spread);
        return;
      }
      const breaks = await read(paths.batch(this.run, batch, "breaks"));
      if (batch === this.batch) showBreaks(part, breaks);
    } catch (error) {
      part.replaceChildren(quiet(error.message));
    }
  }

  // Offers these batches and the shown one, which stays until another is selected.
  offer(batches) {
    if (JSON.stringify(batches) === JSON.stringify(this.offered)) return;
    this.offered = batches;
    if (this.batch !== null) this.showChoices();
  }

  showChoices(batch = this.batch) {
    const all = [...new Set([...this.offered, batch])].sort((a, b) => a - b), at = all.indexOf(batch);
    const go = to => { location.hash = addressOf({ run: this.run, batch: to }); };
    const focused = this.choices.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const choice = (label, options, value, change) => make("select", { "aria-label": label, onchange: event => change(event.target.value) },
      options.map(([key, text]) => make("option", { value: key, selected: String(key) === String(value) }, text)));
    this.choices.replaceChildren(make("h2", {}, `Batch ${batch}`),
      make("button", { "aria-label": "older batch", disabled: at <= 0, onclick: () => go(all[at - 1]) }, "‹"),
      choice("batch", all.map(one => [one, `batch ${one}`]), batch, go),
      make("button", { "aria-label": "newer batch", disabled: at === all.length - 1, onclick: () => go(all[at + 1]) }, "›"),
      ...(this.batch === null ? [] : this.partChoices(choice)));
    if (focused) this.choices.querySelector(`[aria-label="${focused}"]`)?.focus();
  }

  partChoices(choice) {
    const { answer: picture, model, miniBatch } = this, parts = [["", "all mini-batches"]];
    for (let index = 0; index < picture.mini_batches_in_all; index += 1) parts.push([index, `mini-batch ${index}`]);
    const chosen = value => this.show(this.batch, { model, uid: this.uid, miniBatch: value === "" ? null : Number(value) });
    return [
      picture.models.length > 1 ? choice("model", picture.models.map(one => [one, one]), model, value => this.show(this.batch, { model: value, uid: this.uid })) : null,
      choice("mini-batch", parts, miniBatch ?? "", chosen),
    ].filter(Boolean);
  }
}

function facts(picture) {
  const merged = picture.merges ? `${some(picture.rows_received, "row")} merged into ${count(picture.rows)}` : some(picture.rows, "row");
  const { tokens = 0, distinct_tokens: distinct = tokens, padding_rows = 0, padding_share = 0, barrier_ratio = 1 } = picture.metrics;
  const dropped = picture.dropped_groups ? ` · ${picture.dropped_groups} groups dropped` : "";
  const columns = picture.columns.length ? ` · with ${picture.columns.join(", ")}` : "";
  return `${some(picture.prompts, "group")} · ${merged} · ${count(tokens)} tokens${distinct < tokens ? `, ${count(distinct)} distinct` : ""} · ${share(padding_share)} padding · ` +
    `${some(padding_rows, "padding row")} · slowest rank ${barrier_ratio.toFixed(2)} × the mean load · ${picture.layout}${dropped}${columns}`;
}
