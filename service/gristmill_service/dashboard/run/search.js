// Groups by their uid: where they are, and what became of them.
import { addressOf } from "../shared/address.js";
import { paths, read } from "../shared/api.js";
import { make, table } from "../shared/dom.js";
import { some } from "../shared/text.js";

export class SearchView {
  constructor(run) {
    this.run = run;
    this.field = make("input", { type: "search", name: "uid", placeholder: "uid, or part of it", "aria-label": "Find groups by uid" });
    this.found = make("div", { role: "status" });
    const form = make("form", { class: "bar", role: "search" }, this.field, make("button", { type: "submit" }, "Find"));
    form.addEventListener("submit", event => { event.preventDefault(); this.look(); });
    this.node = make("div", { class: "search" }, form, this.found);
  }

  find(uid) {
    this.field.value = uid.replace(/…$/, "");
    this.field.scrollIntoView({ block: "center" });
    return this.look();
  }

  async look() {
    const uid = this.field.value.trim();
    if (!uid) return this.found.replaceChildren();
    try {
      const told = await read(paths.find(this.run, uid));
      const what = told.in_all ? `${some(told.in_all, "group")}${told.in_all > told.groups.length ? `, the first ${told.groups.length}` : ""}` : `No group's uid contains ${uid}.`;
      this.found.replaceChildren(make("p", { class: "quiet small" }, what), ...(told.groups.length ? [make("div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": "Groups that were found" }, table(["group", "state", "where"],
          told.groups.map(group => [group.uid + (group.round ? ` round ${group.round}` : "") + (group.tag ? ` (${group.tag})` : ""), group.state,
            group.batch == null ? group.reason : make("a", { href: addressOf({ run: this.run, batch: group.batch, uid: group.uid }) }, `batch ${group.batch}`)]), "Groups that were found"))] : []));
    } catch (error) {
      this.found.replaceChildren(make("p", { class: "quiet" }, error.message));
    }
  }
}
