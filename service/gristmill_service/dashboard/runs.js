// The list of runs: a word and a shape for the state of each, never a color alone.
import { addressOf } from "./shared/address.js";
import { make } from "./shared/dom.js";
import { some } from "./shared/text.js";

const SIGNS = { failed: "✖", stuck: "■", training: "●", collecting: "◌", idle: "–", finished: "✓" };

export const badge = state => make("span", { class: `state ${state ?? ""}` }, state ? `${SIGNS[state]} ${state}` : "elsewhere");

function line(run) {
  if (run.state == null) return "another replica owns it";
  return `${some(run.groups_open, "group")} open · ${some(run.batches_published, "batch", "batches")}`;
}

let shown = "";
export function showRuns(nav, runs, current) {
  const version = JSON.stringify([runs.map(run => [run.run, run.state, line(run)]), current]);
  if (version === shown) return;
  shown = version;
  const focused = nav.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  nav.replaceChildren(make("ul", {}, runs.map(run => make("li", {}, make("a",
    { href: addressOf(run), "aria-current": run.run === current ? "page" : null },
    run.run, make("br"), badge(run.state), make("br"), make("span", { class: "quiet small" }, line(run)))))));
  if (focused) [...nav.querySelectorAll("a")].find(link => link.getAttribute("href") === focused)?.focus();
}
