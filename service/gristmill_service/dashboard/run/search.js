// Groups by their uid: where they are, and what became of them.
import { addressOf } from "../shared/address.js";
import { paths, read } from "../shared/api.js";
import { make, table } from "../shared/dom.js";
import { some } from "../shared/text.js";
import { nameOf, showGroup } from "./group.js";

const isOpen = group => ["open", "complete"].includes(group.state);

export class SearchView {
  constructor(run) {
    this.run = run;
    this.field = make("input", { type: "search", name: "uid", placeholder: "uid, or part of it", "aria-label": "Find groups by uid" });
    this.found = make("div", { role: "status" });
    this.group = make("div", {});
    const form = make("form", { class: "bar", role: "search" }, this.field, make("button", { type: "submit" }, "Find"));
    form.addEventListener("submit", event => { event.preventDefault(); this.look(); });
    this.node = make("div", { class: "search" }, form, this.found, this.group);
  }

  // Shows the samples of the open group of this round whose uid begins so; where it is open no more, what became of it.
  async find(uid, round) {
    this.field.value = uid;
    this.field.scrollIntoView({ block: "center" });
    const groups = await this.look();
    const group = groups.find(one => isOpen(one) && one.uid.startsWith(uid) && one.round === round);
    if (group) await showGroup(this.group, this.run, group);
  }

  // The groups that are found.
  async look() {
    const uid = this.field.value.trim();
    this.group.replaceChildren();
    if (!uid) {
      this.found.replaceChildren();
      return [];
    }
    try {
      const told = await read(paths.find(this.run, uid));
      const what = told.in_all ? `${some(told.in_all, "group")}${told.in_all > told.groups.length ? `, the first ${told.groups.length}` : ""}` : `No group's uid contains ${uid}.`;
      this.found.replaceChildren(make("p", { class: "quiet small" }, what), ...(told.groups.length ? [make("div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups that were found" }, table(["group", "state", "where"],
          told.groups.map(group => [nameOf(group), group.state, this.where(group)]), "Groups that were found"))] : []));
      return told.groups;
    } catch (error) {
      this.found.replaceChildren(make("p", { class: "quiet" }, error.message));
      return [];
    }
  }

  where(group) {
    const { run } = this;
    if (isOpen(group)) return make("button", { class: "way", "aria-label": `samples of ${nameOf(group)}`,
      onclick: () => showGroup(this.group, run, group) }, "samples");
    return group.batch == null ? group.reason : make("a", { href: addressOf({ run, batch: group.batch, uid: group.uid }) }, `batch ${group.batch}`);
  }
}
