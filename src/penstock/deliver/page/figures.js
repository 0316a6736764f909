// The key figures, the verdict, and the balance.

import { draw, element, write } from "./elements.js";
import { count, duration, known, rate } from "./format.js";
import { showVerdict, verdictOf } from "./verdict.js";

const WINDOW = 60_000;
const MOST = 30_000;
const byId = (id) => document.getElementById(id);

let latencies = [];
const rates = [];

export function tookLatencies(took) {
  const at = performance.now();
  for (const ms of took) latencies.push({ at, ms: Math.max(0, ms) });
  if (latencies.length > MOST) latencies = latencies.slice(-MOST / 2);
}

export function showLatencies() {
  const since = performance.now() - WINDOW;
  latencies = latencies.filter(({ at }) => at >= since);
  const sorted = Float64Array.from(latencies, ({ ms }) => ms).sort();
  const at = (share) => sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
  for (const [id, share] of [["p50", 0.5], ["p95", 0.95], ["p99", 0.99], ["max", 1]]) set(id, ...duration(at(share)));
}

// Inlets are nodes without an input: sources, and channels that other programs write.
export function showIntake(nodes, inlets) {
  const sources = inlets.filter((id) => nodes[id]).map((id) => nodes[id]);
  const sum = (name) => (sources.length ? sources.reduce((total, node) => total + (known(node[name]) ? node[name] : 0), 0) : NaN);
  const now = sum("rate");
  set("rate", rate(now));
  set("taken", count(sum("count")));
  byId("taken-hint").textContent =
    sources.length === 1 ? "since the last start of its source" : "since the last start of their sources";
  if (known(now)) {
    rates.push(now);
    if (rates.length > 60) rates.shift();
    spark(byId("rate-spark"), rates);
  }
}

function set(id, text, unit = "") {
  const figure = byId(id);
  if (figure.textContent === text + unit) return;
  figure.replaceChildren(text);
  if (unit) figure.append(element("span", "unit", unit));
}

function spark(svg, values) {
  if (values.length < 2) return;
  const top = Math.max(...values, 1) * 1.15;
  const points = values.map((value, at) => `${((at / (values.length - 1)) * 120).toFixed(2)},${(32 - (value / top) * 26).toFixed(2)}`);
  if (!svg.children.length) svg.append(draw("path", { class: "under" }), draw("path", { class: "over" }));
  svg.children[0].setAttribute("d", `M0,32L${points.join("L")}L120,32Z`);
  svg.children[1].setAttribute("d", `M${points.join("L")}`);
}

// --- the verdict and the balance -----------------------------------------------------------------------------------

export function showBalance(status) {
  showVerdict(byId("verdict"), verdictOf(status));
  if (status.balance) byId("balance").tBodies[0].replaceChildren(...(status.balance.channels ?? []).flatMap(rowsOf));
}

function rowsOf(channel) {
  const row = element("tr");
  const cell = (text, className = "") => row.append(element("td", className, text));
  const number = (value, className = "") => cell(count(value), value ? className : "none");
  cell(channel.channel);
  if (channel.kind === "result") {
    // Rows of a query have no sender and are only counted.
    for (const text of ["", "", count(channel.records), "", "", "", ""]) cell(text);
    return [row];
  }
  number(channel.senders);
  number(channel.claimed);
  number(channel.distinct ?? channel.records);
  number(channel.duplicates);
  number(channel.refused, "unsure");
  cell(channel.unknown_seconds ? `${rate(channel.unknown_seconds)} s` : "0", channel.unknown_seconds ? "unsure" : "none");
  number(channel.missing, "bad");
  if (!channel.gaps?.length) return [row];
  const named = element("tr");
  const ranges = element("td", "ranges");
  ranges.colSpan = 8;
  const shown = channel.gaps.slice(0, 12).map(({ sender, epoch, first, last }) => `${sender}/${epoch}: ${first === last ? first : `${first}–${last}`}`);
  const more = channel.gaps.length - shown.length;
  write(ranges, `missing ${shown.join(", ")}${more > 0 ? ` and ${count(more)} more ranges` : ""}`);
  named.append(ranges);
  return [row, named];
}
