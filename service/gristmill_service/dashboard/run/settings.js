// The run's settings with their defaults.
import { paths, read } from "../shared/api.js";
import { make, tableRegion } from "../shared/dom.js";

export class SettingsView {
  constructor(run) {
    this.run = run;
    this.list = make("div", {});
    const details = make("details", {}, make("summary", {}, make("h2", {}, "Settings")), this.list);
    details.addEventListener("toggle", () => { if (details.open) this.show(); });
    this.node = make("section", { "aria-label": "Settings" }, details);
  }

  async show() {
    if (this.list.childElementCount) return;
    const answer = await read(paths.settings(this.run));
    const text = value => value == null ? "none" : typeof value === "string" ? value : JSON.stringify(value, (_, part) => part ?? undefined);
    const lines = all => all.map(one => [make("code", {}, one.name), text(one.value), one.is_default ? "default" : one.default == null ? "none" : text(one.default)]);
    const part = (name, all) => tableRegion(name, ["setting", "value", "default"], lines(all));
    this.list.replaceChildren(part("Settings of the run", answer.settings.filter(one => !one.is_default)),
      make("details", {}, make("summary", {}, "Settings at their default"), part("Settings at their default", answer.settings.filter(one => one.is_default))));
  }
}
