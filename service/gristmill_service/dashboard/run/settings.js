// The run's settings with their defaults, and the cost of other settings for the shown batch.
import { paths, read } from "../shared/api.js";
import { make, quiet, tableRegion } from "../shared/dom.js";
import { count, share } from "../shared/text.js";

export class SettingsView {
  constructor(run, batchOf) {
    this.run = run;
    this.batchOf = batchOf;
    this.list = make("div", {});
    this.costs = make("div", { role: "status" });
    this.field = make("input", { type: "text", name: "what_if", placeholder: "the usual ones, or NAME=VALUE,…", "aria-label": "Settings to compare" });
    this.ask = make("button", { onclick: () => this.compute() }, "Compare other settings");
    const details = make("details", {}, make("summary", {}, make("h2", {}, "Settings")), this.list,
      make("p", { class: "small quiet" }, "Plans the batch shown above again with other estimators, filters, merging and layouts."), this.field, this.ask, this.costs);
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

  async compute() {
    const batch = this.batchOf();
    if (batch == null) return this.costs.replaceChildren(quiet("Select a batch first."));
    this.costs.replaceChildren(quiet(`Planning batch ${batch} again. A large batch takes seconds.`));
    try {
      const answer = await read(paths.batch(this.run, batch, "costs", this.field.value ? `?what_if=${encodeURIComponent(this.field.value)}` : ""));
      const known = (value, text = value => value) => value == null ? "-" : text(value);
      const decimals = value => value.toFixed(3);
      const line = one => [one.setting ? make("code", {}, one.setting) : "as configured", known(one.steps), known(one.groups),
        known(one.zero_share, share), known(one.rows), known(one.padding_rows), known(one.tokens), known(one.padding_share, share),
        known(one.loss_tokens), known(one.barrier_ratio, value => `${value.toFixed(2)} × the mean`),
        ...[one.advantage_mean, one.advantage_std, one.advantage_largest].map(value => known(value, decimals))];
      const reasons = [...new Set(answer.costs.map(one => one.reason))].filter(reason => reason);
      const without = reason => answer.costs.filter(one => one.reason === reason).map(one => one.setting || "as configured").join("; ");
      this.costs.replaceChildren(...(answer.costs.length > 1 ? [] : [make("p", {}, "No other allowed setting would change a number.")]),
        make("p", { class: "small quiet" }, `Batch ${count(batch)}`), tableRegion("Other settings",
          ["setting", "steps", "groups", "zero groups", "rows", "padding rows", "tokens", "padding share", "loss tokens", "slowest rank",
            "advantage", "std", "largest"], answer.costs.map(line)),
        ...reasons.map(reason => make("p", { class: "small quiet" }, `- for ${without(reason)}: ${reason}`)));
    } catch (error) {
      this.costs.replaceChildren(quiet(error.message));
    }
  }
}
