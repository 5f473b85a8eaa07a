// Formats numbers and times.
export const count = value => value.toLocaleString("en");
export const some = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;
export const compact = value => value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
export const share = value => `${(100 * value).toFixed(1)}%`;

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(value) / 3));
  return `${(value / 1000 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
}

// The label of a time before the end of an axis.
export const ago = seconds => `−${duration(seconds).replace(/ 0 (s|min)$/, "")}`;

export const number = value => Number.isInteger(value) || Math.abs(value) >= 1000 ? count(Math.round(value)) : value.toPrecision(3);

export function place(position) {
  const epoch = position.epoch ? ` epoch ${position.epoch}` : "";
  return `batch ${position.batch}${epoch} mini-batch ${position.mini_batch}`;
}

// Growing durations: `tick` updates all that are shown, without a request.
let offset = 0;
export const now = () => Date.now() / 1000 + offset;
export const setClock = serverNow => { offset = serverNow - Date.now() / 1000; };

export function since(seconds, watchedSince) {
  const node = document.createElement("span");
  node.dataset.since = seconds;
  // It may have begun before the service observed the run.
  node.dataset.atLeast = watchedSince != null && seconds <= watchedSince ? "at least " : "";
  return rewrite(node);
}

const rewrite = node => {
  const text = node.dataset.atLeast + duration(now() - Number(node.dataset.since));
  if (node.textContent !== text) node.textContent = text;
  return node;
};
export const tick = () => document.querySelectorAll("[data-since]").forEach(rewrite);
