// Scores of groups, and what the estimator made of them.
import { paths, read } from "../shared/api.js";
import { canvas, colours } from "../shared/canvas.js";
import { make, table } from "../shared/dom.js";
import { count, number, some } from "../shared/text.js";

const HEIGHT = 136, LABEL = 46;

export class ScoresView {
  constructor(run) {
    this.run = run;
    this.node = make("div", {});
  }

  async show(batch, start = 0) {
    this.batch = batch;
    const told = await read(paths.batch(this.run, batch, "scores", `?start=${start}`));
    if (batch !== this.batch) return;
    const flat = told.groups.filter(group => group.scores.length > 1 && Math.max(...group.scores) === Math.min(...group.scores));
    const sorted = [...told.groups].sort((a, b) => mean(a.scores) - mean(b.scores));
    const given = told.groups.every(group => group.advantages);
    const charts = [dots("score", sorted, group => group.scores), ...(given ? [dots("advantage", sorted, group => group.advantages)] : [])];
    this.node.replaceChildren(
      make("p", { class: "small quiet" }, `${summary(told)} Groups stand by mean score, a dot a sample. ` +
        `${flat.length ? some(flat.length, "group has", "groups have") : "None has"} equal scores` +
        `${told.estimator === "none" || !flat.length ? "" : ", from which nothing is learned"}.`),
      make("div", { class: "pair" }, charts.map(chart => chart.node)),
      make("details", {}, make("summary", {}, "Every group"), make("div", { class: "scroll", tabindex: "0", role: "region",
        "aria-label": "Scores of every group" }, table(["group", "mean", "scores, with the advantage's sign below each", "advantages"],
        told.groups.map(group => [`${group.uid}${group.round ? ` round ${group.round}` : ""}${group.tag ? ` (${group.tag})` : ""}`, number(mean(group.scores)),
          group.scores.map((score, index) => chip(score, group.advantages?.[index])),
          group.advantages ? group.advantages.map(number).join("  ") : "one per token"]), "Scores of every group"))),
      ...this.pages(told));
    charts.forEach(chart => chart.redraw());
  }

  pages(told) {
    const step = 200, go = start => make("button", { onclick: () => this.show(told.batch, start) }, start < told.start ? "groups before" : "groups after");
    return [told.start > 0 ? go(Math.max(0, told.start - step)) : null,
      told.start + told.groups.length < told.groups_in_all ? go(told.start + step) : null].filter(Boolean);
  }
}

const mean = values => values.reduce((sum, one) => sum + one, 0) / Math.max(1, values.length);
const chip = (score, advantage = 0) =>
  make("span", { class: `chip ${advantage > 0 ? "plus" : advantage < 0 ? "minus" : ""}` }, number(score));

function summary(told) {
  const end = told.start + told.groups.length;
  const which = told.groups.length < told.groups_in_all ? `Groups ${told.start} to ${end - 1} of ${count(told.groups_in_all)}, ` : "";
  return `${which}${which ? "a" : "A"}dvantages by ${told.estimator}, before loss_reduction scales them.`;
}

function dots(name, groups, valuesOf) {
  const all = groups.flatMap(valuesOf), low = Math.min(0, ...all), high = Math.max(0, ...all, low + 1e-9);
  return canvas(`${name} of each sample of ${groups.length} groups, from ${number(low)} to ${number(high)}`, HEIGHT, (context, width, height) => {
    const paint = colours("trained", "minus", "prompt", "grid", "quiet");
    const y = value => 20 + (high - value) / (high - low) * (height - 28), x = index => LABEL + (index + .5) / groups.length * (width - LABEL - 6);
    for (const value of new Set([low, 0, high])) {
      context.fillStyle = paint.grid;
      context.fillRect(LABEL, y(value), width - LABEL, 1);
      context.fillStyle = paint.quiet;
      context.fillText(number(value), 0, y(value));
    }
    context.fillText(name, LABEL, 6);
    groups.forEach((group, index) => valuesOf(group).forEach(value => {
      context.fillStyle = name === "score" ? paint.prompt : value < 0 ? paint.minus : paint.trained;
      context.globalAlpha = .6;
      context.beginPath();
      context.arc(x(index), y(value), 2.6, 0, 7);
      context.fill();
      context.globalAlpha = 1;
    }));
  });
}
