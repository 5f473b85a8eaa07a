// The list of runs, worst first. The state of each run has a word and a shape, never only a color.
import { addressOf } from "./shared/address.js";
import { make } from "./shared/dom.js";
import { now, since, some } from "./shared/text.js";

const SIGNS = { failed: "✖", stuck: "■", "no trainer": "□", training: "●", collecting: "◌", idle: "–", finished: "✓" };
const STATES = Object.keys(SIGNS);
const FEW = 8, ACTIVE_S = 60;

export const badge = state => make("span", { class: `state ${state?.replace(" ", "-") ?? ""}` }, state ? `${SIGNS[state]} ${state}` : "elsewhere");

// Sorts runs by state, then by last activity; runs that are all active keep their places.
export function worstFirst(runs) {
  const latest = now() - ACTIVE_S, weight = run => run.state ? STATES.indexOf(run.state) : STATES.length;
  const active = run => Math.min(run.last_event ?? 0, latest);
  return [...runs].sort((a, b) => weight(a) - weight(b) || active(b) - active(a) || (a.run < b.run ? -1 : 1));
}

function lines(run) {
  if (run.state == null) return ["another replica owns it"];
  return [`${some(run.groups_open, "group")} open · ${some(run.batches_published, "batch", "batches")}`,
    make("br"), "active ", since(run.last_event, run.watched_since), " ago"];
}

export class RunList {
  constructor(nav) {
    this.filter = make("input", { type: "search", name: "runs", placeholder: "name or state", "aria-label": "Filter runs", oninput: () => this.draw() });
    this.list = make("ul");
    nav.append(this.filter, this.list);
  }

  show(runs, current) {
    const version = JSON.stringify([runs, current]);
    if (version === this.version) return;
    Object.assign(this, { version, runs, current });
    this.draw();
  }

  draw() {
    this.filter.hidden = this.runs.length <= FEW;
    const text = this.filter.hidden ? "" : this.filter.value.trim().toLowerCase();
    const matching = this.runs.filter(run => `${run.run} ${run.state ?? "elsewhere"}`.toLowerCase().includes(text));
    const focused = this.list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    this.list.replaceChildren(...worstFirst(matching).map(run => make("li", {}, make("a",
      { href: addressOf(run), "aria-current": run.run === this.current ? "page" : null },
      run.run, make("br"), badge(run.state), make("br"), make("span", { class: "quiet small" }, ...lines(run))))));
    if (focused) [...this.list.querySelectorAll("a")].find(link => link.getAttribute("href") === focused)?.focus();
  }

  focus() {
    this.list.querySelector("a")?.focus();
  }
}
