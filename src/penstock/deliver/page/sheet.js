// The balance sheet: each hop and each path through the pipeline, and remarks.

import { element, keep, namedRow, write } from "./elements.js";
import { count, durationText, known, rate } from "./format.js";
import { OUTCOMES } from "./sankey.js";

const LATENCIES = ["min", "mean", "p50", "p99", "max"];
const NAMED = 100;
const WARNINGS = { late: "unsure", refused: "unsure", shed: "unsure", missing: "bad" };

export function showSheet(table, { hops, paths }) {
  showRows(table, hops, paths, (hop) => [
    [count(hop.due)],
    ...OUTCOMES.map((outcome) => {
      const value = hop.outcomes?.[outcome] ?? hop[outcome] ?? 0;
      return [count(value), value ? (WARNINGS[outcome] ?? "") : "none"];
    }),
  ]);
}

export function showLatencies(table, { hops, paths }) {
  const times = (summary) => LATENCIES.map((name) => (known(summary?.[name]) ? [durationText(summary[name])] : ["–", "none"]));
  const timed = ({ latency, step }) => latency || step;
  showRows(table, hops.filter(timed), paths.filter(timed), (hop) => [...times(hop.latency), ...times(hop.step)]);
}

function showRows(table, hops, paths, cells) {
  [hops, paths].forEach((some, at) => {
    const body = table.tBodies[at];
    const rows = some.map((hop) => ({ hop, cells: cells(hop) }));
    keep(body, [{ title: ["Each hop", "End to end"][at] }, ...rows], {
      key: ({ hop, title }) => (hop ? JSON.stringify([hop.stage, hop.reads, hop.writes]) : title),
      make: ({ title }) => (title ? heading(title, table) : namedRow()),
      show: (row, item) => item.hop && showRow(row, item),
    });
    body.hidden = !some.length;
  });
}

function heading(title, table) {
  const row = element("tr", "part");
  const cell = element("th", "", title);
  cell.scope = "rowgroup";
  cell.colSpan = [...table.tHead.rows].at(-1).cells.length;
  row.append(cell);
  return row;
}

function showRow(row, { hop, cells }) {
  const [name, reads] = row.cells[0].children;
  write(name, hop.stage.replaceAll(/(^|→ )(\w+):/g, "$1$2 "));
  write(reads, hop.reads ? `reads ${hop.reads}` : "");
  row.dataset.missing = hop.missing ? "yes" : "no";
  cells.forEach(([text, className = ""], at) => {
    const cell = row.cells[at + 1] ?? row.insertCell();
    write(cell, text);
    if (cell.className !== className) cell.className = className;
  });
}

// --- remarks --------------------------------------------------------------------------------------------------------

export function showFindings(list, { hops, channels, discrepancies, doubts }) {
  const items = [...missing(hops.length ? hops : channels), ...findings(discrepancies, doubts), ...remarks(hops, channels)];
  keep(list, items, {
    key: ({ key }) => key,
    make: () => element("li"),
    show: (item, { text, kind }) => {
      item.className = kind;
      write(item, text);
    },
  });
  list.hidden = !items.length;
}

function missing(parts) {
  return parts.flatMap(({ stage, channel, missing: all, gaps }) => {
    const at = stage ?? channel;
    const named = (gaps ?? []).slice(0, NAMED);
    const ranges = named.map(({ sender, epoch, first, last }) => ({
      key: JSON.stringify([at, sender, epoch, first]),
      kind: "bad",
      text: `${at} misses ${sender}/${epoch}: ${first === last ? first : `${first}–${last} (${count(last - first + 1)} records)`}`,
    }));
    const rest = (all || 0) - named.reduce((sum, { first, last }) => sum + last - first + 1, 0);
    const more = named.length ? " more" : "";
    const text = `${at} misses ${count(rest)}${more} ${rest === 1 ? "record that is" : "records that are"} not listed here`;
    return rest > 0 ? [...ranges, { key: JSON.stringify([at, "rest"]), kind: "bad", text }] : ranges;
  });
}

// Discrepancies, and reasons for an unknown verdict.
function findings(discrepancies, doubts) {
  const wrong = (discrepancies ?? []).map(({ kind, stage, text, examples }) => ({
    key: JSON.stringify([kind, stage]),
    kind: "bad",
    text: `${kind}: ${text}${examples?.length ? `: ${examples.join(", ")}` : ""}`,
  }));
  const unknown = (doubts ?? []).map(({ kind, subject, text }) => ({
    key: JSON.stringify(["doubt", kind, subject]),
    kind: "unsure",
    text: `not known: ${text}`,
  }));
  return [...wrong, ...unknown];
}

function remarks(hops, channels) {
  const items = [];
  const remark = (subject, text) => items.push({ key: JSON.stringify([subject, text.replaceAll(/\d/g, "")]), kind: "unsure", text: `${subject}: ${text}` });
  for (const { stage, note } of hops) if (note) remark(stage, note);
  for (const { channel, unread, without_identity: nameless, unknown_seconds: unknown } of channels) {
    if (unread) remark(channel, `${count(unread)} records are not read yet and count as in flight`);
    if (nameless) remark(channel, `${count(nameless)} entries have no identity and can only be counted`);
    if (unknown) remark(channel, `an outage of ${rate(unknown)} s; the source cannot replay, so the records of that time are unknown`);
  }
  return items;
}
