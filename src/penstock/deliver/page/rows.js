// The rows of a feed as a table, for a page without a chart.

import { Chart } from "./chart.js";
import { element, keep, write } from "./elements.js";
import { count } from "./format.js";

const REDRAW_EVERY = 500;
const MAX_ROWS = 100;
const MAX_TEXT = 60;
// Of seen(), only the number of records is shown.
const HIDDEN = new Set(["seen_newest"]);
const NAMES = { seen_count: "records" };

export class Rows extends Chart {
  constructor(spec, feed, parent) {
    super(spec, feed, parent);
    this.plot.className = "plot rows";
    this.plot.setAttribute("role", "region");
    this.plot.tabIndex = 0;
    this.head = element("tr");
    this.body = element("tbody");
    const head = element("thead");
    head.append(this.head);
    const table = element("table");
    table.append(head, this.body);
    this.plot.append(table);
  }

  async draw() {
    this.pending = new Set([""]);
  }

  async frame(now) {
    if (!this.pending.size || now < this.due) return;
    this.pending.clear();
    this.due = now + REDRAW_EVERY;
    const { rows, timestamps } = this.feed;
    const columns = [...new Set([...rows.values()].flatMap(Object.keys))].filter((name) => !HIDDEN.has(name));
    const newestFirst = timestamps.has(columns[0]) ? -1 : 1;
    const names = [...rows.keys()].sort((one, other) => newestFirst * (one < other ? -1 : one > other ? 1 : 0));
    keep(this.head, columns, {
      key: (name) => name,
      make: () => element("th"),
      show: (made, name) => {
        made.classList.toggle("text", typeof rows.get(names[0])[name] !== "number");
        write(made, NAMES[name] ?? name);
      },
    });
    keep(this.body, names.slice(0, MAX_ROWS), {
      key: (name) => name,
      make: () => element("tr"),
      show: (made, name) => this.show(made, columns, rows.get(name), timestamps),
    });
    const [shown] = this.foot.children;
    write(shown, rows.size > MAX_ROWS ? `${count(MAX_ROWS)} of ${count(rows.size)} rows` : `${count(rows.size)} rows`);
  }

  show(made, columns, row, timestamps) {
    keep(made, columns, {
      key: (name) => name,
      make: () => element("td"),
      show: (cell, name) => {
        cell.classList.toggle("text", typeof row[name] !== "number");
        write(cell, text(row[name], timestamps.has(name)), MAX_TEXT);
      },
    });
  }
}

function text(value, timestamp) {
  if (value === null || value === undefined) return "–";
  // The Swedish locale writes 2026-01-05 09:00:10.
  if (timestamp) return new Date(value).toLocaleString("sv");
  if (typeof value === "number") return Number.isInteger(value) ? `${value}` : `${Number(value.toPrecision(6))}`;
  return typeof value === "string" ? value : JSON.stringify(value);
}
