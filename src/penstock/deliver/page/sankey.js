// The layout of a Sankey diagram of hops: bars and ribbons. It draws nothing.
//
// A stage is a bar, divided by outcome; what passed flows to the channel that the stage writes, the rest branches off.
// A channel is a bar from which each reader gets everything, so their ribbons overlap at the start. Ribbons narrow where
// a query aggregates many records into few rows.

import { known } from "./format.js";

export const OUTCOMES = ["passed", "filtered", "late", "duplicate", "refused", "shed", "in_flight", "missing"];
export const BAR = 12;
export const STUB = 26;

const NARROWEST = 190;
const LABEL = 38;
const BETWEEN = 20;
const LINE = 17;
const FALL = 8;
const HEIGHT = 470;
const LEAST_BAR = 14;
// One record of a million is visible, too.
const LEAST = 3;

// `room` is the available width; it is exceeded if columns would be too narrow.
export function sankey(hops, channels, room) {
  const { nodes, links } = flowOf(hops, channels);
  const columns = columnsOf(nodes, links);
  const columnWidth = Math.max(NARROWEST, room / columns.length);
  const scale = scaleOf(columns);
  const px = (value) => (value > 0 ? Math.max(LEAST, value * scale) : 0);
  for (const node of nodes) measure(node, px);
  place(columns, columnWidth);
  const ribbons = links.map((link) => ribbonOf(link, px)).concat(nodes.flatMap(stubsOf));
  const bottom = Math.max(0, ...nodes.map((node) => node.top + node.height));
  return { nodes, ribbons, columnWidth, width: columns.length * columnWidth, height: bottom };
}

// --- flows ----------------------------------------------------------------------------------------------------------

function flowOf(hops, channels) {
  const nodes = new Map();
  const links = new Map();
  const sizes = new Map(channels.map((channel) => [channel.channel, channel]));
  const amount = (value) => (known(value) && value > 0 ? value : 0);
  const node = (id, kind, name) => {
    if (!nodes.has(id)) nodes.set(id, { id, kind, name, parts: {}, size: 0, hops: [], before: [], after: [], ends: true });
    return nodes.get(id);
  };
  const channel = (name) => node(`channel:${name}`, "channel", name);
  const link = (from, to) => {
    const key = JSON.stringify([from.id, to.id]);
    if (!links.has(key)) {
      links.set(key, { key, from, to, value: 0 });
      from.after.push(to);
      to.before.push(from);
    }
    return links.get(key);
  };
  for (const hop of hops) {
    const [kind, ...rest] = hop.stage.split(":");
    const stage = node(hop.stage, kind, rest.join(":") || kind);
    stage.hops.push(hop);
    for (const outcome of OUTCOMES) {
      stage.parts[outcome] = (stage.parts[outcome] ?? 0) + amount(hop.outcomes?.[outcome] ?? hop[outcome]);
    }
    if (hop.reads) link(channel(hop.reads), stage).value += amount(hop.due);
    if (hop.writes) {
      stage.ends = false;
      link(stage, channel(hop.writes)).value += amount(hop.outcomes?.passed);
    }
  }
  for (const one of nodes.values()) {
    if (one.kind !== "channel") continue;
    one.reported = sizes.get(one.name);
    const read = [...links.values()].filter(({ from }) => from === one).map(({ value }) => value);
    const written = [...links.values()].filter(({ to }) => to === one).reduce((sum, { value }) => sum + value, 0);
    // A result has fewer rows than the records that they aggregate.
    const held = one.reported?.kind === "result" ? amount(one.reported.records) : written;
    one.size = Math.max(held, ...read);
  }
  return { nodes: [...nodes.values()], links: [...links.values()] };
}

// --- positions ------------------------------------------------------------------------------------------------------

function columnsOf(nodes, links) {
  for (const node of nodes) node.depth = 0;
  // At most as many rounds as nodes, so that it ends even with a cycle.
  for (let round = 0, moved = true; moved && round < nodes.length; round++) {
    moved = false;
    for (const { from, to } of links) {
      if (to.depth <= from.depth) {
        to.depth = from.depth + 1;
        moved = true;
      }
    }
  }
  const depths = [...new Set(nodes.map(({ depth }) => depth))].sort((a, b) => a - b);
  const columns = depths.map((depth) => nodes.filter((node) => node.depth === depth));
  columns.forEach((column, at) => {
    for (const node of column) node.column = at;
    // Near its inputs; equal ones in the order of the sheet.
    const wish = new Map(column.map((node) => [node, mean(node.before.map((from) => from.rank ?? 0))]));
    column.sort((a, b) => wish.get(a) - wish.get(b));
    column.forEach((node, rank) => (node.rank = rank));
  });
  return columns;
}

