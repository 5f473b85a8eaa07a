// Reads the service. What has not changed is not sent again.
import { signIn } from "./signin.js";

const versions = new Map();

export const paths = {
  overview: () => "v1/overview",
  health: run => `v1/runs/${encodeURIComponent(run)}/health`,
  settings: run => `v1/runs/${encodeURIComponent(run)}/settings`,
  find: (run, uid) => `v1/runs/${encodeURIComponent(run)}/find?uid=${encodeURIComponent(uid)}`,
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

export async function read(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

// {body, changed}: the body from before where the service says that it still holds.
export async function readVersion(path) {
  const before = versions.get(path);
  const headers = before ? { "If-None-Match": before.etag } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  if (answer.status === 304 && before) return { body: before.body, changed: false };
  if (!answer.ok) throw await refusal(answer);
  const body = await answer.json();
  versions.set(path, { etag: answer.headers.get("ETag"), body });
  return { body, changed: true };
}

async function refusal(answer) {
  if (answer.status === 401) signIn();
  try {
    return new Refused((await answer.json()).error.message, answer.status);
  } catch {
    return new Refused(`the service answered ${answer.status}`, answer.status);
  }
}
