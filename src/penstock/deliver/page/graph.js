// The pipeline as a graph, with the metrics of each node.

import { draw, write } from "./elements.js";
import { count, durationText, known, rate } from "./format.js";
import { HEIGHT, WIDTH, layout } from "./layout.js";
import { Tip } from "./tip.js";

const SILENT_AFTER = 15_000_000;
const ILL = /fail|lost|dead|error|disconnect|silent|stopp|unavailable|away/i;
const MARGIN = 4;

export class Graph {
  constructor({ nodes = [], edges = [] }, parent, tip) {
    this.nodes = new Map(nodes.map((node) => [node.id, { ...node, live: {} }]));
    this.edges = [];
    this.tip = new Tip(tip);
    if (!nodes.length) return;
    const plan = layout(nodes, edges);
    const svg = draw("svg", { class: "graph", width: plan.width + 2 * MARGIN, height: plan.height + 2 * MARGIN });
    svg.setAttribute("viewBox", `${-MARGIN} ${-MARGIN} ${plan.width + 2 * MARGIN} ${plan.height + 2 * MARGIN}`);
    for (const { from, to, path } of plan.paths) {
      const flow = draw("path", { class: "flow", d: path });
      svg.append(draw("path", { class: "edge", d: path }), flow);
      this.edges.push({ from, to, flow });
    }
    for (const node of this.nodes.values()) svg.append(this.box(node, plan.at(node.id)));
    parent.replaceChildren(svg);
  }

  box(node, { x, y }) {
    const group = draw("g", { class: `node ${node.kind}`, transform: `translate(${x},${y})`, tabindex: "0", role: "group" });
    group.dataset.node = node.id;
    node.group = group;
    node.line = draw("text", { class: "live", x: 16, y: 56 });
    const label = draw("text", { class: "label", x: 16, y: 38 });
    write(label, node.label ?? node.id, 20);
    group.append(
      draw("rect", { class: "box", width: WIDTH, height: HEIGHT, rx: 10 }),
      draw("rect", { class: "stripe", x: 0, y: 12, width: 4, height: HEIGHT - 24, rx: 2 }),
      draw("text", { class: "kind", x: 16, y: 19 }, node.kind),
      label,
      draw("circle", { class: "dot", cx: WIDTH - 15, cy: 16, r: 4 }),
      node.line,
    );
    this.tip.attach(group, () => explanation(node));
    return group;
  }

  // The last status of all processes.
  show({ nodes, processes, now }) {
    const silent = new Set();
    for (const status of Object.values(processes)) {
      if (known(status.at) && now - status.at > SILENT_AFTER) for (const id of Object.keys(status.nodes ?? {})) silent.add(id);
    }
    for (const node of this.nodes.values()) {
      node.live = nodes[node.id] ?? {};
      // The nodes of the delivery are always current.
      node.silent = silent.has(node.id) && node.kind !== "page";
      const health = node.silent || ILL.test(node.live.state ?? "") ? "ill" : nodes[node.id] ? "well" : "unknown";
      node.group.dataset.health = health;
      node.line.textContent = node.silent ? "silent" : summary(node.live);
      node.group.setAttribute("aria-label", `${node.kind} ${node.label}: ${node.line.textContent}`);
    }
    for (const { from, to, flow } of this.edges) {
      const passed = this.nodes.get(from).live.rate ?? this.nodes.get(to).live.rate;
      const flows = known(passed) && passed > 0 && !this.nodes.get(from).silent;
      flow.style.opacity = flows ? 0.9 : 0;
      // Ten times the rate is three times the speed; in steps, because the dots jump when the speed changes.
      if (flows) flow.style.setProperty("--pace", `${(1.6 / 3 ** Math.round(Math.log10(Math.max(1, passed)) - 1)).toFixed(2)}s`);
    }
    this.tip.refresh();
  }
}

function explanation(node) {
  const { live } = node;
  const facts = [
    ["state", node.silent ? "silent" : live.state],
    ["per second", known(live.rate) && rate(live.rate)],
    ["total", known(live.count) && count(live.count)],
    ["waiting", known(live.lag) && count(live.lag)],
    ...["p50", "p95", "p99", "max"].map((name) => [name, live.latency && durationText(live.latency[name])]),
  ];
  return { title: node.label ?? node.id, notes: [node.note, live.note], facts: facts.filter(([, value]) => value) };
}

function summary(live) {
  return [
    known(live.rate) && `${rate(live.rate)}/s`,
    live.latency && `p99 ${durationText(live.latency.p99)}`,
    known(live.lag) && live.lag > 0 && `${count(live.lag)} waiting`,
  ].filter(Boolean).slice(0, 2).join(" · ") || live.state || "";
}
