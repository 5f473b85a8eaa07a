// The page. Its address selects the run, batch, group or shard that it shows.
import { readAddress } from "./shared/address.js";
import { paths, readVersion } from "./shared/api.js";
import { Poll } from "./shared/poll.js";
import { RunView } from "./run/run.js";
import { RunList, worstFirst } from "./runs.js";
import { setClock, tick } from "./shared/text.js";
import { welcome } from "./welcome.js";

const live = document.querySelector("#live"), main = document.querySelector("main");
const list = new RunList(document.querySelector("#runs"));
let view = null, runs = [], overviewAt = 0, grpcAddress = "";

function follow() {
  const wanted = readAddress(location.hash);
  const run = wanted.run || worstFirst(runs)[0]?.run;
  if (!run) {
    view = null;
    if (main.dataset.empty !== grpcAddress) main.replaceChildren(welcome(grpcAddress));
    main.dataset.empty = grpcAddress;
    list.show(runs, null);
    return;
  }
  delete main.dataset.empty;
  if (view?.name !== run || view.isGone && runs.some(one => one.run === run)) {
    view = new RunView(run);
    view.history.offer(runs.map(one => one.run));
    main.replaceChildren(view.node);
    document.title = `${run} · gristmill`;
  }
  view.show(wanted.batch ?? runs.find(one => one.run === run)?.newest_batch ?? null, wanted);
  if (wanted.group) view.search.find(wanted.group.uid, wanted.group.round);
  list.show(runs, run);
}

async function lookAtRuns() {
  const { body } = await readVersion(paths.overview());
  if (body.now && overviewAt === 0) setClock(body.now);
  overviewAt = Date.now();
  runs = body.runs;
  grpcAddress = body.grpc_address;
  view?.history.offer(runs.map(one => one.run));
  const isListed = view !== null && runs.some(one => one.run === view.name);
  if (view !== null && !isListed && view.health) view.showGone();
  if (view === null || view.isGone && isListed || !isListed && !readAddress(location.hash).run) follow();
  else list.show(runs, view.name);
}

async function lookAtRun() {
  const shown = view;
  try {
    await shown.look();
  } catch (error) {
    if (error.status !== 404) throw error;
    shown.showGone();
    overviewAt = 0;
    return;
  }
  // The list agrees with the run's own view.
  const { state, groups_open, batches_published, last_event } = shown.health;
  runs = runs.map(one => one.run === shown.name ? { ...one, state, groups_open, batches_published, last_event } : one);
  if (view === shown) list.show(runs, shown.name);
}

// Requests the shown run every two seconds, and all runs every ten seconds.
async function look() {
  if (view === null || Date.now() - overviewAt > 10_000) await lookAtRuns();
  else if (!view.isGone) await lookAtRun();
  live.textContent = "live";
}

const poll = new Poll(look, 2);
poll.failed = error => {
  live.textContent = error.status === 401 ? "not signed in" : `${error.status ? "refused" : "no answer"}: ${error.message}; retrying`;
};
document.addEventListener("visibilitychange", () => { if (document.hidden) live.textContent = "paused"; });
document.querySelector("#to-runs").addEventListener("click", () => list.focus());
window.addEventListener("hashchange", () => { follow(); poll.now(); });
setInterval(() => { if (!document.hidden) tick(); }, 1000);
if (readAddress(location.hash).run) follow();
poll.now();
