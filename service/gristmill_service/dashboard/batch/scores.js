// Scores of groups, and their advantages.
import { paths, read } from "../shared/api.js";
import { canvas, colors } from "../shared/canvas.js";
import { make, tableRegion } from "../shared/dom.js";
import { count, number, some } from "../shared/text.js";

const HEIGHT = 136, LABEL = 46;

export class ScoresView {
  constructor(run) {
    this.run = run;
    this.node = make("div", {});
  }

  async show(batch, start = 0) {
    this.batch = batch;
    const answer = await read(paths.batch(this.run, batch, "scores", `?start=${start}`));
    if (batch !== this.batch) return;
    const flat = answer.groups.filter(group => group.scores.length > 1 && Math.max(...group.scores) === Math.min(...group.scores));
    const sorted = [...answer.groups].sort((a, b) => mean(a.scores) - mean(b.scores));
    const haveAdvantages = answer.groups.every(group => group.advantages);
    // A mean of 0 over the tokens of a trajectory does not say that all its tokens have advantage 0.
    const idle = answer.are_means ? [] : answer.groups.filter(group => group.advantages?.every(advantage => advantage === 0));
    const charts = [dots("score", sorted, group => group.scores), ...(haveAdvantages ? [dots("advantage", sorted, group => group.advantages)] : [])];
    this.node.replaceChildren(
      make("p", { class: "small quiet" }, `${summary(answer)} Groups are ordered by mean score, one dot per sample. ` +
        `In ${flat.length ? some(flat.length, "group") : "no group"} all scores are equal.` +
        (idle.length ? ` In ${some(idle.length, "group")} all advantages are 0, so nothing is learned from ${idle.length === 1 ? "it" : "them"}.` : "")),
      make("div", { class: "pair" }, charts.map(chart => chart.node)),
      make("details", {}, make("summary", {}, "Every group"), tableRegion("Scores of every group", ["group", "mean", "scores, with the advantage's sign below each", "advantages"],
        answer.groups.map(group => [`${group.uid}${group.round ? ` round ${group.round}` : ""}${group.tag ? ` (${group.tag})` : ""}`, number(mean(group.scores)),
          group.scores.map((score, index) => chip(score, group.advantages?.[index])),
          group.advantages ? group.advantages.map(number).join("  ") : "not known yet"]))),
      ...this.pages(answer));
    charts.forEach(chart => chart.redraw());
  }

  pages(answer) {
    const step = 200, go = start => make("button", { onclick: () => this.show(answer.batch, start) }, start < answer.start ? "previous groups" : "next groups");
    return [answer.start > 0 ? go(Math.max(0, answer.start - step)) : null,
      answer.start + answer.groups.length < answer.groups_in_all ? go(answer.start + step) : null].filter(Boolean);
  }
}

const mean = values => values.reduce((sum, one) => sum + one, 0) / Math.max(1, values.length);
const chip = (score, advantage = 0) =>
  make("span", { class: `chip ${advantage > 0 ? "plus" : advantage < 0 ? "minus" : ""}` }, number(score));

function summary(answer) {
  const end = answer.start + answer.groups.length;
  const which = answer.groups.length < answer.groups_in_all ? `Groups ${answer.start} to ${end - 1} of ${count(answer.groups_in_all)}, ` : "";
  const means = answer.are_means ? " Each advantage is the mean over the trajectory's trained tokens." : "";
  return `${which}${which ? "a" : "A"}dvantages by ${answer.estimator}, before loss_reduction scales them.${means}`;
}

function dots(name, groups, valuesOf) {
  const all = groups.flatMap(valuesOf), low = Math.min(0, ...all), high = Math.max(0, ...all);
  return canvas(`${name} of each sample of ${groups.length} groups, from ${number(low)} to ${number(high)}`, HEIGHT, (context, width, height) => {
    const paint = colors("trained", "minus", "prompt", "grid", "quiet");
    const y = value => 20 + (high - value) / (high - low || 1) * (height - 28), x = index => LABEL + (index + .5) / groups.length * (width - LABEL - 6);
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
