// The pipeline as a graph, with what each hop measures.

import { count, durationText, known, rate } from "./format.js";
import { HEIGHT, WIDTH, layout } from "./layout.js";

const SILENT_AFTER = 15_000_000;
const ILL = /fail|lost|dead|error|disconnect|silent|stopp|unavailable|away/i;
const MARGIN = 4;

export class Graph {
  constructor({ nodes = [], edges = [] }, parent, tip) {
    this.nodes = new Map(nodes.map((node) => [node.id, { ...node, live: {} }]));
    this.edges = [];
    this.tip = tip;
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
    group.append(
      draw("rect", { class: "box", width: WIDTH, height: HEIGHT, rx: 10 }),
      draw("rect", { class: "stripe", x: 0, y: 12, width: 4, height: HEIGHT - 24, rx: 2 }),
      draw("text", { class: "kind", x: 16, y: 19 }, node.kind),
      draw("text", { class: "label", x: 16, y: 38 }, short(node.label ?? node.id, 20)),
      draw("circle", { class: "dot", cx: WIDTH - 15, cy: 16, r: 4 }),
      node.line,
    );
    for (const event of ["pointerenter", "focus"]) group.addEventListener(event, () => this.explain(node));
    for (const event of ["pointerleave", "blur"]) group.addEventListener(event, () => this.hush());
    return group;
  }

  // What all processes said last.
  show({ nodes, processes, now }) {
    const silent = new Set();
    for (const said of Object.values(processes)) {
      if (known(said.at) && now - said.at > SILENT_AFTER) for (const id of Object.keys(said.nodes ?? {})) silent.add(id);
    }
    for (const node of this.nodes.values()) {
      node.live = nodes[node.id] ?? {};
      // The page's own figures come with the answer itself.
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
      // Ten times the rate is three times the speed; changed in steps, for a new pace makes the dots jump.
      if (flows) flow.style.setProperty("--pace", `${(1.6 / 3 ** Math.round(Math.log10(Math.max(1, passed)) - 1)).toFixed(2)}s`);
    }
    if (this.explained) this.explain(this.explained);
  }

  explain(node) {
    this.explained = node;
    const { live } = node;
    const facts = [
      ["state", node.silent ? "silent" : live.state],
      ["per second", known(live.rate) && rate(live.rate)],
      ["in total", known(live.count) && count(live.count)],
      ["waiting", known(live.lag) && count(live.lag)],
      ...["p50", "p95", "p99", "max"].map((name) => [name, live.latency && durationText(live.latency[name])]),
    ].filter(([, value]) => value);
    const title = document.createElement("strong");
    title.textContent = node.label ?? node.id;
    const list = document.createElement("dl");
    for (const [name, value] of facts) {
      list.append(document.createElement("dt"), document.createElement("dd"));
      list.lastChild.textContent = value;
      list.children[list.children.length - 2].textContent = name;
    }
    const notes = [node.note, live.note].filter(Boolean).map((text) => {
      const note = document.createElement("p");
      note.textContent = text;
      return note;
    });
    this.tip.replaceChildren(title, ...notes, list);
    this.tip.hidden = false;
    const box = node.group.getBoundingClientRect();
    const own = this.tip.getBoundingClientRect();
    const below = box.bottom + 8 + own.height < innerHeight;
    this.tip.style.left = `${Math.max(12, Math.min(innerWidth - own.width - 12, box.left))}px`;
    this.tip.style.top = `${below ? box.bottom + 8 : Math.max(12, box.top - own.height - 8)}px`;
  }

  hush() {
    this.explained = null;
    this.tip.hidden = true;
  }
}

function summary(live) {
  return [
    known(live.rate) && `${rate(live.rate)}/s`,
    live.latency && `p99 ${durationText(live.latency.p99)}`,
    known(live.lag) && live.lag > 0 && `${count(live.lag)} waiting`,
  ].filter(Boolean).slice(0, 2).join(" · ") || live.state || "";
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function draw(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}
