// The page: its address names what it shows.
import { readAddress } from "./shared/address.js";
import { paths, readVersion } from "./shared/api.js";
import { Poll } from "./shared/poll.js";
import { RunView } from "./run/run.js";
import { showRuns } from "./runs.js";
import { setClock, tick } from "./shared/text.js";
import { welcome } from "./welcome.js";

const live = document.querySelector("#live"), main = document.querySelector("#main"), nav = document.querySelector("#runs");
let view = null, runs = [], overviewAt = 0, grpcAddress = "";

// The run that most needs a person, of several the one that last got rows.
function mostUrgent() {
  const order = { failed: 0, stuck: 1, training: 2, collecting: 3, idle: 4, finished: 5 };
  const weight = run => order[run.state] ?? 6;
  return [...runs].sort((a, b) => weight(a) - weight(b) || (b.rows_since ?? 0) - (a.rows_since ?? 0))[0];
}

function follow() {
  const wanted = readAddress(location.hash);
  const run = wanted.run || mostUrgent()?.run;
  if (!run) {
    view = null;
    if (main.dataset.empty !== grpcAddress) main.replaceChildren(welcome(grpcAddress));
    main.dataset.empty = grpcAddress;
    showRuns(nav, runs, null);
    return;
  }
  delete main.dataset.empty;
  if (view?.name !== run || view.isGone && runs.some(one => one.run === run)) {
    view = new RunView(run);
    main.replaceChildren(view.node);
    document.title = `${run} · gristmill`;
  }
  view.show(wanted.batch ?? runs.find(one => one.run === run)?.newest_batch ?? null, wanted);
  if (wanted.group) view.search.find(wanted.group.uid, wanted.group.round);
  showRuns(nav, runs, run);
}

async function lookAtRuns() {
  const { body } = await readVersion(paths.overview());
  if (body.now && overviewAt === 0) setClock(body.now);
  overviewAt = Date.now();
  runs = body.runs;
  grpcAddress = body.grpc_address;
  const isListed = view !== null && runs.some(one => one.run === view.name);
  if (view !== null && !isListed && view.health) view.showGone();
  if (view === null || view.isGone && isListed || !isListed && !readAddress(location.hash).run) follow();
  else showRuns(nav, runs, view.name);
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
  const { state, groups_open, batches_published } = shown.health;
  runs = runs.map(one => one.run === shown.name ? { ...one, state, groups_open, batches_published } : one);
  if (view === shown) showRuns(nav, runs, shown.name);
}

// Asks for the shown run every two seconds, and for all runs now and then.
async function look() {
  if (view === null || Date.now() - overviewAt > 10_000) await lookAtRuns();
  else if (!view.isGone) await lookAtRun();
  live.textContent = "live";
}

const poll = new Poll(look, 2);
poll.failed = error => {
  live.textContent = error.status === 401 ? "not signed in" : `${error.status ? "refused" : "no answer"}: ${error.message}; asking again`;
};
document.addEventListener("visibilitychange", () => { if (document.hidden) live.textContent = "paused"; });
window.addEventListener("hashchange", () => { follow(); poll.now(); });
setInterval(() => { if (!document.hidden) tick(); }, 1000);
if (readAddress(location.hash).run) follow();
poll.now();
