// One run: its health, what delays it, and one of its batches.
import { addressOf } from "../shared/address.js";
import { paths, readVersion } from "../shared/api.js";
import { BatchView } from "../batch/batch.js";
import { make, quiet, section, tableRegion, tile } from "../shared/dom.js";
import { findingItems, rankId } from "./findings.js";
import { nameOf } from "./group.js";
import { HistoryView } from "./history.js";
import { badge } from "../runs.js";
import { SearchView } from "./search.js";
import { SettingsView } from "./settings.js";
import { bytes, count, place, setClock, since } from "../shared/text.js";
import { TimelineView } from "./timeline.js";

export class RunView {
  constructor(name) {
    this.name = name;
    this.title = make("div", { class: "title" }, make("h1", {}, name));
    this.tiles = make("dl", { class: "tiles" });
    this.search = new SearchView(name);
    this.findings = make("ul", { class: "findings", "aria-label": "What delays the run" });
    this.findings.hidden = true;
    this.history = new HistoryView(name, batch => { location.hash = addressOf({ run: name, batch }); });
    this.batch = new BatchView(name, this.history);
    this.timeline = new TimelineView(name);
    this.settings = new SettingsView(name);
    this.waiting = make("div", {});
    this.node = make("div", {}, this.title, this.findings, this.tiles, this.history.node, this.batch.node, this.timeline.node,
      section("What waits, and for how long", this.waiting), section("Find groups", this.search.node), this.settings.node);
    // If no batch is stored, the newest freed one is shown.
    this.history.whenDrawn.then(() => this.wanted == null && this.history.newest !== null && this.show(this.history.newest));
    // The first request is sent immediately; the next poll reports errors.
    this.look().catch(() => {});
  }

  // uid: of a group whose rows are marked; shard: the one whose longest row is opened.
  show(batch, { uid = "", shard = null } = {}) {
    this.wanted = batch;
    if (batch !== null) this.batch.show(batch, { uid, shard });
  }

  showGone() {
    if (this.isGone) return;
    this.isGone = true;
    const was = this.health ? "It was deleted while it was shown, with its rows, shards and history." : "It was deleted, or never created.";
    this.node.replaceChildren(make("h1", {}, this.name), make("p", { class: "empty", role: "status" },
      `This service has no run named ${this.name}. ${was} A new run with this name will appear here.`));
  }

  // Shows the batch, rank or group of a finding.
  lead({ batch, model, miniBatch, rank, group }) {
    if (group) {
      const address = addressOf({ run: this.name, ...group });
      // If the address is unchanged, the samples are read again.
      return location.hash === address ? this.search.find(group.uid, group.round) : location.hash = address;
    }
    if (batch != null) {
      location.hash = addressOf({ run: this.name, batch, shard: miniBatch == null ? null : { model, miniBatch, rank } });
      return this.batch.node.scrollIntoView();
    }
    const line = document.getElementById(rankId(model, rank));
    line?.scrollIntoView({ block: "center" });
    line?.focus();
  }

  async look() {
    const { body, changed } = await readVersion(paths.health(this.name));
    if (!changed && this.health) return this.timeline.update(body);
    setClock(body.now);
    this.health = body;
    this.title.replaceChildren(make("h1", {}, this.name), badge(body.state),
      make("span", { class: "quiet" }, "policy version ", count(body.policy_version)), ...summary(body));
    this.tiles.replaceChildren(...tiles(body, () => this.waiting.querySelector("[aria-label='Aborted samples']")?.focus()));
    this.showFindings(body);
    const held = body.batches.filter(batch => ["published", "waiting for columns"].includes(batch.state)).map(batch => batch.batch);
    if (this.wanted == null && held.length) this.show(held.at(-1));
    this.batch.offer([...new Set([...body.batches_shown, ...held])].sort((a, b) => a - b));
    this.history.update(body);
    this.timeline.update(body);
    const focused = this.waiting.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    this.waiting.replaceChildren(...waiting(body));
    if (focused) this.waiting.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus();
  }

  showFindings(body) {
    this.findings.hidden = !body.findings.length;
    const at = [...this.findings.querySelectorAll("button")].indexOf(document.activeElement);
    this.findings.replaceChildren(...findingItems(body, what => this.lead(what)));
    if (at >= 0) this.findings.querySelectorAll("button")[at]?.focus();
  }
}

