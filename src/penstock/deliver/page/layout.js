// The layout of a graph: layers from left to right, ordered so that few edges cross.

export const WIDTH = 172;
export const HEIGHT = 68;
const ACROSS = 64;
const BETWEEN = 20;
const SWEEPS = 8;

export function layout(nodes, edges) {
  const known = new Set(nodes.map(({ id }) => id));
  edges = edges.filter(([from, to]) => known.has(from) && known.has(to) && from !== to);
  const depth = depths(nodes, edges);
  const layers = [];
  const places = new Map();
  const place = (id, at, height) => {
    const made = { id, layer: at, height, y: 0, before: [], after: [] };
    (layers[at] ??= []).push(made);
    places.set(id, made);
    return made;
  };
  for (const { id } of nodes) place(id, depth.get(id), HEIGHT);
  const routes = edges.map(([from, to], number) => route(from, to, number, places, place));
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const forward = sweep % 2 === 0;
    for (const layer of forward ? layers : [...layers].reverse()) order(layer, forward ? "before" : "after");
  }
  settle(layers);
  const height = Math.max(...layers.flat().map(({ y, height }) => y + height));
  return {
    width: layers.length * WIDTH + (layers.length - 1) * ACROSS,
    height,
    at: (id) => ({ x: left(places.get(id).layer), y: places.get(id).y }),
    paths: edges.map(([from, to], number) => ({ from, to, path: curve(routes[number].map((id) => places.get(id))) })),
  };
}

const left = (layer) => layer * (WIDTH + ACROSS);

// The longest path from a start; edges that close a cycle are ignored.
function depths(nodes, edges) {
  const before = new Map(nodes.map(({ id }) => [id, []]));
  for (const [from, to] of edges) before.get(to).push(from);
  const depth = new Map();
  const visit = (id, path) => {
    if (depth.has(id)) return depth.get(id);
    if (path.has(id)) return -1;
    path.add(id);
    const found = Math.max(-1, ...before.get(id).map((from) => visit(from, path))) + 1;
    path.delete(id);
    depth.set(id, found);
    return found;
  };
  for (const { id } of nodes) visit(id, new Set());
  return depth;
}

// An edge over several layers gets a slot in each of them, so that it does not run behind a node.
function route(from, to, number, places, place) {
  const ids = [from];
  const first = places.get(from).layer;
  const last = places.get(to).layer;
  for (let at = first + 1; at < last; at++) ids.push(place(`${number}@${at}`, at, 6).id);
  ids.push(to);
  for (let at = 1; at < ids.length; at++) {
    places.get(ids[at - 1]).after.push(places.get(ids[at]));
    places.get(ids[at]).before.push(places.get(ids[at - 1]));
  }
  return ids;
}

function order(layer, side) {
  const wanted = new Map(layer.map((node, at) => [node, node[side].length ? mean(node[side].map(({ rank }) => rank ?? 0)) : (node.rank ?? at)]));
  layer.sort((a, b) => wanted.get(a) - wanted.get(b));
  layer.forEach((node, at) => (node.rank = (at + 0.5) / layer.length));
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const middle = (node) => node.y + node.height / 2;

// Pull each node towards its neighbours, and separate overlapping ones.
function settle(layers) {
  for (const layer of layers) spread(layer, layer.map((_, at) => at * (HEIGHT + BETWEEN)));
  for (let sweep = 0; sweep < SWEEPS * 2; sweep++) {
    for (const layer of sweep % 2 ? [...layers].reverse() : layers) {
      spread(layer, layer.map((node) => {
        const near = [...node.before, ...node.after];
        return near.length ? mean(near.map(middle)) - node.height / 2 : node.y;
      }));
    }
  }
  const top = Math.min(...layers.flat().map(({ y }) => y));
  for (const node of layers.flat()) node.y -= top;
}

function spread(layer, wanted) {
  let free = -Infinity;
  layer.forEach((node, at) => {
    node.y = Math.max(wanted[at], free);
    free = node.y + node.height + BETWEEN;
  });
  // Nodes were pushed down only: move the layer back to its average position.
  const drift = mean(layer.map((node, at) => node.y - wanted[at]));
  for (const node of layer) node.y -= drift;
}

function curve(nodes) {
  let path = "";
  nodes.forEach((node, at) => {
    const y = middle(node).toFixed(1);
    const x = left(node.layer);
    if (at === 0) path = `M${x + WIDTH},${y}`;
    else {
      const from = left(nodes[at - 1].layer) + WIDTH;
      const bend = (x - from) / 2;
      path += `C${from + bend},${middle(nodes[at - 1]).toFixed(1)} ${x - bend},${y} ${x},${y}`;
      if (at < nodes.length - 1) path += `L${x + WIDTH},${y}`;
    }
  });
  return path;
}