// Pixels per record: the fullest column fills the height.
function scaleOf(columns) {
  const scales = columns.map((column) => {
    const fixed = column.reduce((sum, node) => sum + LABEL + BETWEEN + branches(node).length * LINE, 0);
    const room = Math.max(HEIGHT - fixed, column.length * LEAST_BAR * 2);
    const size = column.reduce((sum, node) => sum + (node.size || partsSize(node)), 0);
    return size ? room / size : Infinity;
  });
  const least = Math.min(Infinity, ...scales);
  return Number.isFinite(least) ? least : 0;
}

const partsSize = (node) => OUTCOMES.reduce((sum, outcome) => sum + (node.parts[outcome] ?? 0), 0);
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0);

// The branches that end at a stage; at the last stage, also what passed.
function branches(node) {
  return OUTCOMES.filter((outcome) => node.parts[outcome] > 0 && (outcome !== "passed" || node.ends));
}

function measure(node, px) {
  let down = 0;
  node.cuts = OUTCOMES.filter((outcome) => node.parts[outcome] > 0).map((outcome) => {
    const cut = { outcome, value: node.parts[outcome], y: down, size: px(node.parts[outcome]) };
    down += cut.size;
    return cut;
  });
  node.bar = Math.max(LEAST, down, px(node.size));
  let free = 0;
  node.stubs = node.cuts.filter((cut) => cut.outcome !== "passed" || node.ends).map((cut) => {
    const at = Math.max(free, cut.y + (cut.outcome === "passed" && cut.size > LINE ? 0 : FALL));
    free = at + Math.max(cut.size, LINE);
    return { ...cut, at };
  });
  node.height = LABEL + Math.max(node.bar, free);
}

function place(columns, columnWidth) {
  const full = (column) => column.reduce((sum, node) => sum + node.height + BETWEEN, 0);
  const widest = columns.reduce((best, column, at) => (full(column) > full(columns[best]) ? at : best), 0);
  columns.forEach((column, at) => {
    for (const node of column) node.x = at * columnWidth;
  });
  const spread = (column, wish) => {
    const wanted = column.map(wish);
    let free = -Infinity;
    column.forEach((node, at) => {
      node.top = Math.max(wanted[at], free);
      free = node.top + node.height + BETWEEN;
    });
    // Nodes were pushed down only: move the column back to its average position.
    const drift = mean(column.map((node, at) => node.top - wanted[at]));
    for (const node of column) node.top -= drift;
  };
  if (!columns.length) return;
  spread(columns[widest], () => 0);
  for (let at = widest + 1; at < columns.length; at++) spread(columns[at], (node) => mean(node.before.map(({ top }) => top)));
  for (let at = widest - 1; at >= 0; at--) {
    spread(columns[at], (node) => {
      const near = node.after.filter(({ column }) => column > at);
      if (near.length === 1) return near[0].top;
      return near.length ? mean(near.map((to) => to.top + LABEL + to.bar / 2)) - node.bar / 2 - LABEL : 0;
    });
  }
  const nodes = columns.flat();
  const highest = Math.min(...nodes.map(({ top }) => top));
  for (const node of nodes) {
    node.top -= highest;
    node.y = node.top + LABEL;
  }
}

// --- ribbons --------------------------------------------------------------------------------------------------------

function ribbonOf({ key, from, to, value }, px) {
  const out = from.kind === "channel" ? Math.min(from.bar, px(value)) : px(value);
  const share = shareOf(from, to);
  const outcome = "passed";
  return {
    key, outcome, value, from: from.id, to: to.id,
    path: ribbon(from.x + BAR, from.y, Math.max(1, out), to.x, to.y + share.y, Math.max(1, share.size)),
  };
}

// The part of a bar that belongs to one of its inputs.
function shareOf(from, to) {
  const weight = (node) => (node.kind === "channel" ? to.hops.filter((hop) => hop.reads === node.name).reduce((sum, hop) => sum + (hop.due || 0), 0) : node.parts.passed ?? 0);
  const all = to.before.reduce((sum, node) => sum + weight(node), 0);
  let y = 0;
  for (const node of to.before) {
    const size = all ? (weight(node) / all) * to.bar : to.bar / to.before.length;
    if (node === from) return { y, size };
    y += size;
  }
  return { y: 0, size: to.bar };
}

function stubsOf(node) {
  return node.stubs.map(({ outcome, value, y, size, at }) => ({
    key: JSON.stringify([node.id, outcome]), outcome, value, from: node.id, to: "",
    path: ribbon(node.x + BAR, node.y + y, size, node.x + BAR + STUB, node.y + at, size),
  }));
}

function ribbon(x, y, size, toX, toY, toSize) {
  const middle = (x + toX) / 2;
  const n = (value) => value.toFixed(1);
  return `M${n(x)},${n(y)}C${n(middle)},${n(y)} ${n(middle)},${n(toY)} ${n(toX)},${n(toY)}`
    + `V${n(toY + toSize)}C${n(middle)},${n(toY + toSize)} ${n(middle)},${n(y + size)} ${n(x)},${n(y + size)}Z`;
}