// The findings explain why a run is failed or stuck.
function summary(body) {
  return ["failed", "stuck"].includes(body.state) ? [] : [make("span", { class: "quiet" }, body.summary)];
}

// toReasons(): shows why samples were aborted.
function tiles(body, toReasons) {
  const aborted = body.samples_aborted.reduce((sum, one) => sum + one.samples, 0);
  const room = body.groups_room >= 2 ** 31 ? "unlimited capacity" : `capacity for ${count(body.groups_room)}`;
  const dropped = Object.values(body.groups_dropped).reduce((sum, one) => sum + one, 0);
  return [
    tile("groups", `${count(body.groups_open)} open`, `${count(body.groups_complete)} complete, ${room}`),
    tile("groups dropped", count(dropped), Object.entries(body.groups_dropped).map(([why, n]) => `${why} ${n}`).join(", ")),
    tile("samples aborted", [count(aborted), aborted ? make("button", { class: "way", onclick: toReasons }, "reasons") : null], `${count(body.samples_retried)} retried`),
    tile("batches", `${count(body.batches_published)} published`, `${count(body.batches_freed)} freed, ${body.batches_failed} failed`),
    tile("stored", bytes(body.row_bytes + body.shard_bytes), `rows ${bytes(body.row_bytes)}`),
    tile("rows accepted", count(body.rows_accepted), make("span", {}, "last ", since(body.rows_since, body.watched_since), " ago")),
  ];
}

function doing(rank, model, state) {
  if (state === "finished") return "finished";
  if (!model.has_trainer) return "no trainer";
  if (!rank.has_shard) return "waits for the batch";
  return { true: "pulled, not acknowledged", false: "published, not pulled" }[rank.has_pulled] ?? "published, not acknowledged";
}

function waiting(body) {
  const seen = seconds => seconds == null ? "unknown" : since(seconds, body.watched_since);
  const samples = one => make("a", { href: addressOf({ run: body.run, uid: one.uid, round: one.round }) }, nameOf(one));
  const more = one => [[one.aborted, "aborted"], [one.retried, "retried"]].filter(([n]) => n).map(([n, what]) => `, ${n} ${what}`).join("");
  const groups = body.open_groups.map(one => [samples(one), `${one.complete} of ${one.samples} samples${more(one)}`, one.rows, since(one.since), one.reason]);
  const aborted = body.samples_aborted.map(one => [one.reason, one.samples, samples(one)]);
  const batches = body.batches.map(one => [`batch ${one.batch}`, one.state, one.prompts, seen(one.since)]);
  const ranks = body.models.flatMap(model => model.ranks.map(rank => [
    body.models.length > 1 ? `${model.model} rank ${rank.rank}` : `rank ${rank.rank}`, body.state === "finished" ? "none" : place(rank.next),
    doing(rank, model, body.state), seen(rank.has_shard ? rank.available : rank.since)]));
  const stuck = new Set(body.findings.filter(one => one.level === "stuck").flatMap(one => (one.ranks ?? []).map(rank => rankId(one.model, rank))));
  const ids = body.models.flatMap(model => model.ranks.map(rank => rankId(model.model, rank.rank)));
  const rankTable = part => {
    [...part.querySelectorAll("tbody tr")].forEach((line, index) => {
      line.id = ids[index];
      line.tabIndex = -1;
      line.className = stuck.has(ids[index]) ? "loud" : "";
    });
    return part;
  };
  const part = (title, heads, rows, none) => make("div", {}, make("h3", { class: "small" }, title),
    rows.length ? tableRegion(title, heads, rows) : quiet(none));
  return [make("div", { class: "pair wide" },
    make("div", {},
      part("Oldest open groups", ["group", "complete", "rows accepted", "open for", "why it is not complete"], groups, "No group is open."),
      part("Stored batches", ["batch", "state", "groups", "for"], batches, "No batch is stored."),
      aborted.length ? part("Aborted samples", ["reason", "samples", "last group"], aborted) : null),
    rankTable(part("Ranks", ["rank", "next", "state", "for"], ranks, "No ranks.")))];
}
