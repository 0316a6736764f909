// The page: loads the charts and the graph, follows the feeds, and polls the status.

import { get, poll } from "./poll.js";
import { Chart } from "./chart.js";
import { browserNow } from "./clock.js";
import { element, write } from "./elements.js";
import { Feed } from "./feed.js";
import { showBalance, showIntake, showLatencies, tookLatencies } from "./figures.js";
import { Graph } from "./graph.js";
import { showQueries } from "./queries.js";
import { Rows } from "./rows.js";

const PING_EVERY = 5_000;

const byId = (id) => document.getElementById(id);
const feeds = new Map();
const charts = [];
let graph = null;
let inlets = [];

function feedOf(name) {
  if (!feeds.has(name)) {
    // The latency at the top is that of the first chart.
    const first = feeds.size === 0;
    feeds.set(name, new Feed(name, {
      onChange: (feed, names) => charts.filter((chart) => chart.feed === feed).forEach((chart) => chart.changed(names)),
      onLatency: first ? tookLatencies : () => {},
      onState: (feed) => {
        if (feed.state === "live") ping(feed, 3);
        showConnection();
      },
    }));
  }
  return feeds.get(name);
}

async function prepare() {
  const [specs, plan] = await Promise.all([get("/charts"), get("/graph")]);
  graph = new Graph(plan, byId("graph"), byId("tip"));
  const { nodes = [], edges = [] } = plan;
  inlets = nodes.map(({ id }) => id).filter((id) => !edges.some(([, to]) => to === id));
  if (specs.length) byId("latency-hint").textContent = `${specs[0].title.toLowerCase()}, the last minute`;
  for (const spec of specs) charts.push(new (spec.spec ? Chart : Rows)(spec, feedOf(spec.feed), byId("charts")));
  byId("feeds").replaceChildren(...[...feeds.keys()].map((name) => {
    const link = element("a", "", `feeds/${name}`);
    link.href = `/feeds/${encodeURIComponent(name)}`;
    return link;
  }));
  await Promise.all(charts.map((chart) => chart.draw()));
  byId("charts").removeAttribute("aria-busy");
}

// The only request that is repeated while the server is unreachable. Feeds connect after a response, so an outage costs
// one failed request at a time, not one per feed.
async function refresh() {
  if (!graph) await prepare();
  const status = await get("/status");
  for (const feed of feeds.values()) feed.connect();
  graph.show(status);
  showIntake(status.nodes, inlets);
  showQueries(byId("queries-card"), byId("queries"), status);
  showBalance(status);
  showConnection();
}

function ping(feed, times) {
  feed.ping(browserNow());
  if (times > 1) setTimeout(() => ping(feed, times - 1), 150);
}

function showConnection(trouble = "") {
  const lost = [...feeds.values()].filter((feed) => feed.state === "lost").map((feed) => feed.name);
  const live = [...feeds.values()].filter((feed) => feed.state === "live").length;
  const line = byId("connection");
  const text = trouble || (lost.length ? `reconnecting to ${lost.join(", ")}` : live < feeds.size ? "connecting…" : `live · ${live} ${live === 1 ? "feed" : "feeds"}`);
  line.dataset.state = trouble || lost.length ? "lost" : live < feeds.size ? "connecting" : "live";
  write(line.querySelector("span"), text);
}

function frame(now) {
  for (const chart of charts) chart.frame(now);
  requestAnimationFrame(frame);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.draw()));
setInterval(showLatencies, 500);
setInterval(() => {
  const live = [...feeds.values()].find((feed) => feed.state === "live");
  if (live) ping(live, 1);
}, PING_EVERY);
requestAnimationFrame(frame);
poll(refresh, showConnection);
