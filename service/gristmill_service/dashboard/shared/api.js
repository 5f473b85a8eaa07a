// Reads the service's answers. Unchanged answers are not sent again.
import { signIn } from "./signin.js";

const versions = new Map();

const groupOf = group => `uid=${encodeURIComponent(group.uid)}&round=${group.round}`;

export const paths = {
  overview: () => "v1/overview",
  health: run => `v1/runs/${encodeURIComponent(run)}/health`,
  settings: run => `v1/runs/${encodeURIComponent(run)}/settings`,
  find: (run, uid) => `v1/runs/${encodeURIComponent(run)}/find?uid=${encodeURIComponent(uid)}`,
  samples: (run, group) => `v1/runs/${encodeURIComponent(run)}/samples?${groupOf(group)}`,
  openRow: (run, group, sample, step, start) => `v1/runs/${encodeURIComponent(run)}/samples/${sample}/rows/${step}?${groupOf(group)}&start=${start}`,
  history: run => `v1/runs/${encodeURIComponent(run)}/history`,
  timeline: (run, model, seconds) => `v1/runs/${encodeURIComponent(run)}/timeline?model=${model}&seconds=${seconds}`,
  batch: (run, batch, what, query = "") => `v1/runs/${encodeURIComponent(run)}/batches/${batch}/${what}${query}`,
};

export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Errors but 401 and 429 are sent with status 200, so that the browser's console logs no error.
async function ask(path, headers = {}) {
  const answer = await fetch(path, { headers: { ...headers, Prefer: "errors=body" }, cache: "no-store" });
  const status = Number(answer.headers.get("Gristmill-Status") ?? answer.status);
  if (answer.ok && status < 400 || status === 304) return answer;
  if (status === 401) signIn();
  const body = await answer.json().catch(() => null);
  throw new Refused(body?.error?.message ?? `the service answered ${status}`, status);
}

export const read = async path => (await ask(path)).json();

// Returns {body, changed}. If the service answers that nothing has changed, body is the previous one.
export async function readVersion(path) {
  const before = versions.get(path);
  const answer = await ask(path, before ? { "If-None-Match": before.etag } : {});
  if (answer.status === 304 && before) return { body: before.body, changed: false };
  const body = await answer.json();
  versions.set(path, { etag: answer.headers.get("ETag"), body });
  return { body, changed: true };
}
