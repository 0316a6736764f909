// Draws the flow of records: bars, ribbons, and numbers of what branches off.

import { draw, element, keep, set, write } from "./elements.js";
import { count, durationText, known } from "./format.js";
import { BAR, OUTCOMES, STUB, sankey } from "./sankey.js";

const MARGIN = 10;
// As for a scrolled region in page.css.
const PADDING = 18;

export const outcomeName = (outcome) => outcome.replace("_", " ");

const MEANING = {
  passed: "Passed to the next stage, or stored.",
  filtered: "Filtered by the query, as declared.",
  late: "Arrived after its window was closed.",
  duplicate: "Already received.",
  refused: "Does not fit the schema; in the dead letters.",
  shed: "Dropped on purpose because of overload.",
  in_flight: "Due, and not read yet.",
  missing: "Due, and not there.",
};

export class Flow {
  constructor(parent, legend, tip) {
    this.parent = parent;
    this.tip = tip;
    this.nodes = new Map();
    this.ribbons = draw("g");
    this.bars = draw("g");
    this.svg = draw("svg", { class: "sankey" });
    this.svg.append(this.ribbons, this.bars);
    legend.replaceChildren(...OUTCOMES.map((outcome) => {
      const item = element("li", "", outcomeName(outcome));
      item.dataset.outcome = outcome;
      item.title = MEANING[outcome];
      return item;
    }));
    new ResizeObserver(() => this.redraw()).observe(parent);
  }

  show({ hops, channels }) {
    this.balance = { hops, channels };
    this.redraw();
    this.tip.refresh();
  }

  redraw() {
    if (!this.balance?.hops.length) return;
    const { hops, channels } = this.balance;
    const plan = sankey(hops, channels, this.parent.clientWidth - 2 * (MARGIN + PADDING));
    const [width, height] = [plan.width + 2 * MARGIN, plan.height + 2 * MARGIN];
    set(this.svg, { width, height, viewBox: `${-MARGIN} ${-MARGIN} ${width} ${height}` });
    keep(this.ribbons, plan.ribbons, {
      key: ({ key }) => key,
      make: () => draw("path", { class: "ribbon" }),
      show: (path, { outcome, value, from, to, path: d }) => {
        set(path, { d });
        path.classList.toggle("idle", !value);
        Object.assign(path.dataset, { outcome, from, to });
      },
    });
    keep(this.bars, plan.nodes, {
      key: ({ id }) => id,
      make: (node) => this.group(node),
      show: (group, node) => this.showNode(group, node, plan.columnWidth),
    });
    if (this.svg.parentNode !== this.parent) this.parent.replaceChildren(this.svg);
  }

  group({ id, kind }) {
    const group = draw("g", { tabindex: "0", role: "group" });
    group.classList.add("stage", kind === "channel" ? "channel" : "work");
    group.dataset.node = id;
    group.append(draw("rect", { class: "reach" }), draw("g"), draw("text", { class: "label", y: -21 }), draw("text", { class: "live", y: -7 }), draw("g"));
    this.tip.attach(group, () => explanation(this.nodes.get(id)));
    for (const [event, on] of [["pointerenter", true], ["focus", true], ["pointerleave", false], ["blur", false]]) {
      group.addEventListener(event, () => this.point(id, on));
    }
    return group;
  }

  // Highlight the ribbons of the stage under the pointer or focus.
  point(id, on) {
    for (const path of this.ribbons.children) {
      path.classList.toggle("near", on && (path.dataset.from === id || path.dataset.to === id));
    }
  }

  showNode(group, node, columnWidth) {
    this.nodes.set(node.id, node);
    set(group, { transform: `translate(${node.x.toFixed(1)},${node.y.toFixed(1)})`, "aria-label": spoken(node) });
    const [reach, bars, label, live, branches] = group.children;
    set(reach, { x: -6, y: -36, width: columnWidth - 24, height: node.height, rx: 8 });
    const whole = { outcome: "", y: 0, size: node.bar };
    keep(bars, node.cuts.length ? node.cuts : [whole], {
      key: ({ outcome }) => outcome,
      make: () => draw("rect", { width: BAR, rx: 2 }),
      show: (bar, { outcome, y, size }) => {
        set(bar, { y: y.toFixed(1), height: size.toFixed(1) });
        bar.dataset.outcome = outcome;
      },
    });
    write(label, node.name, Math.floor((columnWidth - 34) / 7.4));
    write(live, `${node.kind} · ${count(node.kind === "channel" ? node.size : dueOf(node))}`);
    keep(branches, node.stubs, {
      key: ({ outcome }) => outcome,
      make: () => draw("text", { class: "branch", x: BAR + STUB + 7 }),
      show: (text, { outcome, value, size, at }) => {
        set(text, { y: (at + size / 2 + 4).toFixed(1) });
        text.dataset.outcome = outcome;
        write(text, `${count(value)} ${outcomeName(outcome)}`);
      },
    });
  }
}

const dueOf = (node) => node.hops.reduce((sum, { due }) => sum + (known(due) ? due : 0), 0);

function spoken(node) {
  if (node.kind === "channel") return `channel ${node.name}: ${count(node.size)}`;
  const parts = node.cuts.map(({ outcome, value }) => `${count(value)} ${outcomeName(outcome)}`);
  return `${node.kind} ${node.name}: ${[`${count(dueOf(node))} due`, ...parts].join(", ")}`;
}

function explanation(node) {
  if (node.kind === "channel") {
    const { records, senders, duplicates, kind } = node.reported ?? {};
    const facts = [["records", count(records ?? node.size)], ["senders", senders && count(senders)], ["duplicates", duplicates && count(duplicates)]];
    return { title: node.name, notes: [kind === "result" ? "a result channel" : "a channel"], facts: facts.filter(([, value]) => value) };
  }
  const latency = node.hops.map((hop) => hop.latency).find(Boolean);
  return {
    title: node.name,
    notes: [[node.kind, ...node.hops.filter(({ reads }) => reads).map(({ reads }) => `reads ${reads}`)].join(", "), ...node.hops.map(({ note }) => note)],
    facts: [
      ["due", count(dueOf(node))],
      ...node.cuts.map(({ outcome, value }) => [outcomeName(outcome), count(value)]),
      ...["p50", "p99", "max"].filter((name) => known(latency?.[name])).map((name) => [name, durationText(latency[name])]),
    ],
  };
}
