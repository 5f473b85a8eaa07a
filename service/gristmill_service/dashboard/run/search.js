// Finds groups by uid: the batch that contains them, or why they were dropped.
import { addressOf } from "../shared/address.js";
import { paths, read } from "../shared/api.js";
import { make, quiet, tableRegion } from "../shared/dom.js";
import { some } from "../shared/text.js";
import { nameOf, showGroup } from "./group.js";

const isOpen = group => ["open", "complete"].includes(group.state);

export class SearchView {
  constructor(run) {
    this.run = run;
    this.field = make("input", { type: "search", name: "uid", placeholder: "uid, or part of it", "aria-label": "Find groups by uid" });
    this.matches = make("div", { role: "status" });
    this.group = make("div", {});
    const form = make("form", { class: "bar", role: "search" }, this.field, make("button", { type: "submit" }, "Find"));
    form.addEventListener("submit", event => { event.preventDefault(); this.look(); });
    this.node = make("div", { class: "search" }, form, this.matches, this.group);
  }

  // Shows the samples of the open group of this round whose uid begins with this text. If it is closed, shows its state.
  async find(uid, round) {
    this.field.value = uid;
    this.field.scrollIntoView({ block: "center" });
    const groups = await this.look();
    const group = groups.find(one => isOpen(one) && one.uid.startsWith(uid) && one.round === round);
    if (group) await showGroup(this.group, this.run, group);
  }

  // Returns the matching groups.
  async look() {
    const uid = this.field.value.trim();
    this.group.replaceChildren();
    if (!uid) {
      this.matches.replaceChildren();
      return [];
    }
    try {
      const answer = await read(paths.find(this.run, uid));
      const archived = answer.archived ? ` ${some(answer.archived, "group")} of freed batches ${answer.archived === 1 ? "is" : "are"} found only by the whole uid.` : "";
      const what = answer.in_all ? `${some(answer.in_all, "group")}${answer.in_all > answer.groups.length ? `; the first ${answer.groups.length} are shown` : ""}.` : `No group has a uid that contains ${uid}.`;
      this.matches.replaceChildren(make("p", { class: "quiet small" }, what + archived), ...(answer.groups.length ? [tableRegion(
        "Matching groups", ["group", "state", "details"], answer.groups.map(group => [nameOf(group), group.state, this.where(group)]))] : []));
      return answer.groups;
    } catch (error) {
      this.matches.replaceChildren(quiet(error.message));
      return [];
    }
  }

  where(group) {
    const { run } = this;
    if (isOpen(group)) return make("span", {}, group.reason, " ", make("button", { class: "way", "aria-label": `samples of ${nameOf(group)}`,
      onclick: () => showGroup(this.group, run, group) }, "samples"));
    return group.batch == null ? group.reason : make("a", { href: addressOf({ run, batch: group.batch, uid: group.uid }) }, `batch ${group.batch}`);
  }
}
