// One chart: a Vega view whose rows follow a feed.

import { element } from "./elements.js";
import { count, durationText } from "./format.js";
import { drawReadably, readable } from "./glyphs.js";

const REDRAW_EVERY = 250;
// The pause after drawing, as a multiple of its duration, so that a slow machine has time for the rows.
const PAUSE = 20;
// Only errors: Vega warns about charts without rows.
const ERRORS = 1;
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const COMPOSED = ["hconcat", "vconcat", "concat", "facet", "repeat"];

drawReadably();

export class Chart {
  constructor(spec, feed, parent) {
    this.spec = spec;
    this.feed = feed;
    this.shown = new Map();
    this.pending = new Set();
    this.due = 0;
    this.busy = false;
    this.element = element("figure", "chart");
    this.element.dataset.chart = spec.name;
    this.plot = element("div", "plot");
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", `${spec.title}. ${spec.doc}`);
    this.foot = element("div", "foot");
    this.foot.append(element("span"), element("span"));
    this.element.append(element("h2", "", spec.title), element("p", "doc", spec.doc), this.plot, this.foot);
    parent.append(this.element);
  }

  // Draw the chart at the start, and when the colours change.
  async draw() {
    this.view?.finalize();
    this.view = null;
    try {
      const { view } = await window.vegaEmbed(this.plot, fitted(this.spec.spec, this.plot), {
        mode: "vega-lite",
        actions: false,
        renderer: "canvas",
        ast: true,
        logLevel: ERRORS,
        defaultStyle: false,
        tooltip: { disableDefaultStyle: true, sanitize: (value) => escaped(readable(String(value))) },
        config: theme(),
      });
      this.shown.clear();
      this.pending = new Set(this.feed.rows.keys());
      this.view = view;
    } catch (problem) {
      this.plot.replaceChildren(element("p", "broken", `This chart cannot be drawn: ${problem.message}`));
    }
  }

  changed(names) {
    for (const name of names) this.pending.add(name);
  }

  // Called for each animation frame; redraws changes at most four times a second.
  async frame(now) {
    if (!this.view || this.busy || !this.pending.size || now < this.due) return;
    this.busy = true;
    const began = performance.now();
    const gone = new Set();
    const come = [];
    for (const name of this.pending) {
      const before = this.shown.get(name);
      const after = this.feed.rows.get(name);
      if (before === after) continue;
      if (before) gone.add(before);
      if (after) {
        come.push(after);
        this.shown.set(name, after);
      } else this.shown.delete(name);
    }
    this.pending.clear();
    const change = changeset(this.view).remove((row) => gone.has(row)).insert(come);
    try {
      await this.view.change("rows", change).runAsync();
    } finally {
      this.busy = false;
      this.due = now + Math.max(REDRAW_EVERY, PAUSE * (performance.now() - began));
    }
    const [rows, latency] = this.foot.children;
    rows.textContent = `${count(this.feed.rows.size)} rows`;
    latency.textContent = this.feed.latest === null ? "" : `${durationText(this.feed.latest)} behind the sender`;
  }
}

// The bundle does not export Vega's changeset(), but a view creates one when it inserts rows.
function changeset(view) {
  let made;
  const probe = Object.create(view, { pulse: { value: (_, change) => (made = change) } });
  probe.insert("rows", []);
  return made;
}

function fitted(spec, plot) {
  if (COMPOSED.some((word) => word in spec)) return spec;
  return {
    width: "container",
    height: plot.clientHeight,
    autosize: { type: "fit", contains: "padding", resize: true },
    ...spec,
  };
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: "transparent",
    font,
    padding: 2,
    view: { stroke: null },
    mark: { color: colour("accent") },
    bar: { cornerRadiusEnd: 3, color: colour("accent") },
    line: { strokeWidth: 2.2, strokeCap: "round" },
    area: { opacity: 0.75 },
    geoshape: { fill: colour("grid"), stroke: colour("line"), strokeWidth: 0.6 },
    axis: {
      labelColor: colour("muted"),
      titleColor: colour("muted"),
      titleFontWeight: 500,
      labelFontSize: 11.5,
      titleFontSize: 11.5,
      domain: false,
      ticks: false,
      labelPadding: 6,
      gridColor: colour("grid"),
      labelLimit: 140,
    },
    axisY: { minExtent: 34 },
    legend: { labelColor: colour("muted"), titleColor: colour("muted"), labelFontSize: 11.5, titleFontSize: 11.5, symbolType: "circle" },
    text: { color: colour("ink") },
    title: { color: colour("ink"), anchor: "start" },
    range: {
      category: ["accent", "query", "channel", "store", "page", "warn", "bad", "faint"].map(colour),
      ramp: [colour("accent-soft"), colour("accent")],
      heatmap: [colour("accent-soft"), colour("accent")],
    },
  };
}
