// The queries: Spark's report of the last batch of each, and its age.

import { element, keep, namedRow, write } from "./elements.js";
import { count, durationText, known, lapse, rate, size } from "./format.js";

const QUERY = "query:";

export function showQueries(card, table, { nodes, now }) {
  const queries = Object.entries(nodes).filter(([id, { times }]) => id.startsWith(QUERY) && times);
  card.hidden = !queries.length;
  keep(table.tBodies[0], queries.sort(([a], [b]) => a.localeCompare(b)), {
    key: ([id]) => id,
    make: namedRow,
    show: (row, [id, figures]) => showRow(row, id.slice(QUERY.length), figures, now),
  });
}

function showRow(row, name, figures, now) {
  const [label, mode] = row.cells[0].children;
  write(label, name.replaceAll("_", " "));
  write(mode, figures.mode ?? "");
  cells(figures, now).forEach(([text, className = "", below = ""], at) => {
    const cell = row.cells[at + 1] ?? twoLines(row.insertCell());
    write(cell.children[0], text);
    write(cell.children[1], below);
    if (cell.className !== className) cell.className = className;
  });
}

function twoLines(cell) {
  cell.append(element("span"), element("small"));
  return cell;
}

const number = (value, warning = "") => (known(value) ? [count(value), value ? warning : "none"] : unknown);
const time = (ms) => (known(ms) ? [durationText(ms)] : unknown);
const unknown = ["–", "none"];

function stateSize({ memory, disk, rows }) {
  return [size(memory + disk), known(rows) && `${count(rows)} rows`].filter(Boolean).join(", ");
}

function cells({ rate_in: rateIn, rate: rateOut, lag, late, times, store, behind, skew, at }, now) {
  const parts = [times.planning, times.work, times.commit];
  return [
    [rate(rateIn)],
    [rate(rateOut)],
    number(lag),
    number(late, "unsure"),
    [durationText(times.all), "", parts.map(durationText).join(" · ")],
    store ? [stateSize(store), "", durationText(store.restored)] : ["none", "none"],
    store?.hits + store?.misses > 0 ? [`${count((100 * store.hits) / (store.hits + store.misses))} %`] : unknown,
    time(behind),
    time(skew),
    known(at) ? [`${lapse((now - at) / 1_000)} ago`] : unknown,
  ];
}
